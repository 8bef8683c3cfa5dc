"""Splits of a range: balanced by rows, cut for the cores, one for a small range."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.spark.planning import limits
from tests.integration.spark.planning.planners import Asked, planning
from tests.support.nats.buckets import create_bucket, put, put_many

pytestmark = pytest.mark.servers


async def splits_of(url: str, bucket: str, cores: int = 2, **options: str) -> list[Any]:
    async with planning(url, bucket, cores=cores, **options) as planner:
        start = await planner.initial_offset()
        return list(await planner.splits(start, await planner.latest_offset(start)))


@pytest.mark.parametrize("keys", ["", "a.*"])
async def test_splits_of_range_that_ends_before_stream(nats_server: NatsServer, keys: str) -> None:
    """Ranks count to the stream's end, also where the range ends before it."""
    url = nats_server.url
    create_bucket(url, "b")
    put_many(url, "b", ((f"{'ab'[i % 2]}.{i}", b"v") for i in range(4000)))
    options = {"minPartitions": "4", "maxRowsPerTrigger": "400"} | ({"keys": keys} if keys else {})

    async with planning(url, "b", **options) as planner:
        start = await planner.initial_offset()
        rows = [
            split.range.end - split.range.start
            for split in list(await planner.splits(start, await planner.latest_offset(start)))
        ]
    assert len(rows) == 4
    assert max(rows) <= 2 * min(rows)


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
    splits = await splits_of(nats_server.url, "b", **options)
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


async def test_small_range_is_one_split_without_requests(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_bucket(nats_server.url, "b")
    put_many(nats_server.url, "b", ((f"k{i}", b"v") for i in range(1000)))

    async with planning(nats_server.url, "b", cores=64) as planner:
        start = await planner.initial_offset()
        asked = Asked(monkeypatch)
        splits = await planner.splits(start, await planner.latest_offset(start))
        subjects = asked.subjects
    assert [(split.range.start, split.range.end) for split in splits] == [(0, 1000)]
    assert subjects == ["STREAM.INFO.KV_b"]


async def test_large_range_is_cut_for_cores(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BYTES_PER_SPLIT", 1 << 20)
    create_bucket(nats_server.url, "b")
    put_many(nats_server.url, "b", ((f"k{i}", bytes(100_000)) for i in range(35)))
    sizes = [
        split.range.end - split.range.start
        for split in await splits_of(nats_server.url, "b", cores=64)
    ]
    assert len(sizes) == 3
    assert max(sizes) <= 13
    assert len(await splits_of(nats_server.url, "b", cores=2)) == 2
    assert len(await splits_of(nats_server.url, "b", cores=1)) == 1


async def test_fewer_sequences_than_min_partitions(ten: str) -> None:
    splits = await splits_of(ten, "b", minPartitions="50")
    assert [split.range.bounds for split in splits] == [f"({i}, {i + 1}]" for i in range(10)]


async def test_splits_of_complete_history(ten: str) -> None:
    """Each split requires the messages from its own beginning."""
    splits = await splits_of(ten, "b", minPartitions="2", includeHistory="true")
    assert [split.required_from for split in splits] == [1, splits[0].range.end + 1]


async def test_initial_values_of_bucket_with_history_are_one_split(
    nats_server: NatsServer,
) -> None:
    create_bucket(nats_server.url, "b", history=5)
    put_many(nats_server.url, "b", ((f"k{i % 4}", b"v") for i in range(20)))
    (split,) = await splits_of(nats_server.url, "b", minPartitions="4", maxRowsPerTrigger="7")
    assert (split.range.start, split.range.end, split.range.last_per_subject) == (0, 20, True)
