"""Backup and restore of a stream through the JetStream API (STREAM.SNAPSHOT and STREAM.RESTORE)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Protocol

from nats.aio.client import Client
from nats.aio.msg import Msg

from tests.support.nats.buckets import api, server_version, with_client

_DEADLINE = 60.0  # seconds; only a failed transfer takes that long
_CHUNK = 64 << 10


class Restore(Protocol):
    def __call__(self, absent: Callable[[], object] = ...) -> None:
        """Delete the stream, call ``absent``, and restore the stream."""


def back_up(url: str, stream: str) -> Restore:
    """Back up a stream; call the result to delete the stream and restore the backup."""
    described, chunks = with_client(url, lambda client: _snapshot(client, stream))

    def restore(absent: Callable[[], object] = lambda: None) -> None:
        api(url, f"STREAM.DELETE.{stream}")
        absent()
        request = {name: described[name] for name in ("config", "state")}
        subject = api(url, f"STREAM.RESTORE.{stream}", request)["deliver_subject"]
        restored = with_client(url, lambda client: _send(client, subject, chunks))
        assert restored["state"]["last_seq"] == described["state"]["last_seq"], restored

    return restore


def restore_changes_created(url: str) -> bool:
    """Whether the server gives a restored stream a new creation time."""
    return server_version(url) >= (2, 15)


async def _snapshot(client: Client, stream: str) -> tuple[dict[str, Any], list[bytes]]:
    received: asyncio.Queue[Msg] = asyncio.Queue()
    inbox = client.new_inbox()
    await client.subscribe(inbox, cb=received.put)
    request = {"deliver_subject": inbox, "no_consumers": True, "chunk_size": _CHUNK}
    response = await client.request(
        f"$JS.API.STREAM.SNAPSHOT.{stream}", json.dumps(request).encode(), timeout=_DEADLINE
    )
    described = json.loads(response.data)
    assert "error" not in described, described
    chunks: list[bytes] = []
    while (chunk := await asyncio.wait_for(received.get(), _DEADLINE)).data:
        chunks.append(chunk.data)
        if chunk.reply:
            await client.publish(chunk.reply)  # the server waits for it after a window of chunks
    return described, chunks


async def _send(client: Client, subject: str, chunks: list[bytes]) -> dict[str, Any]:
    for chunk in chunks:
        await client.request(subject, chunk, timeout=_DEADLINE)
    response = await client.request(subject, b"", timeout=_DEADLINE)  # the end of the backup
    restored: dict[str, Any] = json.loads(response.data)
    assert "error" not in restored, restored
    return restored
