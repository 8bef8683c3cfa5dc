"""What the ordered reader returns of a range: all of it, batches, filters, ends, headers."""

from __future__ import annotations

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.ordered import consumer
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from tests.integration.jetstream.ordered.reads import (
    ALL,
    UNHEARD,
    linked,
    read,
    read_range,
    request_for,
)
from tests.support.nats.buckets import (
    api,
    consumers,
    create_bucket,
    put,
    put_many,
)

pytestmark = pytest.mark.servers


async def test_range_is_complete_and_leaves_nothing(filled: NatsServer) -> None:
    rows, reader = await read_range(
        filled.url, request_for(filled.url, "b", 3000, heartbeat=UNHEARD)
    )
    assert rows == ALL
    assert reader.cursor.rebuilds == []
    assert consumers(filled.url, "b") == []


@pytest.mark.parametrize(("start", "end"), [(0, 1), (999, 1000), (2999, 3000), (10, 2500), (7, 7)])
async def test_parts(filled: NatsServer, start: int, end: int) -> None:
    rows, _ = await read_range(filled.url, request_for(filled.url, "b", end, start))
    assert rows == list(range(start + 1, end + 1))


async def test_batches_are_bounded_by_rows_and_by_bytes(filled: NatsServer) -> None:
    async def sizes(**bounds: int) -> list[tuple[int, int]]:
        async with linked(filled.url) as link:
            reader = OrderedReader(link, request_for(filled.url, "b", 3000, **bounds))
            return [(len(frames), frames.nbytes) async for frames in reader.batches()]

    by_rows = await sizes(batch_rows=200)
    assert [rows for rows, _ in by_rows] == [200] * 15
    by_rows = await sizes(batch_rows=700)
    assert sum(rows for rows, _ in by_rows) == 3000
    # Or up to the end of a block of memory.
    assert all(rows == 700 or (rows < 700 and size >= 256 << 10) for rows, size in by_rows[:-1])
    assert 1 <= by_rows[-1][0] <= 700
    by_bytes = await sizes(batch_bytes=100_000)
    assert sum(rows for rows, _ in by_bytes) == 3000
    assert all(50_000 < size <= 100_000 for _, size in by_bytes[:-1])
    alone = await sizes(batch_bytes=10)
    assert [rows for rows, _ in alone] == [1] * 3000


@pytest.mark.parametrize(("eager", "long"), [(False, True), (False, False), (True, True)])
async def test_bulk_reads_only_for_long_ranges_in_whole_batches(
    filled: NatsServer, monkeypatch: pytest.MonkeyPatch, eager: bool, long: bool
) -> None:
    monkeypatch.setattr(consumer, "_BULK", 2999 if long else 3000)
    async with linked(filled.url) as link:
        request = request_for(filled.url, "b", 3000, batch_rows=100, eager=eager)
        reader = OrderedReader(link, request)
        async for _ in reader.batches():
            if reader._consumer.inbox is not None:
                assert reader._consumer.inbox.bulk is (long and not eager)
                break
        else:
            raise AssertionError("no batch came while the consumer existed")


async def test_message_larger_than_batch(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b")
    put(nats_server.url, "b", "small", b"1")
    put(nats_server.url, "b", "large", b"x" * 900_000)
    request = request_for(nats_server.url, "b", 2, batch_bytes=1000)
    assert (await read_range(nats_server.url, request))[0] == [1, 2]


async def test_filter_ends_range_by_heartbeat(filled: NatsServer) -> None:
    request = request_for(filled.url, "b", 3000, filters=("$KV.b.k7", "$KV.b.k42"))
    rows, reader = await read_range(filled.url, request)
    assert rows == [s for s in ALL if (s - 1) % 100 in (7, 42)]
    assert reader.cursor.seen_through >= 3000


async def test_last_per_subject(filled: NatsServer) -> None:
    request = request_for(filled.url, "b", 3000, last_per_subject=True, filters=("$KV.b.>",))
    assert (await read_range(filled.url, request))[0] == list(range(2901, 3001))


async def test_range_without_its_last_messages_ends(nats_server: NatsServer) -> None:
    url = nats_server.url
    create_bucket(url, "b", history=1)
    put_many(url, "b", [("a", b"1"), ("b", b"1"), ("c", b"1"), ("c", b"2")])
    assert (await read_range(url, request_for(url, "b", 3)))[0] == [1, 2]
    api(url, "STREAM.PURGE.KV_b")
    assert (await read_range(url, request_for(url, "b", 2)))[0] == []


async def test_reader_left_early_leaves_nothing(filled: NatsServer) -> None:
    async with linked(filled.url) as link:
        reader = OrderedReader(link, request_for(filled.url, "b", 3000, batch_rows=10))
        batches = reader.batches()
        await batches.__anext__()
        assert len(consumers(filled.url, "b")) == 1
        await batches.aclose()
        assert consumers(filled.url, "b") == []
        # The connection is clean: the next reader gets its own rows only.
        again = OrderedReader(link, request_for(filled.url, "b", 20, 10))
        assert await read(again) == list(range(11, 21))
