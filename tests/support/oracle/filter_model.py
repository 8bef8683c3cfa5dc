"""Spark's filters on rows, as plainly as possible; and any such filters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringStartsWith,
)


def matches(row: Mapping[str, Any], filters: Sequence[Filter]) -> bool:
    """Whether all ``filters`` let a row through whose columns are not null."""
    return all(_match(row, one) for one in filters)


def _match(row: Mapping[str, Any], one: Filter) -> bool:
    if isinstance(one, Not):
        return not _match(row, one.child)
    value = row[one.attribute[0]]  # type: ignore[attr-defined]
    if isinstance(one, IsNotNull):
        return True
    if isinstance(one, (EqualTo, EqualNullSafe)):
        return bool(value == one.value)
    if isinstance(one, In):
        return value in one.value
    if isinstance(one, StringStartsWith):
        return bool(value.startswith(one.value))
    if isinstance(one, StringContains):
        return bool(one.value in value)
    if isinstance(one, GreaterThan):
        return bool(value > one.value)
    if isinstance(one, GreaterThanOrEqual):
        return bool(value >= one.value)
    if isinstance(one, LessThan):
        return bool(value < one.value)
    assert isinstance(one, LessThanOrEqual)
    return bool(value <= one.value)


_COMPARED = st.sampled_from([EqualTo, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual])
_PREFIXES = st.sampled_from(["", "a", "a.", "a.a", "a.b", "b", "b.", "b.b.a"])
_NO_NAMES = st.sampled_from(["", "a.", "a..b", "a b", "a.*", "*", "a.>", ">"])


def any_filters(
    name: str,
    sequence: str,
    time: str,
    *,
    names: st.SearchStrategy[str],
    times: st.SearchStrategy[datetime],
) -> st.SearchStrategy[list[Filter]]:
    """One filter or two, most of which can be pushed, of the columns of these names."""
    some = st.one_of(names, names, names, _NO_NAMES)
    prefix = st.one_of(_PREFIXES, _PREFIXES, st.text("ab.* ä", max_size=5))
    positive = st.one_of(
        st.builds(EqualTo, st.just((name,)), some),
        st.builds(In, st.just((name,)), st.lists(some, min_size=1, max_size=4).map(tuple)),
        st.builds(StringStartsWith, st.just((name,)), prefix),
        st.builds(StringContains, st.just((name,)), st.text("ab.", max_size=2)),
        _COMPARED.flatmap(lambda c: st.builds(c, st.just((sequence,)), st.integers(-2, 40))),
        st.builds(In, st.just((sequence,)), st.lists(st.integers(1, 40), min_size=1).map(tuple)),
        _COMPARED.flatmap(lambda c: st.builds(c, st.just((time,)), times)),
    )
    either = st.one_of(positive, positive, positive, st.builds(Not, positive))
    return st.lists(either, min_size=1, max_size=2)
