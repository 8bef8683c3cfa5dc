"""Open key-value stores and JetStream contexts, for the tests of buckets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from nats_stream_source.connection.connection import Connection, ConnectionSettings
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.kv.config import KeyValueConfig
from nats_stream_source.jetstream.kv.store import KeyValue


@asynccontextmanager
async def jetstream(url: str, **more: Any) -> AsyncIterator[JetStream]:
    connection = await Connection.open(ConnectionSettings(servers=(url,), **more))
    try:
        yield JetStream(connection)
    finally:
        await connection.close()


@asynccontextmanager
async def new_bucket(url: str, config: KeyValueConfig) -> AsyncIterator[KeyValue]:
    async with jetstream(url) as js:
        yield await KeyValue.create_bucket(js, config)
