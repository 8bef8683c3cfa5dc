"""``purge_deletes``: which markers it purges and which keys it spares."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ApiError, KeyNotFoundError
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.kv.config import KeyValueConfig
from nats_stream_source.jetstream.kv.store import KeyValue
from tests.integration.jetstream.kv.stores import new_bucket
from tests.support.nats.buckets import create_bucket, publish

pytestmark = pytest.mark.servers


async def test_purge_deletes(shared_server: NatsServer) -> None:
    async with new_bucket(shared_server.url, KeyValueConfig("tidy", history=5)) as kv:
        for key in ("gone", "back", "live"):
            await kv.put(key, b"1")
            await kv.put(key, b"2")
        await kv.delete("gone")
        await kv.delete("back")
        # Young markers stay, without the history before them.
        assert await kv.purge_deletes() == 2
        assert [entry.operation for entry in await kv.history("gone")] == ["DEL"]
        assert len(await kv.history("live")) == 2
        await kv.put("back", b"3")
        assert await kv.purge_deletes(0) == 1
        with pytest.raises(KeyNotFoundError, match="entry not found"):
            await kv.get("gone")
        assert sorted(await kv.keys()) == ["back", "live"]
        assert [entry.value for entry in await kv.history("back")] == [b"", b"3"]


async def test_purge_deletes_spares_key_that_is_written_meanwhile(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b", history=5)
    written = []

    class Writing(JetStream):
        async def call(self, subject: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
            if subject.startswith("STREAM.PURGE") and not written:
                written.append(await KeyValue(self, kv.bucket).put("a", b"new"))
            return await super().call(subject, request)

    kv: KeyValue

    async with connect(nats_server.url) as js:
        kv = await KeyValue.open(js, "b")
        await kv.put("a", b"old")
        await kv.delete("a")
        kv.jetstream = Writing(js.connection)
        assert await kv.purge_deletes(0) == 1
        assert [(e.value, e.revision) for e in await kv.history("a")] == [(b"new", 3)]
    assert written == [3]


async def test_marker_on_wildcard_does_not_purge_bucket(shared_server: NatsServer) -> None:
    """Servers store what is published to a wildcard; in a request its name is a filter."""
    url = shared_server.url
    deleted = {"KV-Operation": "DEL"}

    async with new_bucket(url, KeyValueConfig("wild", history=3)) as kv:
        for key in ("a", "b.c"):
            await kv.put(key, b"1")
        messages = [(f"$KV.wild.{key}", b"", deleted) for key in (">", "*", "b.*")]
        await asyncio.to_thread(publish, url, messages)
        await kv.delete("a")
        # 2.10 delivers "a" for each wildcard again, after the reader's end.
        assert await kv.purge_deletes(0) == 1
        assert await kv.keys() == ["b.c"]
        assert (await kv.get("b.c")).value == b"1"


async def test_purge_failure_stops_remaining_purges(shared_server: NatsServer) -> None:
    purged = 0

    class Failing(JetStream):
        async def call(self, subject: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
            nonlocal purged
            if subject.startswith("STREAM.PURGE"):
                purged += 1
                if purged == 3:
                    raise ApiError("no", 400, 1)
            return await super().call(subject, request)

    async with new_bucket(shared_server.url, KeyValueConfig("purges")) as kv:
        for i in range(600):
            await kv.delete(f"k{i}")
        kv.jetstream = Failing(kv.jetstream.connection)
        before = asyncio.all_tasks()
        with pytest.raises(ApiError, match="no"):
            await kv.purge_deletes(0)
        assert asyncio.all_tasks() == before
        assert 3 <= purged < 600
