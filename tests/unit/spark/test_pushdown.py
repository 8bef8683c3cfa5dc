"""Pushed filters, by tables of cases: the names, sequences and times that narrow a batch read."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from nats_stream_source.errors import OptionError
from nats_stream_source.options import (
    KvOptions,
    Mode,
    StreamOptions,
    kv_options,
)
from nats_stream_source.spark.formats.base import ReadScope
from nats_stream_source.spark.pushdown import MARGIN, MAX_NAMES, PushedFilters, pushed_filters
from tests.unit.spark.batch_options import CREATED, KEY, MICRO, NOON, NOON_NS, SERVERS, kv, stream

REVISION = ("revision",)
MANY = [f"fleet.{n}" for n in range(MAX_NAMES + 1)]
NAMES: dict[str, tuple[list[Filter], tuple[str, ...] | None]] = {
    "nothing": ([], None),
    "equal": ([IsNotNull(KEY), EqualTo(KEY, "a.b")], ("a.b",)),
    "equal, null safe": ([EqualNullSafe(KEY, "a.b")], ("a.b",)),
    "no key is null": ([EqualNullSafe(KEY, None)], ()),
    "in": ([In(KEY, ["b", "a", None])], ("a", "b")),  # type: ignore[arg-type]  # Spark's own list
    "in, of one and the other": ([In(KEY, ("a", "b")), In(KEY, ("b", "c"))], ("b",)),
    "two that exclude each other": ([EqualTo(KEY, "a"), EqualTo(KEY, "b")], ()),
    "prefix of whole tokens": ([StringStartsWith(KEY, "a.b.")], ("a.b.>",)),
    "prefix within a token": ([StringStartsWith(KEY, "a.b.c")], ("a.b.>",)),
    "prefix within the first token": ([StringStartsWith(KEY, "a")], None),
    "every name has the empty prefix": ([StringStartsWith(KEY, "")], None),
    "two prefixes": ([StringStartsWith(KEY, "a.b.c"), StringStartsWith(KEY, "a.")], ("a.b.>",)),
    "two prefixes that exclude each other": (
        [StringStartsWith(KEY, "a.b"), StringStartsWith(KEY, "a.c")],
        (),
    ),
    "in, and a prefix": ([In(KEY, ("a.x", "b.x")), StringStartsWith(KEY, "a")], ("a.x",)),
    "too many": ([In(KEY, tuple(MANY))], ("fleet.>",)),
    "too many, with nothing in common": ([In(KEY, (*MANY, "x"))], None),
    "too long for one request": (
        [In(KEY, tuple(f"fleet.{n}{'x' * 1000}" for n in range(80)))],
        ("fleet.>",),
    ),
    "longer than a subject can be": ([EqualTo(KEY, "x" * 5000)], None),
    "a name that none has: empty": ([EqualTo(KEY, "")], ()),
    "a name that none has: an empty token": ([In(KEY, ("a..b", ".a", "a."))], ()),
    "a name that none has: a space": ([EqualTo(KEY, "a b")], ()),
    "a prefix that none has": ([StringStartsWith(KEY, "a..b")], ()),
    "a prefix that none has: a space": ([StringStartsWith(KEY, "a.b c")], ()),
    "only those that may be": ([In(KEY, ("a", "b..c"))], ("a",)),
    "not a key by ADR-8, but servers take it": ([EqualTo(KEY, "ä")], ("ä",)),
    "would be a wildcard": ([EqualTo(KEY, "*")], None),
    "would be a wildcard, below a.": ([In(KEY, ("a.b", "a.>"))], ("a.>",)),
    "would be a wildcard in a prefix": ([StringStartsWith(KEY, "*.a")], None),
    "no filter can say it": ([EqualTo(KEY, "a*b")], None),
    "not equal": ([Not(EqualTo(KEY, "a"))], None),
    "not in": ([Not(In(KEY, ("a", "b")))], None),
    "before and after": ([GreaterThan(KEY, "a"), LessThan(KEY, "b")], None),
    "suffix": ([StringEndsWith(KEY, "a"), StringContains(KEY, "b")], None),
    "another column": ([EqualTo(("operation",), "PUT"), EqualTo(("bucket",), "b")], None),
    "a field of the same name": ([EqualTo(("headers", "key"), "a")], None),
    "not a text": ([EqualTo(KEY, 5)], None),
}


@pytest.mark.parametrize(("filters", "names"), NAMES.values(), ids=NAMES)
def test_names(filters: list[Filter], names: tuple[str, ...] | None) -> None:
    assert pushed_filters(kv(), filters) == PushedFilters(names)


BOUNDS: dict[str, tuple[list[Filter], tuple[int | None, int | None]]] = {
    "equal": ([EqualTo(REVISION, 5)], (5, 5)),
    "greater": ([GreaterThan(REVISION, 5)], (6, None)),
    "from": ([GreaterThanOrEqual(REVISION, 5)], (5, None)),
    "less": ([LessThan(REVISION, 5)], (None, 4)),
    "up to": ([LessThanOrEqual(REVISION, 5)], (None, 5)),
    "between, twice": (
        [
            GreaterThan(REVISION, 1),
            GreaterThan(REVISION, 3),
            LessThan(REVISION, 9),
            LessThanOrEqual(REVISION, 7),
        ],
        (4, 7),
    ),
    "in": ([In(REVISION, (7, 3, None))], (3, 7)),
    "in nothing": ([In(REVISION, ())], (None, None)),
    "not": ([Not(GreaterThan(REVISION, 5))], (None, None)),
    "not whole": ([GreaterThan(REVISION, 5.5), EqualTo(REVISION, True)], (None, None)),
    "one of them not whole": ([In(REVISION, (5, "7"))], (None, None)),
    "another column": ([GreaterThan(("delta",), 5)], (None, None)),
}


@pytest.mark.parametrize(("filters", "bounds"), BOUNDS.values(), ids=BOUNDS)
def test_bounds_of_sequences(filters: list[Filter], bounds: tuple[int | None, int | None]) -> None:
    found = pushed_filters(kv(includeHistory="true"), filters)
    assert (found.first, found.last) == bounds


TIMES: dict[str, tuple[list[Filter], tuple[int | None, int | None]]] = {
    "greater": ([GreaterThan(CREATED, NOON)], (NOON_NS + 1000, None)),
    "from": ([GreaterThanOrEqual(CREATED, NOON)], (NOON_NS, None)),
    "less": ([LessThan(CREATED, NOON)], (None, NOON_NS)),
    "up to": ([LessThanOrEqual(CREATED, NOON)], (None, NOON_NS + 1000)),
    "equal": ([EqualTo(CREATED, NOON + 3 * MICRO)], (NOON_NS + 3000, NOON_NS + 4000)),
    "before 1970": (
        [LessThan(CREATED, datetime(1, 1, 1, tzinfo=timezone.utc))],
        (None, -62_135_596_800 * 10**9),
    ),
    "without a zone": ([GreaterThan(CREATED, NOON.replace(tzinfo=None))], (None, None)),
    "a date": ([GreaterThan(CREATED, NOON.date())], (None, None)),
}


@pytest.mark.parametrize(("filters", "bounds"), TIMES.values(), ids=TIMES)
def test_bounds_of_times_have_a_margin(
    filters: list[Filter], bounds: tuple[int | None, int | None]
) -> None:
    since, until = bounds
    found = pushed_filters(kv(includeHistory="true"), filters)
    assert found.since == (None if since is None else since - MARGIN)
    assert found.until == (None if until is None else until + MARGIN)


ALL: list[Filter] = [
    *(EqualTo((column,), "a.b") for column in ("key", "subject")),
    *(GreaterThan((column,), 5) for column in ("revision", "sequence")),
    *(GreaterThan((column,), NOON) for column in ("created", "timestamp")),
]
NAMED = PushedFilters(("a.b",))
BOUNDED = PushedFilters(("a.b",), first=6, since=NOON_NS + 1000 - MARGIN)
READS: dict[str, tuple[KvOptions | StreamOptions, PushedFilters]] = {
    "a bucket as it is now": (kv(), NAMED),
    "as it was": (kv(asOfSequence="9"), NAMED),
    "as it was then": (kv(asOfTime="2026-11-21T12:00:00Z"), NAMED),
    "its history": (kv(includeHistory="true"), BOUNDED),
    "from a revision on": (kv(startSequence="3"), BOUNDED),
    "from a time on": (kv(startTime="2026-11-21T12:00:00Z"), BOUNDED),
    "a stream": (stream(), BOUNDED),
    "its part": (stream(startSequence="3", endTime="2026-11-21T12:00:00Z"), BOUNDED),
    "the last message of each subject": (stream(deliverPolicy="last_per_subject"), NAMED),
    "the last message": (stream(deliverPolicy="last"), PushedFilters()),
}


@pytest.mark.parametrize(("options", "expected"), READS.values(), ids=READS)
def test_what_is_narrowed_in_which_read(
    options: KvOptions | StreamOptions, expected: PushedFilters
) -> None:
    assert pushed_filters(options, ALL) == expected


CONTENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...] | None]] = {
    "of all keys": ((), ("a", "b"), ("p.a", "p.b")),
    "of some": (("p.a.>", "p.b"), ("a.x", "b", "c"), ("p.a.x", "p.b")),
    "of none": (("p.a.>",), ("b",), None),
    "prefix within a wider filter": (("p.a.>",), ("a.b.>",), ("p.a.b.>",)),
    "prefix around narrower ones": (("p.a.b", "p.a.c.*", "p.b"), ("a.>",), ("p.a.b", "p.a.c.*")),
    "prefix across another": (("p.*.x",), ("a.>",), ("p.a.x",)),
    "nothing can match": ((), (), None),
}


@pytest.mark.parametrize(("filters", "names", "left"), CONTENTS.values(), ids=CONTENTS)
def test_filters_of_the_options_and_of_the_query(
    filters: tuple[str, ...], names: tuple[str, ...], left: tuple[str, ...] | None
) -> None:
    content = ReadScope(filters=filters, match_all="p.>", prefix="p.", covers_stream=True)
    found = PushedFilters(names).narrow(content)
    expected = None if left is None else replace(content, filters=left, covers_stream=False)
    assert found == expected


def test_what_narrows_nothing_leaves_the_content_as_it_was() -> None:
    content = ReadScope(filters=("p.a.>",), match_all="p.>", prefix="p.", covers_stream=True)
    assert PushedFilters().narrow(content) is content
    assert PushedFilters(("a.>",)).narrow(content) is content


@pytest.mark.parametrize(
    ("narrow", "left"),
    [
        (PushedFilters(), (10, 20)),
        (PushedFilters(first=5, last=30), (10, 20)),
        (PushedFilters(first=15, last=17), (14, 17)),
        (PushedFilters(first=21), (20, 20)),
        (PushedFilters(first=99), (20, 20)),
        (PushedFilters(last=10), (10, 10)),
        (PushedFilters(last=-5), (10, 10)),
        (PushedFilters(first=18, last=12), (17, 17)),
    ],
    ids=repr,
)
def test_a_range_is_cut(narrow: PushedFilters, left: tuple[int, int]) -> None:
    assert narrow.sequences(10, 20) == left


def test_a_stream_has_no_filters_to_push() -> None:
    with pytest.raises(OptionError, match="filterPushdown"):
        kv_options({**SERVERS, "bucket": "b", "filterPushdown": "true"}, Mode.STREAMING)
    options = kv_options({**SERVERS, "bucket": "b", "filterPushdown": "false"}, Mode.STREAMING)
    assert not options.common.filter_pushdown


def test_every_kind_of_filter_that_is_not_known_is_left_alone() -> None:
    assert (
        pushed_filters(kv(includeHistory="true"), [IsNull(KEY), IsNotNull(CREATED)])
        == PushedFilters()
    )
