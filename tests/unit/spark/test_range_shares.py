"""Shares of a limit, and groups of splits: tables and properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.spark.planning.limits import ROWS_PER_SPLIT, RangeLimit
from nats_stream_source.spark.planning.range_shares import (
    NOTHING,
    Demand,
    share_limits,
    shares,
)
from nats_stream_source.spark.planning.task_groups import OPEN_COST, group_splits

SHARES = {
    "in proportion": (100, [300, 100], 0, [75, 25]),
    "one at least": (10, [1000, 1], 0, [9, 1]),
    "nothing for an empty one": (10, [5, 0, 5], 0, [5, 0, 5]),
    "more than there is": (100, [5, 5], 0, [50, 50]),
    "fewer than streams, from the first on": (2, [9, 9, 9, 9], 0, [1, 1, 0, 0]),
    "fewer than streams, cyclically": (2, [9, 9, 9, 9], 3, [1, 0, 0, 1]),
    "no limit left": (0, [9, 9], 0, [0, 0]),
    "no stream": (5, [], 0, []),
}


@pytest.mark.parametrize(("limit", "rows", "first", "expected"), SHARES.values(), ids=SHARES)
def test_shares(limit: int, rows: list[int], first: int, expected: list[int]) -> None:
    assert shares(limit, rows, first) == expected


ROWS = st.lists(st.integers(0, 10**6), max_size=30)


@given(st.integers(0, 10**5), ROWS, st.integers(0, 29))
def test_shares_never_exceed_limit(limit: int, rows: list[int], first: int) -> None:
    found = shares(limit, rows, min(first, max(0, len(rows) - 1)))
    active = [share for share, count in zip(found, rows, strict=True) if count]
    assert sum(found) == (limit if active and limit > len(active) else min(limit, len(active)))
    assert all(share == 0 for share, count in zip(found, rows, strict=True) if not count)
    assert limit < len(active) or all(share >= 1 for share in active)


def test_streams_take_turns_under_low_limit() -> None:
    served = [shares(1, [5, 5, 5], turn).index(1) for turn in range(3)]
    assert served == [0, 1, 2]


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
    assert share_limits(limit, demands) == expected


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
