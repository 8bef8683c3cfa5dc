"""Key-value buckets on a real server, for tests: made and written with plain JetStream requests.

Each function is one short connection of its own, in a loop of its own, so it can be called from a
test, from a callback of Spark's and from a running event loop alike. Each write awaits its PubAck
and returns the revision.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import nats.errors
import pytest
from nats.aio.client import Client

from tests.support.event_loop import run

T = TypeVar("T")

DEL = {"KV-Operation": "DEL"}
PURGE = {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}

Message = tuple[str, bytes, dict[str, str] | None]
"""A subject, a payload, headers."""

_IN_FLIGHT = 500
_MOST_ACK = 300.0  # seconds; a lost PubAck must not hang a test
_REPEATABLE = (
    *("STREAM.CREATE.", "STREAM.INFO.", "STREAM.NAMES", "INFO"),
    *("CONSUMER.CREATE.", "CONSUMER.INFO.", "CONSUMER.LIST.", "CONSUMER.NAMES."),
)
_TEMPORARILY_UNAVAILABLE = 10008
_CLOSE_DEADLINE = 10.0


def bucket_config(name: str, history: int = 1, **config: Any) -> dict[str, Any]:
    """The configuration of the stream ``KV_<name>`` as ADR-8 has it; ``config`` overrides."""
    return {
        "name": f"KV_{name}",
        "subjects": [f"$KV.{name}.>"],
        "max_msgs_per_subject": history,
        "discard": "new",
        "allow_rollup_hdrs": True,
        "allow_direct": True,
        "deny_delete": True,
        **config,
    }


def create_bucket(url: str, name: str, history: int = 1, **config: Any) -> dict[str, Any]:
    """Create the bucket ``name``; the server's response (``config``, ``created``, ``state``)."""
    wanted = bucket_config(name, history, **config)
    return api(url, f"STREAM.CREATE.KV_{name}", wanted)


def fill_bucket(
    url: str, name: str, entries: Iterable[tuple[str, bytes]], history: int = 1, **config: Any
) -> None:
    """Create the bucket ``name`` and put ``entries`` into it, as :func:`put_many` does."""
    create_bucket(url, name, history, **config)
    put_many(url, name, entries)


def delete_bucket(url: str, name: str) -> None:
    api(url, f"STREAM.DELETE.KV_{name}")


def bucket_info(url: str, name: str) -> dict[str, Any]:
    return api(url, f"STREAM.INFO.KV_{name}")


def bucket_state(url: str, name: str) -> dict[str, Any]:
    """``state`` of the bucket's stream: ``first_seq``, ``last_seq``, ``messages``, …"""
    state: dict[str, Any] = bucket_info(url, name)["state"]
    return state


def consumers(url: str, name: str) -> list[str]:
    """The names of the consumers that the bucket's stream has now."""
    return consumers_of(url, f"KV_{name}")


def consumers_of(url: str, stream: str) -> list[str]:
    return list(api(url, f"CONSUMER.NAMES.{stream}").get("consumers") or [])


def put(url: str, name: str, key: str, value: bytes, headers: dict[str, str] | None = None) -> int:
    return publish(url, [(f"$KV.{name}.{key}", value, headers)])[0]


def delete(url: str, name: str, key: str) -> int:
    """Write a DEL marker."""
    return publish(url, [(f"$KV.{name}.{key}", b"", DEL)])[0]


def purge(url: str, name: str, key: str) -> int:
    """Write a PURGE marker, which rolls the key's earlier revisions up."""
    return publish(url, [(f"$KV.{name}.{key}", b"", PURGE)])[0]


def put_many(url: str, name: str, entries: Iterable[tuple[str, bytes]]) -> list[int]:
    """Put many values in order, with many PubAcks awaited at once."""
    return publish(url, ((f"$KV.{name}.{key}", value, None) for key, value in entries))


def publish(url: str, messages: Iterable[Message]) -> list[int]:
    """Publish messages in order; their stream sequences. TimeoutError without a PubAck."""

    async def work(client: Client) -> list[int]:
        jetstream = client.jetstream()
        sequences: list[int] = []
        batch: list[Any] = []
        for subject, payload, headers in messages:
            batch.append(await jetstream.publish_async(subject, payload, headers=headers))
            if len(batch) == _IN_FLIGHT:
                sequences += await acknowledged(batch)
                batch.clear()
        return sequences + await acknowledged(batch)

    async def acknowledged(batch: list[Any]) -> list[int]:
        acks = await asyncio.wait_for(asyncio.gather(*batch), _MOST_ACK)
        return [ack.seq for ack in acks]

    return with_client(url, work)


def api(
    url: str,
    subject: str,
    request: dict[str, Any] | None = None,
    *,
    prefix: str = "$JS.API",
    timeout: float = 10,
) -> dict[str, Any]:
    """One JetStream API request; RuntimeError when the server responds with an error.

    A request that may be repeated is sent a second time without a response: the first one on a new
    connection to a cluster can get lost, when the server that answers does not know the inbox yet.
    Within the timeout it is repeated where a cluster elects a leader.
    """
    repeatable = subject.startswith(_REPEATABLE)

    async def send(client: Client) -> dict[str, Any]:
        payload = json.dumps(request).encode() if request is not None else b""
        try:
            message = await client.request(f"{prefix}.{subject}", payload, timeout)
        except nats.errors.TimeoutError:
            if not repeatable:
                raise
            message = await client.request(f"{prefix}.{subject}", payload, timeout)
        return dict(json.loads(message.data))

    async def work(client: Client) -> dict[str, Any]:
        end = time.monotonic() + timeout
        while "error" in (found := await send(client)):
            elects = repeatable and found["error"].get("err_code") == _TEMPORARILY_UNAVAILABLE
            if not elects or time.monotonic() > end:
                raise RuntimeError(f"{subject}: {found['error']}")
            await asyncio.sleep(0.1)
        return found

    return with_client(url, work)


class _Client(Client):
    """Keeps no socket of an attempt to connect that failed; nats-py drops it as it is."""

    async def _connect_to_server(self, s: Any) -> None:
        self.abort()
        await super()._connect_to_server(s)

    def abort(self) -> None:
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def connected(servers: str | list[str], **options: Any) -> AsyncIterator[Client]:
    """A client of nats-py, for work that is run by :func:`run`, which ends what it leaves."""
    client = _Client()
    try:
        await client.connect(servers, **options)
        yield client
    finally:
        # A server that was killed meanwhile makes it fail, and a paused one makes it wait. Then,
        # and when it was cancelled before, nats-py does not close its socket any more.
        try:
            with contextlib.suppress(nats.errors.Error, OSError, asyncio.TimeoutError):
                await asyncio.wait_for(client.close(), _CLOSE_DEADLINE)
        finally:
            client.abort()


def connected_under_faults(servers: Sequence[str]) -> AbstractAsyncContextManager[Client]:
    """A client that reconnects without end and soon notices a server that does not respond."""

    async def ignore(error: Exception) -> None:
        pass  # servers come and go

    return connected(
        list(servers),
        max_reconnect_attempts=-1,
        reconnect_time_wait=0.1,
        connect_timeout=2,
        ping_interval=2,
        max_outstanding_pings=2,
        error_cb=ignore,
    )


async def flushed(client: Client) -> None:
    """Return when the server has received all that ``client`` has sent or buffered, SUBs too.

    ``flush()`` alone does not ensure it: nats-py's PING overtakes what it still buffers. That is
    written before the first PONG can be read, so the second PING comes after it.
    """
    await client.flush()
    await client.flush()


def with_client(url: str, work: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
    """Run ``work`` with a connected client, in a thread and event loop of its own."""

    async def whole() -> T:
        async with connected(url) as client:
            return await work(client)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run, whole()).result()


def server_version(url: str) -> tuple[int, int]:
    """The server's version, as (2, 14), for what older ones do not have."""

    async def work(client: Client) -> tuple[int, int]:
        version = client.connected_server_version
        return version.major, version.minor

    return with_client(url, work)


def skip_before(url: str, minor: int) -> None:
    """Skip the test on a server older than 2.``minor``."""
    if server_version(url) < (2, minor):
        pytest.skip(f"needs nats-server 2.{minor}")
