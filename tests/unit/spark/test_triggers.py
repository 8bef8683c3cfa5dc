"""When an idle query polls, and which micro-batches wait for rows: a clock that the test turns."""

from __future__ import annotations

import pytest

from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.rows.offsets import Position
from nats_stream_source.spark.planning.triggers import PollBackoff, TriggerDelay

START = Position("2026-01-01T00:00:00Z", 0, 0, 7, None, 7, 7)


def info(last_seq: int) -> StreamInfo:
    return StreamInfo("KV_b", START.created, 1, last_seq, None, 1, 1, 100, 0, {})


class Time:
    def __init__(self) -> None:
        self.now = 1000.0
        self.idle = PollBackoff(lambda: self.now, self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    async def look(self, took: float = 0.0) -> float:
        """Seconds of rest before a look; then it takes ``took``."""
        before = self.now
        assert await self.idle.wait_until_due(START)
        rested = self.now - before
        self.now += took
        return rested


async def test_looks_become_rarer_in_silence() -> None:
    time = Time()
    assert await time.look() == 0
    assert not time.idle.is_unchanged(START, info(7).position)
    time.idle.record_empty(START, info(7).position)
    rests = []
    began = time.now
    while time.now < began + 60:
        rests.append(await time.look(took=0.001))
        assert time.idle.is_unchanged(START, info(7).position)
    assert rests[0] == pytest.approx(0.02)
    assert rests[-1] == pytest.approx(0.25)
    assert rests == sorted(rests)
    assert len(rests) < 500


@pytest.mark.parametrize(("took", "rest"), [(0.0001, 0.02), (0.005, 0.05), (1.0, 0.1)])
async def test_looks_take_tenth_of_time_while_others_write(took: float, rest: float) -> None:
    time = Time()
    await time.look(took)
    time.idle.record_empty(START, info(7).position)
    assert await time.look() == pytest.approx(rest)


async def test_write_is_change_and_ends_silence() -> None:
    time = Time()
    await time.look()
    time.idle.record_empty(START, info(7).position)
    time.now += 100
    await time.look()
    assert not time.idle.is_unchanged(START, info(8).position)
    time.idle.record_empty(START, info(8).position)
    assert await time.look() == pytest.approx(0.02)


async def test_partial_poll_is_not_exhaustive() -> None:
    time = Time()
    await time.look()
    time.idle.record_empty(START, None)
    await time.look()
    assert not time.idle.is_unchanged(START, info(8).position)


async def test_poll_after_read_is_immediate() -> None:
    time = Time()
    await time.look()
    time.idle.record_empty(START, info(7).position)
    time.idle.reset()
    assert await time.look() == 0


async def test_sources_of_query_do_not_wait_for_each_other() -> None:
    """Spark polls again after a micro-batch, not after its own pause of 10 ms."""
    time = Time()
    await time.look()
    time.idle.record_empty(START, info(7).position)
    time.now += 50
    await time.look()
    assert time.idle.is_unchanged(
        START, info(7).position
    )  # the next look is due in a quarter of a second
    before = time.now = time.now + 0.15
    assert not await time.idle.wait_until_due(START)
    assert time.now == before
    assert await time.look() == pytest.approx(0.1)  # asked again at once: nothing else is going on


@pytest.mark.parametrize(
    ("min_rows", "rows", "seconds", "due"),
    [
        (None, 1, 0.0, True),
        (10, 9, 29.9, False),
        (10, 10, 0.0, True),
        (10, 9, 30.0, True),
    ],
)
def test_delay_restarts_after_micro_batch(
    min_rows: int | None, rows: int, seconds: float, due: bool
) -> None:
    now = 100.0
    delay = TriggerDelay(min_rows, 30.0, lambda: now)
    assert delay.is_due(1), "the first one does not wait"
    delay.record()
    now += seconds
    assert delay.is_due(rows) is due
