"""The consumer sequence that an offset reports."""

from __future__ import annotations

import asyncio

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.rows.offsets import Position
from tests.integration.spark.planning.planners import planning
from tests.support.nats.buckets import create_bucket, put_many

pytestmark = pytest.mark.servers


async def last_of(url: str, bucket: str, limit: int | None = None, **options: str) -> Position:
    if limit is not None:
        options["maxRowsPerTrigger"] = str(limit)
    async with planning(url, bucket, **options) as planner:
        start = await planner.initial_offset()
        while (end := await planner.latest_offset(start)) != start:
            start = end
        return start


@pytest.mark.parametrize("limit", [None, 7])
async def test_consumer_seq_counts_no_holes_among_initial_values(
    nats_server: NatsServer, limit: int | None
) -> None:
    create_bucket(nats_server.url, "b")
    put_many(nats_server.url, "b", ((f"k{i % 20}", b"v") for i in range(1000)))
    assert (await last_of(nats_server.url, "b", limit)).consumer_seq == 20


async def test_consumer_seq_counts_what_came_later_though_it_was_superseded(
    nats_server: NatsServer,
) -> None:
    create_bucket(nats_server.url, "b")
    put_many(nats_server.url, "b", ((f"k{i % 20}", b"v") for i in range(100)))

    async with planning(nats_server.url, "b") as planner:
        start = await planner.latest_offset(await planner.initial_offset())
        entries = [(f"k{i % 2}", b"v") for i in range(50)]
        await asyncio.to_thread(put_many, nats_server.url, "b", entries)
        assert (await planner.latest_offset(start)).consumer_seq == 70


@pytest.mark.parametrize(("keys", "count"), [("", 6), ("a.*", 3), ("a.*,b.1", 4), ("c", 0)])
async def test_consumer_seq_of_last_values_under_filters(
    nats_server: NatsServer, keys: str, count: int
) -> None:
    create_bucket(nats_server.url, "b", history=5)
    names = [f"{one}.{i}" for one in "ab" for i in range(3)]
    put_many(nats_server.url, "b", ((name, b"v") for name in names * 4))
    end = await last_of(nats_server.url, "b", **({"keys": keys} if keys else {}))
    assert (end.stream_seq, end.consumer_seq) == (24, count)
