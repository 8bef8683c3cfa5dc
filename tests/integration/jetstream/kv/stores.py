"""New and opened buckets, and the entries of their watches, for the tests of buckets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.kv.config import KeyValueConfig
from nats_stream_source.jetstream.kv.store import KeyValue
from nats_stream_source.jetstream.kv.watch import Watch
from tests.support.nats.buckets import consumers, create_bucket


@asynccontextmanager
async def new_bucket(url: str, config: KeyValueConfig) -> AsyncIterator[KeyValue]:
    async with connect(url) as js:
        yield await KeyValue.create_bucket(js, config)


FAST = 0.1  # seconds between heartbeats


@asynccontextmanager
async def opened(url: str, name: str, **more: Any) -> AsyncIterator[KeyValue]:
    async with connect(url, **more) as jetstream:
        yield await KeyValue.open(jetstream, name)


@asynccontextmanager
async def watched_bucket(url: str, name: str, history: int = 1) -> AsyncIterator[KeyValue]:
    """A new bucket; at the end of the block, no watch may have left a consumer."""
    create_bucket(url, name, history, storage="memory")
    async with opened(url, name) as kv:
        yield kv
    assert consumers(url, name) == [], "a watch leaves no consumer behind"


async def take(watch: Watch, count: int) -> list[tuple[str, int, str] | None]:
    """The next items as (key, revision, operation), the signal as None."""
    found: list[tuple[str, int, str] | None] = []
    while len(found) < count:
        entry = await asyncio.wait_for(watch.__anext__(), 60)
        found.append(entry and (entry.key, entry.revision, entry.operation))
    return found
