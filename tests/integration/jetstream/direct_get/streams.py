"""Streams of numbered messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from nats_stream_source.jetstream.api import StoredMessage
from tests.support.nats.buckets import api, publish
from tests.support.nats.streams import create_stream, stream_state
from tests.support.wait import wait_until


async def listed(messages: AsyncIterator[StoredMessage]) -> list[StoredMessage]:
    return [message async for message in messages]


def make(url: str, name: str, count: int = 10, *, allow_direct: bool = True, **config: Any) -> None:
    """A stream with ``count`` messages: ``<name>.<n % 4>``, payload ``v<n>``, from n = 1."""
    create_stream(url, name, allow_direct=allow_direct, **config)
    publish(url, [(f"{name}.{n % 4}", b"v%d" % n, None) for n in range(1, count + 1)])


def partial_mirror(url: str, name: str, messages: int, **part: Any) -> None:
    """A mirror of a part of the bucket ``whole``, which responds for it once it has the part."""
    mirrored = {"name": "KV_whole", **part}
    config = {"name": name, "mirror": mirrored, "allow_direct": True, "mirror_direct": True}
    api(url, f"STREAM.CREATE.{name}", config)
    wait_until(lambda: bool(stream_state(url, name)["messages"] == messages), "the mirror's part")
