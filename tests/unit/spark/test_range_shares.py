"""Shares of a limit, and groups of splits: tables and properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.spark.planning.limits import ROWS_PER_SPLIT, RangeLimit
from nats_stream_source.spark.planning.range_shares import (
    NOTHING,
    Demand,
    next_first,
    share_limits,
    shares,
)
from nats_stream_source.spark.planning.task_groups import OPEN_COST, group_splits

SHARES = {
    "in proportion": (100, [300, 100], [75, 25]),
    "one at least": (10, [1000, 1], [9, 1]),
    "nothing for an empty one": (10, [5, 0, 5], [5, 0, 5]),
    "more than there is": (100, [5, 5], [50, 50]),
    "fewer than streams": (2, [9, 0, 9, 9], [1, 0, 1, 0]),
    "no limit left": (0, [9, 9], [0, 0]),
    "no stream": (5, [], []),
}


@pytest.mark.parametrize(("limit", "rows", "expected"), SHARES.values(), ids=SHARES)
def test_shares(limit: int, rows: list[int], expected: list[int]) -> None:
    assert shares(limit, rows) == expected


@given(st.integers(0, 10**5), st.lists(st.integers(0, 10**6), max_size=30))
def test_shares_never_exceed_limit(limit: int, rows: list[int]) -> None:
    found = shares(limit, rows)
    active = [share for share, count in zip(found, rows, strict=True) if count]
    assert sum(found) == (limit if active and limit > len(active) else min(limit, len(active)))
    assert all(share == 0 for share, count in zip(found, rows, strict=True) if not count)
    assert limit < len(active) or all(share >= 1 for share in active)


WHOLE = Demand(50, 5000.0, whole=True)

LIMITS = {
    "rows in proportion": (
        RangeLimit(40),
        [Demand(300, 1.0), Demand(100, 1.0)],
        [RangeLimit(30), RangeLimit(10)],
    ),
    "bytes in proportion": (
        RangeLimit(None, 4000),
        [Demand(1, 3000.0), Demand(1, 1000.0)],
        [RangeLimit(None, 3000), RangeLimit(None, 1000)],
    ),
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
