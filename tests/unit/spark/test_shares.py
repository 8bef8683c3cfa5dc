"""Shares of a limit, and groups of splits: tables and properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.spark.planning.limits import ROWS_PER_SPLIT, RangeLimit
from nats_stream_source.spark.planning.shares import (
    NOTHING,
    OPEN_COST,
    Demand,
    group_splits,
    next_first,
    share_limits,
)

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
