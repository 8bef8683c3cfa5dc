"""Columns of messages and of entries with PubAcks: all are stored, in order, or an error."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pyarrow as pa
import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    MessageTooLargeError,
    PublishError,
    StreamNotFoundError,
    WrongLastSequenceError,
)
from nats_stream_source.jetstream import JetStream, KeyValue, KeyValueConfig, connect
from nats_stream_source.jetstream.kv.batch_writer import KvBatchWriter
from nats_stream_source.jetstream.publish import column_publisher, window
from nats_stream_source.jetstream.publish.batch_publisher import (
    BatchPublisher,
    MessageColumns,
    Rejection,
)
from nats_stream_source.spark.writing.rows import KvRowEncoder, MessageIds
from nats_stream_source.wire.publish.headers import blocks, field
from tests.support.nats.streams import create_stream, stream_state


def count(url: str, name: str) -> int:
    return int(stream_state(url, name)["messages"])


def columns(
    name: str, values: list[bytes], ids: list[str] | None = None, first: int = 0
) -> MessageColumns:
    subjects = pa.array([f"{name}.{first + i}" for i in range(len(values))])
    headers = None if ids is None else blocks([field("Nats-Msg-Id", pa.array(ids))])
    return MessageColumns(subjects, pa.array(values, pa.binary()), headers)


async def publish(publisher: BatchPublisher, messages: MessageColumns) -> None:
    await publisher.send(messages)
    await publisher.flush()


@asynccontextmanager
async def publishing(
    url: str, stream: str, **settings: Any
) -> AsyncIterator[tuple[JetStream, BatchPublisher]]:
    async with (
        connect(url) as jetstream,
        BatchPublisher(jetstream, stream, **settings) as publisher,
    ):
        yield jetstream, publisher


async def stored(jetstream: JetStream, stream: str, count: int) -> list[tuple[str, bytes]]:
    found = [await jetstream.message(stream, seq=seq) for seq in range(1, count + 1)]
    return [(message.subject, message.data) for message in found]


@pytest.mark.parametrize("max_in_flight", [1, 7, 4096])
async def test_messages_are_stored_in_order(url: str, max_in_flight: int) -> None:
    name = f"order{max_in_flight}"
    create_stream(url, name)
    async with publishing(url, name, max_in_flight=max_in_flight) as (jetstream, publisher):
        await publisher.send(columns(name, [b"%d" % i for i in range(60)]))
        await publisher.send(columns(name, []))
        await publish(publisher, columns(name, [b"x" * 1000] * 40, first=60))
        assert (publisher.stored, publisher.duplicates) == (100, 0)
        expected = [(f"{name}.{i}", b"%d" % i if i < 60 else b"x" * 1000) for i in range(100)]
        assert await stored(jetstream, name, 100) == expected


async def test_pieces_and_windows_smaller_than_message(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large messages are sent alone, also those that exceed every limit on bytes."""
    name = "pieces"
    create_stream(url, name)
    monkeypatch.setattr(column_publisher, "_CHUNK_BYTES", 3000)
    monkeypatch.setattr(window, "_PIECE_BYTES", 500)
    monkeypatch.setattr(window, "MAX_BYTES", 1500)
    values = [b"x" * size for size in (10, 2000, 400, 400, 5000, 0, 700, 1, 1, 1)] * 5
    async with publishing(url, name) as (jetstream, publisher):
        await publish(publisher, columns(name, values))
        assert [data for _, data in await stored(jetstream, name, 50)] == values


async def test_duplicates_count_as_stored(url: str) -> None:
    name = "dup"
    create_stream(url, name)
    async with publishing(url, name) as (_, publisher):
        ids = [f"id{i}" for i in range(20)]
        for _ in range(2):
            await publish(publisher, columns(name, [b"v"] * 20, ids))
        assert (publisher.stored, publisher.duplicates) == (40, 20)
    assert count(url, name) == 20


async def test_rejections(url: str) -> None:
    name = "reject"
    create_stream(url, name)
    expected = field("Nats-Expected-Last-Subject-Sequence", pa.array([None, 5, 3, 7, 0]))
    messages = MessageColumns(
        columns(name, [b"v"] * 5).subjects, pa.array([b"v"] * 5), blocks([expected])
    )
    rejected: list[Rejection] = []
    async with publishing(url, name, on_rejected=rejected.append) as (_, publisher):
        await publisher.send(columns(name, [b"v"] * 3))
        await publisher.send(messages)
        await publisher.flush()
        assert publisher.stored == 3 + 3
    found = [(one.row, one.subject, one.error.err_code) for one in rejected]
    assert found == [(4, f"{name}.1", 10071), (6, f"{name}.3", 10071)]


async def test_messages_too_large(url: str) -> None:
    name = "large"
    create_stream(url, name, max_msg_size=100)
    async with publishing(url, name) as (jetstream, publisher):
        limit = jetstream.connection.client.max_payload
        with pytest.raises(MessageTooLargeError, match=rf"'{name}\.1': .*max_payload of {limit}"):
            await publisher.send(columns(name, [b"", b"x" * (limit + 1)]))
        assert count(url, name) == 0, "none was sent"
        with pytest.raises(PublishError, match="message size exceeds maximum allowed"):
            await publish(publisher, columns(name, [b"x" * 101]))


async def test_stream_missing(url: str) -> None:
    async with publishing(url, "nope") as (_, publisher):
        with pytest.raises(StreamNotFoundError, match="nope"):
            await publish(publisher, columns("nope", [b""]))


async def test_publishers_share_connection(url: str) -> None:
    create_stream(url, "one")
    create_stream(url, "two")
    async with publishing(url, "one") as (jetstream, first):
        async with BatchPublisher(jetstream, "two") as second:
            for _ in range(3):
                await first.send(columns("one", [b"v"] * 50))
                await second.send(columns("two", [b"v"] * 30))
            await second.flush()
        await first.flush()
        assert (first.stored, second.stored) == (150, 90)
        assert jetstream.connection.denial_listeners == [first._on_denied]


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
    encoder = KvRowEncoder(kv.name, MessageIds(job, 0, False), prefix=kv.bucket.prefix)
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
