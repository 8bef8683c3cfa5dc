"""Limits of a micro-batch in rows, also under filters, holes and steady writes; balanced splits."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.direct_get.request import MessageCount, count_messages
from nats_stream_source.rows.base import Split
from nats_stream_source.spark.planning import limits
from tests.support.nats.buckets import create_bucket, fill_bucket, put, put_many
from tests.support.query_driver.driver import new_query

pytestmark = pytest.mark.servers


def test_initial_values_of_bucket_with_history_are_one_batch(url: str) -> None:
    fill_bucket(url, "b", ((f"k{i % 4}", b"v") for i in range(20)), history=5)
    with new_query(url, bucket="b", maxRowsPerTrigger=2, minPartitions=2) as query:
        assert query.plan()
        (first,) = query.splits
        query.read()
        end = query.offset
        put(url, "b", "later", b"v")
        assert query.plan()
        (second,) = query.splits
    found = [end[name] for name in ("stream_seq", "consumer_seq", "initial_through")]
    assert found == [20, 4, 20]
    assert (first.range.last_per_subject, first.range.filters) == (True, ("$KV.b.>",))
    request = second.range
    assert (request.last_per_subject, request.filters) == (False, ())
    assert (request.start, request.end) == (20, 21)


KEYS = 1000
WRITES = 10_000
LIMIT = 60


@pytest.mark.parametrize("keys", [None, "a.*", "a.*,b.*,c.*,d.*,e.*"])
def test_limit_with_nine_tenths_removed(
    url: str, monkeypatch: pytest.MonkeyPatch, keys: str | None
) -> None:
    counted: list[int] = []

    async def count(
        jetstream: JetStream, stream: str, seq: int, filters: Sequence[str]
    ) -> MessageCount:
        counted.append(seq)
        return await count_messages(jetstream, stream, seq, filters)

    monkeypatch.setattr(limits, "count_messages", count)
    chance = random.Random(1)
    names = [f"{'abcdef'[key % 6]}.{key}" for key in range(KEYS)]
    written = [names[chance.randrange(KEYS)] for _ in range(WRITES)]
    fill_bucket(url, "b", ((name, b"v") for name in written), history=1)
    read = tuple((keys or "").replace("*", "").split(","))
    last = {name: seq for seq, name in enumerate(written, start=1) if name.startswith(read)}
    with new_query(url, bucket="b", maxRowsPerTrigger=LIMIT, keys=keys) as query:
        rows = [len(batch.records) for batch in query.drain()]
    assert sum(rows) == len(last)
    assert max(rows) <= LIMIT
    assert min(rows[:-1]) >= LIMIT / 2
    assert len(counted) <= 1.5 * len(rows) + 2


def test_filter_rarely_matching_does_not_stay_behind(url: str) -> None:
    create_bucket(url, "b", history=64)
    put(url, "b", "rare", b"v")
    with new_query(url, bucket="b", keys="rare") as query:
        query.drain()
        positions = [query.seq]
        for _ in range(8):
            put_many(url, "b", [(f"k{i}", b"v") for i in range(10)])
            query.drain()
            positions.append(query.seq)
    assert positions[0] == 1
    assert positions[-1] > 40  # in the newer half of 81
    assert len(set(positions)) <= 5  # not with every write


@pytest.mark.parametrize("limit", [1, 5, 50])
def test_limit_while_others_write_is_not_exceeded(url: str, limit: int) -> None:
    """Each range advances, and has at most the limit at the time at which it was planned."""
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

    with (
        new_query(url, bucket="b", maxRowsPerTrigger=limit) as query,
        ThreadPoolExecutor(1) as pool,
    ):
        writing = pool.submit(write)
        try:
            planned = 0
            while planned < 20 or acknowledged == 3000:
                planned += 1
                known = acknowledged
                if query.plan():
                    assert len(query.read().records) <= limit
                else:
                    assert known <= query.seq
        finally:
            enough.set()
        writing.result()


def splits_of(url: str, **options: Any) -> list[Split]:
    with new_query(url, bucket="b", **options) as query:
        assert query.plan()
        return query.splits


@pytest.mark.parametrize("keys", [None, "a.*", "a.*,b.*,c.*,d.*,e.*,f.*"])
def test_splits_are_balanced_by_rows(url: str, keys: str | None) -> None:
    """All but one that are left lie in the last twentieth of the stream."""
    create_bucket(url, "b")
    names = [f"{'abcdef'[i % 6]}.{i}" for i in range(600)]
    put(url, "b", "a.first", b"v")
    put_many(url, "b", ((names[i % 3], b"v") for i in range(11_399)))
    put_many(url, "b", ((name, b"v") for name in names))
    last = 12_000
    splits = splits_of(url, minPartitions=4, keys=keys)
    assert splits[0].range.start == 0
    assert all(a.range.end == b.range.start for a, b in itertools.pairwise(splits))
    wanted = tuple((keys or "").replace("*", "").split(","))
    live = [1] + [
        seq
        for seq, name in zip(range(last - 599, last + 1), names, strict=True)
        if name.startswith(wanted)
    ]
    rows = [
        sum(1 for seq in live if split.range.start < seq <= split.range.end) for split in splits
    ]
    assert sum(rows) == len(live)
    assert len(rows) == 4
    assert max(rows) <= 2 * min(rows)


def test_splits_of_complete_history(ten: str) -> None:
    """Each split requires the messages from its own beginning."""
    splits = splits_of(ten, minPartitions=2, includeHistory=True)
    assert [split.required_from for split in splits] == [1, splits[0].range.end + 1]
