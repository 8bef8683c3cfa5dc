"""Entries written as columns: compare-and-set, creation over markers, and writes repeated."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pyarrow as pa
import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import WrongLastSequenceError
from nats_stream_source.jetstream import KeyValue, KeyValueConfig, connect
from nats_stream_source.jetstream.kv.batch_writer import KvBatchWriter
from nats_stream_source.spark.writing.rows import KvRowEncoder, MessageIds

Row = tuple[str, bytes, "int | None"]  # key, value, expected revision


@asynccontextmanager
async def writing(
    server: NatsServer, bucket: str, **settings: Any
) -> AsyncIterator[tuple[KeyValue, KvBatchWriter]]:
    async with connect(server.url) as jetstream:
        kv = await KeyValue.create_bucket(jetstream, KeyValueConfig(bucket, history=5))
        async with KvBatchWriter(jetstream, kv.bucket, **settings) as writer:
            yield kv, writer


async def write(kv: KeyValue, writer: KvBatchWriter, *rows: Row, job: str = "job") -> None:
    keys, values, revisions = zip(*rows, strict=True)
    batch = pa.record_batch(
        {
            "key": pa.array(keys),
            "value": pa.array(values),
            "expected_revision": pa.array(revisions, pa.int64()),
        }
    )
    encoder = KvRowEncoder(kv.name, kv.bucket.prefix, MessageIds(job, 0, False), None)
    await writer.send(encoder.encode(batch))
    await writer.flush()


async def test_conditions_that_hold(shared_server: NatsServer) -> None:
    async with writing(shared_server, "hold") as (kv, writer):
        first = await kv.put("a", b"1")
        await write(kv, writer, ("a", b"2", first), ("new", b"3", 0), ("b", b"4", None))
        assert (writer.stored, writer.duplicates, writer.skipped) == (3, 0, 0)
        assert [(await kv.get(key)).value for key in ("a", "new", "b")] == [b"2", b"3", b"4"]


@pytest.mark.parametrize("operation", ["delete", "purge"])
async def test_key_deleted_does_not_exist(shared_server: NatsServer, operation: str) -> None:
    """Revision 0 is ``create``: over a marker, the write is sent again for its revision."""
    async with writing(shared_server, operation) as (kv, writer):
        await kv.put("a", b"1")
        await getattr(kv, operation)("a")
        await write(kv, writer, ("a", b"2", 0))
        assert (writer.stored, writer.skipped) == (1, 0)
        assert (await kv.get("a")).value == b"2"


async def test_conflict_fails(shared_server: NatsServer) -> None:
    async with writing(shared_server, "fails") as (kv, writer):
        revision = await kv.put("a", b"theirs")
        with pytest.raises(
            WrongLastSequenceError,
            match=rf"could not write key 'a' of bucket 'fails': the key's last entry is revision "
            rf"{revision} \(PUT\), expected revision 0",
        ) as caught:
            await write(kv, writer, ("b", b"1", 0), ("a", b"mine", 0))
        assert caught.value.last_seq == revision
        assert (await kv.get("a")).value == b"theirs"


async def test_conflicts_are_skipped_and_counted(shared_server: NatsServer) -> None:
    async with writing(shared_server, "skips", skip_conflicts=True) as (kv, writer):
        theirs = {f"k{i}": await kv.put(f"k{i}", b"theirs") for i in range(0, 100, 3)}
        rows: list[Row] = [(f"k{i}", b"mine", 0) for i in range(100)]
        rows.append(("k0", b"old", theirs["k0"] + 1000))
        await write(kv, writer, *rows)
        assert (writer.stored, writer.skipped) == (66, 35)
        for i in range(100):
            expected = b"theirs" if i % 3 == 0 else b"mine"
            assert (await kv.get(f"k{i}")).value == expected


async def test_write_repeated_is_recognised(shared_server: NatsServer) -> None:
    """The server rejects the repetition (10071): the id of the last message shows whose it is."""
    async with writing(shared_server, "repeat") as (kv, writer):
        first = await kv.put("a", b"1")
        rows: list[Row] = [("a", b"2", first), ("new", b"3", 0)]
        await write(kv, writer, *rows)
        await write(kv, writer, *rows)
        assert (writer.stored, writer.duplicates) == (4, 2)
        assert [entry.value for entry in await kv.history("a")] == [b"1", b"2"]
        with pytest.raises(WrongLastSequenceError):
            await write(kv, writer, *rows, job="another job")
