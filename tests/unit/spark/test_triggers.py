"""When a query polls and waits for rows, by a clock that the test turns; shares of a limit."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.rows.offsets import Position
from nats_stream_source.spark.planning.limits import (
    NOTHING,
    OPEN_COST,
    ROWS_PER_SPLIT,
    Demand,
    RangeLimit,
    group_splits,
    next_first,
    share_limits,
)
from nats_stream_source.spark.planning.query_planner import PollBackoff

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


async def test_poll_without_state_is_not_unchanged() -> None:
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


WHOLE = Demand(50, 5000.0, whole=True)

LIMITS = {
    "rows in proportion": (
        RangeLimit(40),
        [Demand(300, 1.0), Demand(100, 1.0)],
        [RangeLimit(30), RangeLimit(10)],
    ),
    "one row at least": (
        RangeLimit(10),
        [Demand(1000, 1.0), Demand(1, 1.0)],
        [RangeLimit(9), RangeLimit(1)],
    ),
    "more than there is": (
        RangeLimit(100),
        [Demand(5, 1.0), Demand(5, 1.0)],
        [RangeLimit(6), RangeLimit(6)],
    ),
    "bytes in proportion": (
        RangeLimit(None, 4000),
        [Demand(30, 6000.0), Demand(10, 2000.0)],
        [RangeLimit(14), RangeLimit(5)],
    ),
    "a byte for several": (RangeLimit(None, 1), [Demand(9, 9.0)] * 2, [RangeLimit(1), NOTHING]),
    "a stream without rows is not limited": (
        RangeLimit(10),
        [Demand(0, 0.0), Demand(20, 1.0)],
        [None, RangeLimit(10)],
    ),
    "the others share what a whole one leaves": (
        RangeLimit(60),
        [WHOLE, Demand(20, 1.0)],
        [None, RangeLimit(10)],
    ),
    "a whole one may exceed the limit, and then it is alone": (
        RangeLimit(10),
        [Demand(20, 1.0), WHOLE, WHOLE],
        [NOTHING, None, NOTHING],
    ),
    "a row is left, and no stream shares it": (
        RangeLimit(21),
        [WHOLE, Demand(0, 0.0)],
        [None, None],
    ),
    "a limit of bytes stops a second whole one": (
        RangeLimit(None, 5000),
        [WHOLE, WHOLE],
        [None, NOTHING],
    ),
}


@pytest.mark.parametrize(("limit", "demands", "expected"), LIMITS.values(), ids=LIMITS)
def test_share_limits(
    limit: RangeLimit, demands: list[Demand], expected: list[RangeLimit | None]
) -> None:
    assert list(share_limits(limit, dict(zip("abc", demands, strict=False))).values()) == expected


TURNS = {
    # streams, the first one, limit: streams with a share, the first one of the next micro-batch
    "limit for all": ("abcd", "c", 4, "abcd", "c"),
    "from the first on": ("abcd", "", 2, "ab", "c"),
    "cyclically": ("abcd", "d", 2, "ad", "b"),
    "fewer streams than before": ("ab", "d", 1, "a", "b"),
    "first one is missing": ("abde", "c", 2, "de", "a"),
    "new stream before the first one": ("abcd", "b", 1, "b", "c"),
}


@pytest.mark.parametrize(("streams", "first", "limit", "served", "then"), TURNS.values(), ids=TURNS)
def test_turns_of_streams(streams: str, first: str, limit: int, served: str, then: str) -> None:
    limits = share_limits(RangeLimit(limit), dict.fromkeys(streams, Demand(9, 9.0)), first)
    assert {name for name, share in limits.items() if share != NOTHING} == set(served)
    assert next_first(limits, first) == then


def test_stream_without_rows_takes_no_turn() -> None:
    demands = dict.fromkeys("abcd", Demand(9, 9.0)) | {"c": Demand(0, 0.0)}
    limits = share_limits(RangeLimit(1), demands)
    assert limits == {"a": RangeLimit(1), "b": NOTHING, "c": None, "d": NOTHING}
    assert next_first(limits, "") == "b"


NAMES = "abcdefgh"


@given(
    st.lists(st.dictionaries(st.sampled_from(NAMES), st.integers(0, 50)), min_size=8, max_size=8),
    st.sampled_from(NAMES),
    st.integers(1, 9),
    st.sampled_from([None, 1, 500]),
)
def test_waiting_stream_has_share_within_one_cycle(
    others: list[dict[str, int]], waiting: str, max_rows: int, max_bytes: int | None
) -> None:
    """Whatever streams have rows in each micro-batch."""
    first, limit, served = "", RangeLimit(max_rows, max_bytes), False
    for rows in others:
        demands = {name: Demand(count, 10.0 * count) for name, count in rows.items()}
        limits = share_limits(limit, demands | {waiting: Demand(5, 50.0)}, first)
        assert limits.keys() == rows.keys() | {waiting}
        assert sum(share.max_rows or 0 for share in limits.values() if share) <= max_rows
        served |= limits[waiting] != NOTHING
        first = next_first(limits, first)
    assert served


GROUPS = {
    "small ones share a task": ([10] * 6, 1, 4, 1),
    "at least so many": ([10] * 6, 3, 2, 3),
    "no more than there are splits": ([10] * 2, 8, 8, 2),
    "no more than the cores": ([ROWS_PER_SPLIT] * 8, 1, 2, 2),
    "no more than the rows justify": ([ROWS_PER_SPLIT - OPEN_COST, 0, 0], 1, 8, 2),
}


@pytest.mark.parametrize(("rows", "at_least", "cores", "count"), GROUPS.values(), ids=GROUPS)
def test_number_of_groups(rows: list[int], at_least: int, cores: int, count: int) -> None:
    assert len(group_splits(rows, at_least=at_least, cores=cores)) == count


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=50), st.integers(1, 8))
def test_groups_have_each_split_once_and_are_balanced(rows: list[int], cores: int) -> None:
    groups = group_splits(rows, at_least=1, cores=cores)
    assert sorted(index for group in groups for index in group) == list(range(len(rows)))
    assert all(group and group == sorted(group) for group in groups)
    loads = [sum(rows[index] + OPEN_COST for index in group) for group in groups]
    assert max(loads) - min(loads) <= max(rows) + OPEN_COST
