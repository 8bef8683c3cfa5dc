"""The planner's requests: of an idle query, with many filters."""

from __future__ import annotations

import asyncio

import pytest

from nats_stream_source.embedded import NatsServer
from tests.integration.spark.planning.planners import Asked, planning
from tests.support.nats.buckets import consumers, create_bucket, put, put_many

pytestmark = pytest.mark.servers


async def test_idle_query_sends_few_requests_and_creates_no_consumer(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_bucket(nats_server.url, "b")
    put(nats_server.url, "b", "a", b"v")
    now = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    async with planning(nats_server.url, "b", lambda: now, sleep) as planner:
        start = await planner.latest_offset(await planner.initial_offset())
        asked = Asked(monkeypatch)
        began = now
        while now < began + 60:
            now += 0.01  # Spark's own pause
            assert await planner.latest_offset(start) == start
        looks = len(asked.subjects)
        assert set(asked.subjects) == {"STREAM.INFO.KV_b"}
        await asyncio.to_thread(put, nats_server.url, "b", "later", b"v")
        assert await planner.latest_offset(start) != start
        assert looks < 600
    assert consumers(nats_server.url, "b") == []


async def test_match_of_one_of_many_filters_is_found_by_next_poll(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b", history=-1)
    put_many(nats_server.url, "b", [("other", b"v")] * 1000)

    async def write(*keys: str) -> None:
        await asyncio.to_thread(put_many, nats_server.url, "b", [(key, b"v") for key in keys])

    keys = [f"k{i}" for i in range(40)]
    async with planning(nats_server.url, "b", keys=",".join(keys)) as planner:
        start = await planner.latest_offset(await planner.initial_offset())
        for key in keys[::13]:
            await write(*["other"] * 20)
            assert await planner.latest_offset(start) == start
            await write(key, *["other"] * 20)
            end = await planner.latest_offset(start)
            (split,) = await planner.splits(start, end)
            assert split.range.end > split.range.start + 20
            start = end
