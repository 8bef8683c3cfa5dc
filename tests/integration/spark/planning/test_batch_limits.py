"""Limits of a micro-batch in rows and bytes: also under filters, holes and steady writes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.spark.planning import row_counter
from tests.integration.spark.planning.planners import ends, planning
from tests.support.nats.buckets import create_bucket, put, put_many
from tests.support.query_driver.one_stream import OneStreamPlanner

pytestmark = pytest.mark.servers


async def test_initial_values_of_a_bucket_with_history_are_one_batch(
    nats_server: NatsServer,
) -> None:
    create_bucket(nats_server.url, "b", history=5)
    put_many(nats_server.url, "b", ((f"k{i % 4}", b"v") for i in range(20)))

    async with planning(nats_server.url, "b", maxRowsPerTrigger="2") as planner:
        start = await planner.initial_offset()
        end = await planner.latest_offset(start)
        (first,) = await planner.splits(start, end)
        await asyncio.to_thread(put, nats_server.url, "b", "later", b"v")
        then = await planner.latest_offset(end)
        (second,) = await planner.splits(end, then)
    assert (end.stream_seq, end.consumer_seq, end.initial_through) == (20, 4, 20)
    assert (first.last_per_subject, first.filters) == (True, ("$KV.b.>",))
    assert (second.last_per_subject, second.filters, second.start, second.end) == (
        False,
        (),
        20,
        21,
    )


async def test_limits_count_rows_on_a_bucket_of_mostly_holes(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b", history=1)
    put_many(nats_server.url, "b", ((f"k{i % 100}", b"v") for i in range(5000)))
    put_many(nats_server.url, "b", ((f"k{i % 50}", b"v") for i in range(5000)))
    put(nats_server.url, "b", "k99", b"v")  # 50 rows around 5,000, 50 around 10,000
    last = 10_001
    live = [*range(4951, 5000), *range(9951, last + 1)]

    async with planning(nats_server.url, "b", maxRowsPerTrigger="20") as planner:
        found = await ends(planner)
    assert found[-1] == last
    starts = [0, *found[:-1]]
    rows = [sum(1 for s in live if a < s <= b) for a, b in zip(starts, found, strict=True)]
    assert max(rows) <= 20
    assert sum(rows) == 100
    assert len(found) <= 12


async def test_a_limit_needs_no_rank_where_nearly_all_sequences_have_a_row(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank takes longer than all the rest, and could not make the micro-batches fewer."""
    ranks: list[int] = []
    ask = row_counter.count_messages

    async def asked(jetstream: JetStream, stream: str, seq: int, filters: Sequence[str]) -> int:
        ranks.append(seq)
        return await ask(jetstream, stream, seq, filters)

    monkeypatch.setattr(row_counter, "count_messages", asked)
    create_bucket(nats_server.url, "b", history=1)
    put_many(nats_server.url, "b", ((f"k{i}", b"v") for i in range(1000)))
    put_many(nats_server.url, "b", ((f"k{i}", b"v") for i in range(500, 520)))
    async with planning(nats_server.url, "b", maxRowsPerTrigger="102") as planner:
        assert await ends(planner) == [
            *range(102, 1020, 102),
            1020,
        ]
    assert not ranks
    # Half of all sequences: now it is worth a question.
    put_many(nats_server.url, "b", ((f"k{i}", b"v") for i in range(0, 1000, 2)))
    async with planning(nats_server.url, "b", maxRowsPerTrigger="102") as planner:
        assert len(await ends(planner)) < 1520 // 102
    assert ranks


@pytest.mark.parametrize("limit", [1, 7, 1000])
async def test_limits_under_filters(nats_server: NatsServer, limit: int) -> None:
    create_bucket(nats_server.url, "b", history=64)
    put_many(nats_server.url, "b", ((f"k{i % 10}.x", b"v") for i in range(300)))
    matching = [s for s in range(1, 301) if (s - 1) % 10 in (3, 7)]
    options = {"keys": "k3.*,k7.x", "includeHistory": "true"}

    async with planning(nats_server.url, "b", maxRowsPerTrigger=str(limit), **options) as planner:
        found = await ends(planner)
    starts = [0, *found[:-1]]
    rows = [sum(1 for s in matching if a < s <= b) for a, b in zip(starts, found, strict=True)]
    assert max(rows) <= limit
    assert sum(rows) == len(matching)
    assert found[-1] == matching[-1]


async def test_a_filter_that_rarely_matches_does_not_stay_behind(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b", history=64)
    put(nats_server.url, "b", "rare", b"v")

    async with planning(nats_server.url, "b", keys="rare") as planner:
        start = await planner.latest_offset(await planner.initial_offset())
        positions = [start.stream_seq]
        for _ in range(8):
            entries = [(f"k{i}", b"v") for i in range(10)]
            await asyncio.to_thread(put_many, nats_server.url, "b", entries)
            start = await planner.latest_offset(start)
            positions.append(start.stream_seq)
    assert positions[0] == 1
    assert positions[-1] > 40  # in the newer half of 81
    assert len(set(positions)) <= 5  # not with every write


async def test_a_limit_in_bytes(nats_server: NatsServer) -> None:
    """By the mean size of a message: 100 of 1,000 bytes, and some 50 of the store's own."""
    create_bucket(nats_server.url, "b")
    put_many(nats_server.url, "b", ((f"k{i}", bytes(1000)) for i in range(100)))

    async def sizes(planner: OneStreamPlanner) -> list[int]:
        found, start = [], await planner.initial_offset()
        while (end := await planner.latest_offset(start)) != start:
            found.append(end.stream_seq - start.stream_seq)
            start = end
        return found

    async def limited(rows: int | None, nbytes: int) -> list[int]:
        limits = {"maxBytesPerTrigger": str(nbytes)}
        if rows is not None:
            limits["maxRowsPerTrigger"] = str(rows)
        async with planning(nats_server.url, "b", **limits) as planner:
            return await sizes(planner)

    in_bytes = await limited(None, 21_000)
    assert sum(in_bytes) == 100
    assert 17 <= in_bytes[0] <= 20
    assert max(in_bytes) <= 20
    assert max(await limited(5, 21_000)) == 5  # both hold
    assert max(await limited(50, 21_000)) <= 20
    assert await limited(None, 1) == [1] * 100  # at least one row


@pytest.mark.parametrize("limit", [1, 5, 20])
async def test_a_limit_under_steady_writes_moves_on(ten: str, limit: int) -> None:
    """Ranks of different moments contradict each other; no batch is empty for that."""
    acknowledged = 10
    enough = threading.Event()

    def write() -> None:
        nonlocal acknowledged
        while not enough.is_set():
            revisions = put_many(ten, "b", ((f"k{i % 10}", b"w") for i in range(200)))
            acknowledged = revisions[-1]

    async with planning(ten, "b", maxRowsPerTrigger=str(limit)) as planner:
        start = await planner.initial_offset()
        writing = asyncio.create_task(asyncio.to_thread(write))
        try:
            planned = 0
            while planned < 20 or acknowledged == 10:
                planned += 1
                known = acknowledged
                end = await planner.latest_offset(start)
                assert end.stream_seq > start.stream_seq or known <= start.stream_seq
                start = end
        finally:
            enough.set()
            await writing


async def test_many_keys_keep_the_limit(nats_server: NatsServer) -> None:
    """A look asks for eight of them, and one that saw others' writes only proves nothing."""
    url = nats_server.url
    create_bucket(url, "b", history=64)
    put_many(url, "b", [("other", b"")] * 10)
    options = {"keys": ",".join(f"k{i:02}" for i in range(20)), "includeHistory": "true"}

    async with planning(url, "b", maxRowsPerTrigger="5", **options) as planner:
        start = await planner.initial_offset()
        start = await planner.latest_offset(start)
        for _ in range(3):  # what follows the first look, which asks for all
            await asyncio.to_thread(put, url, "b", "other", b"")
            start = await planner.latest_offset(start)
        rows = await asyncio.to_thread(
            put_many, url, "b", [("k15", b"%d" % i) for i in range(60)] + [("other", b"")]
        )
        sizes = []
        for _ in range(100):
            end = await planner.latest_offset(start)
            sizes.append(sum(start.stream_seq < seq <= end.stream_seq for seq in rows[:60]))
            start = end
        end = start
    assert sum(sizes) == 60
    assert max(sizes) <= 5
    assert end.stream_seq >= 73
