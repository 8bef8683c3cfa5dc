"""How many requests the planner sends: idle, with many filters, with available now."""

from __future__ import annotations

import asyncio

import pytest

from nats_stream_source.embedded import NatsServer
from tests.integration.spark.planning.planners import Asked, ends, planning
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


async def test_filters_many_cost_few_requests(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what matches in the end is found, whichever filter it is."""
    create_bucket(nats_server.url, "b", history=-1)
    put_many(nats_server.url, "b", [("other", b"v")] * 1000)

    async def write(count: int, key: str = "other") -> None:
        await asyncio.to_thread(put_many, nats_server.url, "b", [(key, b"v")] * count)

    keys = [f"k{i}" for i in range(40)]
    async with planning(nats_server.url, "b", keys=",".join(keys)) as planner:
        start = await planner.latest_offset(await planner.initial_offset())
        await write(20)
        assert await planner.latest_offset(start) == start  # the first look asks for all
        asked = Asked(monkeypatch)
        for count in (3, 30, 3, 30):
            await write(count)
            asked.subjects.clear()
            assert await planner.latest_offset(start) == start
            assert len(asked.subjects) <= 12
        for key in keys[::13]:
            await write(20)
            assert await planner.latest_offset(start) == start
            await write(1, key)
            await write(20)
            looks = 1
            while (end := await planner.latest_offset(start)) == start:
                looks += 1
                assert looks <= 5  # eight filters a look
            (split,) = await planner.splits(start, end)
            assert split.range.end > split.range.start + 20
            start = end


async def test_available_now_requests_every_filter(nats_server: NatsServer) -> None:
    """Also after a poll from the same position: a result of "no rows" would end the run."""
    create_bucket(nats_server.url, "b", history=-1)
    put_many(nats_server.url, "b", [("other", b"v")] * 1000)

    async def write(*keys: str) -> None:
        await asyncio.to_thread(put_many, nats_server.url, "b", [(key, b"v") for key in keys])

    keys = ",".join(f"k{i}" for i in range(40))
    async with planning(nats_server.url, "b", keys=keys, updatesOnly="true") as planner:
        start = await planner.initial_offset()
        await write(*["other"] * 10)
        assert await planner.latest_offset(start) == start
        await write(*["other"] * 10, "k9", *["other"] * 10)
        await planner.prepare_available_now()
        assert await ends(planner) == [1021]
