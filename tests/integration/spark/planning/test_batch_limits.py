"""Limits of a micro-batch in rows, also under filters, holes and steady writes; balanced splits."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Sequence

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.direct_get.request import MessageCount, count_messages
from nats_stream_source.rows.base import Split
from nats_stream_source.spark.planning import limits
from tests.integration.spark.planning.planners import ends, planning
from tests.support.nats.buckets import create_bucket, put, put_many
from tests.support.nats.subscriptions import connected

pytestmark = pytest.mark.servers


async def test_initial_values_of_bucket_with_history_are_one_batch(
    nats_server: NatsServer,
) -> None:
    create_bucket(nats_server.url, "b", history=5)
    put_many(nats_server.url, "b", ((f"k{i % 4}", b"v") for i in range(20)))
    options = {"maxRowsPerTrigger": "2", "minPartitions": "2"}
    async with planning(nats_server.url, "b", **options) as planner:
        start = await planner.initial_offset()
        end = await planner.latest_offset(start)
        (first,) = await planner.splits(start, end)
        await asyncio.to_thread(put, nats_server.url, "b", "later", b"v")
        then = await planner.latest_offset(end)
        (second,) = await planner.splits(end, then)
    assert (end.stream_seq, end.consumer_seq, end.initial_through) == (20, 4, 20)
    assert (first.range.last_per_subject, first.range.filters) == (True, ("$KV.b.>",))
    request = second.range
    assert (request.last_per_subject, request.filters) == (False, ())
    assert (request.start, request.end) == (20, 21)


class Counts:
    """The sequences from which the planner had messages counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sequences: list[int] = []

        async def count(
            jetstream: JetStream, stream: str, seq: int, filters: Sequence[str]
        ) -> MessageCount:
            self.sequences.append(seq)
            return await count_messages(jetstream, stream, seq, filters)

        monkeypatch.setattr(limits, "count_messages", count)


KEYS = 1000
WRITES = 10_000
LIMIT = 60


@pytest.mark.parametrize("keys", ["", "a.*", "a.*,b.*,c.*,d.*,e.*"])
async def test_limit_with_nine_tenths_removed(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, keys: str
) -> None:
    chance = random.Random(1)
    names = [f"{'abcdef'[key % 6]}.{key}" for key in range(KEYS)]
    written = [names[chance.randrange(KEYS)] for _ in range(WRITES)]
    create_bucket(nats_server.url, "b", history=1)
    put_many(nats_server.url, "b", ((name, b"v") for name in written))
    read = tuple(keys.replace("*", "").split(","))
    last = {name: seq for seq, name in enumerate(written, start=1) if name.startswith(read)}
    counts = Counts(monkeypatch)
    options = {"maxRowsPerTrigger": str(LIMIT)} | ({"keys": keys} if keys else {})
    async with planning(nats_server.url, "b", **options) as planner:
        found = await ends(planner)
    rows = [
        sum(start < seq <= end for seq in last.values())
        for start, end in itertools.pairwise([0, *found])
    ]
    assert sum(rows) == len(last)
    assert max(rows) <= LIMIT
    assert min(rows[:-1]) >= LIMIT / 2
    assert len(counts.sequences) <= 1.5 * len(rows) + 2


async def test_filter_rarely_matching_does_not_stay_behind(nats_server: NatsServer) -> None:
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


@pytest.mark.parametrize("limit", [1, 5, 50])
async def test_limit_while_others_write_is_not_exceeded(
    nats_server: NatsServer, limit: int
) -> None:
    """Each range advances, and has at most the limit at the time at which it was planned."""
    url = nats_server.url
    create_bucket(url, "b", history=1)
    chance = random.Random(1)

    def entries(count: int) -> list[tuple[str, bytes]]:
        return [(f"k{chance.randrange(300)}", b"v") for _ in range(count)]

    put_many(url, "b", entries(3000))
    acknowledged = 3000
    enough = threading.Event()

    def write() -> None:
        nonlocal acknowledged
        while not enough.is_set():
            acknowledged = put_many(url, "b", entries(50))[-1]

    async with (
        planning(url, "b", maxRowsPerTrigger=str(limit)) as planner,
        connected(url) as jetstream,
    ):
        start = await planner.initial_offset()
        writing = asyncio.create_task(asyncio.to_thread(write))
        try:
            planned = 0
            while planned < 20 or acknowledged == 3000:
                planned += 1
                known = acknowledged
                end = await planner.latest_offset(start)
                assert end.stream_seq > start.stream_seq or known <= start.stream_seq
                rows, seq = 0, start.stream_seq
                while message := await jetstream.message("KV_b", seq=seq + 1, next_by_subj=">"):
                    seq = message.seq
                    if seq > end.stream_seq:
                        break
                    rows += 1
                assert rows <= limit
                start = end
        finally:
            enough.set()
            await writing


async def splits_of(url: str, **options: str) -> list[Split]:
    async with planning(url, "b", **options) as planner:
        start = await planner.initial_offset()
        return await planner.splits(start, await planner.latest_offset(start))


@pytest.mark.parametrize("keys", ["", "a.*", "a.*,b.*,c.*,d.*,e.*,f.*"])
async def test_splits_are_balanced_by_rows(nats_server: NatsServer, keys: str) -> None:
    """All but one that are left lie in the last twentieth of the stream."""
    create_bucket(nats_server.url, "b")
    names = [f"{'abcdef'[i % 6]}.{i}" for i in range(600)]
    put(nats_server.url, "b", "a.first", b"v")
    put_many(nats_server.url, "b", ((names[i % 3], b"v") for i in range(11_399)))
    put_many(nats_server.url, "b", ((name, b"v") for name in names))
    last = 12_000
    options = {"minPartitions": "4"} | ({"keys": keys} if keys else {})
    splits = await splits_of(nats_server.url, **options)
    assert splits[0].range.start == 0
    assert all(a.range.end == b.range.start for a, b in itertools.pairwise(splits))
    wanted = keys.replace("*", "").split(",")
    live = [1] + [
        seq
        for seq, name in zip(range(last - 599, last + 1), names, strict=True)
        if not keys or name.startswith(tuple(wanted))
    ]
    rows = [
        sum(1 for seq in live if split.range.start < seq <= split.range.end) for split in splits
    ]
    assert sum(rows) == len(live)
    assert len(rows) == 4
    assert max(rows) <= 2 * min(rows)


async def test_splits_of_complete_history(ten: str) -> None:
    """Each split requires the messages from its own beginning."""
    splits = await splits_of(ten, minPartitions="2", includeHistory="true")
    assert [split.required_from for split in splits] == [1, splits[0].range.end + 1]
