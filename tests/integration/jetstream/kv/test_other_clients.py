"""Buckets that nats-py reads and writes too (ADR-8): each client sees what the other one did."""

from __future__ import annotations

import pytest
from nats.aio.client import Client
from nats.js.errors import KeyNotFoundError as TheirKeyNotFoundError
from nats.js.kv import KeyValue as TheirBucket

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import KeyDeletedError, WrongLastSequenceError
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.kv.config import KeyValueConfig
from nats_stream_source.jetstream.kv.store import KeyValue
from tests.integration.jetstream.kv.stores import new_bucket
from tests.support.nats.buckets import with_client

pytestmark = pytest.mark.servers


async def test_nats_py_reads_what_this_package_writes(shared_server: NatsServer) -> None:
    async with new_bucket(shared_server.url, KeyValueConfig("ours", history=5)) as kv:
        await kv.put("a.b", b"1")
        await kv.update("a.b", b"2", 1)
        await kv.create("c", b"3")
        await kv.delete("c")
        await kv.put("d", b"4")
        await kv.purge("d")

    async def read(client: Client) -> None:
        theirs = await client.jetstream().key_value("ours")
        entry = await theirs.get("a.b")
        assert (entry.value, entry.revision) == (b"2", 2)
        for deleted in ("c", "d"):
            with pytest.raises(TheirKeyNotFoundError):
                await theirs.get(deleted)
        assert await theirs.keys() == ["a.b"]
        assert [one.value for one in await theirs.history("a.b")] == [b"1", b"2"]
        assert await watched(theirs) == [("a.b", b"2"), ("c", "DEL"), ("d", "PURGE")]
        status = await theirs.status()
        assert (status.bucket, status.history, status.values) == ("ours", 5, 5)

    with_client(shared_server.url, read)


async def watched(bucket: TheirBucket) -> list[tuple[str, object]]:
    """The last entry of each key: its value, or the operation of its marker."""
    watcher = await bucket.watchall()
    found: list[tuple[str, object]] = []
    while (entry := await watcher.updates(timeout=30)) is not None:
        found.append((entry.key, entry.operation or entry.value))
    await watcher.stop()
    return found


async def test_entries_of_nats_py_are_read(shared_server: NatsServer) -> None:
    async def write(client: Client) -> None:
        theirs = await client.jetstream().create_key_value(bucket="theirs", history=5)
        await theirs.put("a.b", b"1")
        await theirs.update("a.b", b"2", 1)
        await theirs.create("c", b"3")
        await theirs.delete("c")
        await theirs.put("d", b"4")
        await theirs.purge("d")

    with_client(shared_server.url, write)
    async with connect(shared_server.url) as js:
        kv = await KeyValue.open(js, "theirs")
        entry = await kv.get("a.b")
        assert (entry.value, entry.revision, entry.operation) == (b"2", 2, "PUT")
        for deleted in ("c", "d"):
            with pytest.raises(KeyDeletedError):
                await kv.get(deleted)
        assert await kv.keys() == ["a.b"]
        assert [one.value for one in await kv.history("a.b")] == [b"1", b"2"]
        assert [(one.key, one.operation) for one in await kv.watch().initial()] == [
            ("a.b", "PUT"),
            ("c", "DEL"),
            ("d", "PURGE"),
        ]
        with pytest.raises(WrongLastSequenceError):
            await kv.update("a.b", b"3", 1)
        assert await kv.create("c", b"5") > 0
