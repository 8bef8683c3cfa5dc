"""What one user of a connection does, or the server to it, does not end it for the others."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client

from nats_stream_source.connection.connection import Connection, ConnectionSettings
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    AckLostError,
    AuthorizationError,
    ConnectError,
    MessageTooLargeError,
    PermissionDeniedError,
    StreamNotFoundError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.kv.config import KeyValueConfig
from nats_stream_source.jetstream.kv.store import KeyValue
from nats_stream_source.jetstream.publish.publisher import Publisher
from tests.support.nats.topology import ChangingServer
from tests.support.wait import wait_until_async

pytestmark = pytest.mark.servers


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[ChangingServer]:
    guarded = ChangingServer(tmp_path)
    with guarded.server:
        yield guarded


@asynccontextmanager
async def opened(url: str, **more: Any) -> AsyncIterator[Connection]:
    more = {"connect_timeout": 20.0, "request_timeout": 3.0, **more}
    async with await Connection.open(ConnectionSettings(servers=(url,), **more)) as connection:
        yield connection


def as_me(guarded: ChangingServer, **more: Any) -> Any:
    return opened(guarded.server.url, user="me", password="right", **more)


def needs_reloads(connection: Connection) -> None:
    version = connection.client.connected_server_version
    if (version.major, version.minor) < (2, 11):
        pytest.skip("after a reload of its users, JetStream is silent on 2.10")


async def answers(connection: Connection) -> bool:
    with pytest.raises(StreamNotFoundError):
        await JetStream(connection).stream_info("none")
    return True


def test_private_names_of_nats_py_exist() -> None:
    assert list(inspect.signature(Client._process_err).parameters) == ["self", "err_msg"]
    assert list(inspect.signature(Client._process_op_err).parameters) == ["self", "e"]
    assert "self._pongs.pop(0)" in inspect.getsource(Client._process_pong)
    assert "await self._error_cb(err)" in inspect.getsource(Client._process_err)


async def test_ping_abandoned_does_not_affect_others(nats_server: NatsServer) -> None:
    async with opened(nats_server.url) as connection:
        cancelled = 0
        for turns in range(6):
            ping = asyncio.ensure_future(connection.alive(20))
            for _ in range(turns):
                await asyncio.sleep(0)
            cancelled += ping.cancel()
            await asyncio.gather(ping, return_exceptions=True)
            assert await answers(connection)
        assert cancelled > 2
        nats_server.pause()
        assert not await connection.alive(0.05)
        nats_server.resume()
        assert await answers(connection)
        assert connection.reconnects == 0


async def test_renewal_does_not_need_read_loop_of_nats_py(shared_server: NatsServer) -> None:
    async with opened(shared_server.url) as connection:
        loop = connection.client._reading_task
        assert loop is not None
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        connection.reconnect()
        await connection.wait_connected(20)
        assert await answers(connection)
        assert connection.reconnects == 1


async def test_user_refused_temporarily_reconnects(guarded: ChangingServer) -> None:
    """All who wait get the reason, in bounded time; once it is put right, the connection lives."""
    # All who wait wait for so long.
    async with as_me(guarded, connect_timeout=3.0) as connection:
        kv = await KeyValue.create_bucket(JetStream(connection), KeyValueConfig("b"))
        await kv.put("a", b"1")
        needs_reloads(connection)
        async with kv.watch(heartbeat=0.1) as watch:
            assert len(await watch.initial()) == 1
            guarded.change(password="other")
            await wait_until_async(lambda: not connection.online.is_set(), "the connection is lost")
            for doing in (kv.put("a", b"2"), kv.get("a"), watch.__anext__()):
                with pytest.raises(AuthorizationError, match="'user' and 'password'") as caught:
                    await asyncio.wait_for(doing, 60)
                assert "right" not in str(caught.value)
        assert connection.client.options["reconnect_time_wait"] == 1.0
        guarded.change(password="right")
        await connection.wait_connected(20)
        assert connection.client.options["reconnect_time_wait"] == 0.1
        assert (await kv.get("a")).value == b"1"
        revision = await kv.put("a", b"3")
        async with kv.watch() as watch:
            assert [entry.revision for entry in await watch.initial()] == [revision]


async def test_permissions_granted_again(guarded: ChangingServer) -> None:
    async with as_me(guarded) as connection:
        kv = await KeyValue.create_bucket(JetStream(connection), KeyValueConfig("b"))
        await kv.put("a", b"1")
        needs_reloads(connection)
        guarded.change(permissions='subscribe: { deny: "_INBOX.>" }')
        await wait_until_async(lambda: connection._denied.inboxes, "the inbox is denied")
        for doing in (kv.get("a"), kv.put("a", b"2")):
            with pytest.raises(PermissionDeniedError, match="_INBOX"):
                await doing
        guarded.change()
        connection.reconnect()
        await connection.wait_connected(20)
        assert (await kv.get("a")).value == b"1"
        assert await kv.put("a", b"2") == 2


async def test_subscription_limit_exceeded(
    guarded: ChangingServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The first refusal is logged; later ones are errors. The other subscriptions continue."""
    guarded.server.stop()
    guarded.write(more="max_subscriptions: 5")
    guarded.server.start()

    async with as_me(guarded) as connection:
        assert await answers(connection)
        kv = await KeyValue.create_bucket(JetStream(connection), KeyValueConfig("b"))
        await kv.put("a", b"1")
        inboxes = [await connection.open_inbox(f"s.{i}") for i in range(3)]
        with pytest.raises(PermissionDeniedError, match=r"maximum subscriptions exceeded"):
            async with kv.watch(heartbeat=0.1) as watch:
                await watch.initial()
        assert "the server refused a subscription" in caplog.text
        with pytest.raises(PermissionDeniedError, match=r"'s\.4'.*raise max_subscriptions"):
            await connection.open_inbox("s.4")
        await connection.client.publish("s.0", b"x")
        assert await connection.alive(20)
        assert len(inboxes[0].take()) == 1
        await connection.close_inbox(inboxes[1])
        await connection.open_inbox("s.4")
        assert await answers(connection)
        assert connection.reconnects == 0


async def test_request_too_large(shared_server: NatsServer) -> None:
    async with opened(shared_server.url) as connection:
        config = KeyValueConfig("big", metadata={"a": "x" * (2 << 20)})
        with pytest.raises(MessageTooLargeError, match="max_payload of 1048576 bytes"):
            await KeyValue.create_bucket(JetStream(connection), config)
        assert await answers(connection)


async def test_line_too_long_of_another_caller_ends_connection(shared_server: NatsServer) -> None:
    """Each caller whose call was under way has a result or a named error; all continue."""
    async with opened(shared_server.url) as connection:
        kv = await KeyValue.create_bucket(JetStream(connection), KeyValueConfig("shared"))
        await kv.put("a", b"1")
        async with kv.watch(heartbeat=0.1) as watch:
            assert len(await watch.initial()) == 1
            # The package refuses to send such a line.
            transport = connection.client._transport
            assert transport is not None
            transport.write(b"PUB " + b"x" * 5000 + b" 0\r\n\r\n")
            put, entry = asyncio.ensure_future(kv.put("a", b"2")), await kv.get("a")
            with pytest.raises(AckLostError, match="connection was lost before the PubAck"):
                await put
            assert (entry.value, connection.reconnects) == (b"1", 1)
            revision = await kv.put("a", b"3")
            assert (await asyncio.wait_for(watch.__anext__(), 60)).revision == revision


async def test_closed_connection_refuses_requests(shared_server: NatsServer) -> None:
    """Also not while it is being closed: the request would never end."""
    async with opened(shared_server.url) as connection:
        kv = await KeyValue.create_bucket(JetStream(connection), KeyValueConfig("late"))
        await kv.put("a", b"1")
        closing = asyncio.ensure_future(connection.close())
        await asyncio.sleep(0)
        assert not closing.done()
        with pytest.raises(ConnectError, match="is closed"):
            connection.service(Publisher)
        await closing
        with pytest.raises(ConnectError, match="is closed"):
            await kv.put("a", b"2")
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_renewal_ends_with_connection(
    shared_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long nats-py takes to reconnect: each task is awaited."""

    async def never() -> None:
        await asyncio.Event().wait()

    async def work() -> None:
        connection = await Connection.open(ConnectionSettings(servers=(shared_server.url,)))
        monkeypatch.setattr(connection.client, "force_reconnect", never)
        connection.reconnect()
        renewal = connection._forced_reconnect
        assert renewal is not None
        await connection.close()
        assert renewal.done()

    await asyncio.wait_for(work(), 60)
