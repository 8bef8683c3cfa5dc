"""A planner with ``minRowsPerTrigger`` on a real stream."""

from __future__ import annotations

from nats_stream_source.embedded import NatsServer
from tests.integration.spark.planning.planners import planning
from tests.support.nats.buckets import create_bucket, put_many

WAITS = {"minRowsPerTrigger": "10", "maxTriggerDelay": "60"}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def fill(url: str, bucket: str, first: int, count: int) -> None:
    put_many(url, bucket, ((f"k{i}", b"x") for i in range(first, first + count)))


async def test_micro_batch_waits_for_rows_up_to_delay(shared_server: NatsServer) -> None:
    url, clock = shared_server.url, Clock()
    create_bucket(url, "waits")
    fill(url, "waits", 0, 3)
    async with planning(url, "waits", clock, clock.sleep, **WAITS) as planner:
        first = await planner.latest_offset(await planner.initial_offset())
        assert first.stream_seq == 3, "the first micro-batch does not wait"
        fill(url, "waits", 3, 9)
        assert await planner.latest_offset(first) == first
        waiting = planner.report_latest_offset()
        assert waiting is not None
        assert waiting.stream_seq == 12, "the lag shows what waits"
        fill(url, "waits", 12, 1)
        second = await planner.latest_offset(first)
        assert second.stream_seq == 13
        fill(url, "waits", 13, 1)
        # The stream does not change any more, and the delay passes.
        while (third := await planner.latest_offset(second)) == second:
            assert clock.now < 120
        assert clock.now >= 60
        assert third.stream_seq == 14
        (split,) = await planner.splits(second, third)
        assert (split.range.start, split.range.end) == (13, 14)


async def test_rows_behind_filter(shared_server: NatsServer) -> None:
    url, clock = shared_server.url, Clock()
    create_bucket(url, "filtered")
    put_many(url, "filtered", [("a.1", b"x"), ("b.1", b"x")])
    async with planning(url, "filtered", clock, clock.sleep, keys="a.*", **WAITS) as planner:
        first = await planner.latest_offset(await planner.initial_offset())
        put_many(url, "filtered", ((f"{'ab'[i % 2]}.{i}", b"x") for i in range(18)))
        assert await planner.latest_offset(first) == first, "nine match"
        put_many(url, "filtered", [("a.100", b"x")])
        clock.now += 1  # the poll is due
        assert (await planner.latest_offset(first)).stream_seq == 21


async def test_available_now_does_not_wait(shared_server: NatsServer) -> None:
    url, clock = shared_server.url, Clock()
    create_bucket(url, "now")
    fill(url, "now", 0, 3)
    async with planning(url, "now", clock, clock.sleep, **WAITS) as planner:
        first = await planner.latest_offset(await planner.initial_offset())
        fill(url, "now", 3, 2)
        await planner.prepare_available_now()
        assert (await planner.latest_offset(first)).stream_seq == 5
    async with planning(url, "now", clock, clock.sleep, **WAITS) as planner:
        await planner.latest_offset(await planner.initial_offset())
        # Trigger.Once
        assert (await planner.latest_offset(first, limited=False)).stream_seq == 5
