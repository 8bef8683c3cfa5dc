"""A new bucket on a connection of its own, for the tests of buckets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.kv.config import KeyValueConfig
from nats_stream_source.jetstream.kv.store import KeyValue


@asynccontextmanager
async def new_bucket(url: str, config: KeyValueConfig) -> AsyncIterator[KeyValue]:
    async with connect(url) as js:
        yield await KeyValue.create_bucket(js, config)
