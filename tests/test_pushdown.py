"""Which filters of a query narrow a batch read, and that none changes its rows.

The model reads a stream's messages as the options say, as slowly and as plainly as possible, and
looks at every row with every filter. What is read of the narrowed stream must give the same rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone

import pytest
from filter_model import any_filters, matches
from hypothesis import given, settings
from hypothesis import strategies as st
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
from nats_stream_source.jetstream.subjects import covers, overlap
from nats_stream_source.options import (
    DeliverPolicy,
    KvOptions,
    Mode,
    StreamOptions,
    kv_options,
    stream_options,
)
from nats_stream_source.source.pushdown import MARGIN, MOST_NAMES, Narrowed, narrowed
from nats_stream_source.source.query import Content
from nats_stream_source.source.ranges import answered, first_after

SERVERS = {"servers": "nats://127.0.0.1:4222"}
KEY = ("key",)
REVISION = ("revision",)
CREATED = ("created",)
NOON = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)
NOON_NS = 1_795_262_400_000_000_000
MICRO = timedelta(microseconds=1)


def kv(**given: str) -> KvOptions:
    return kv_options({**SERVERS, "bucket": "b", **given}, Mode.BATCH)


def stream(**given: str) -> StreamOptions:
    return stream_options({**SERVERS, "stream": "S", **given}, Mode.BATCH)


# -- a table of cases -------------------------------------------------------------------------

MANY = [f"fleet.{n}" for n in range(MOST_NAMES + 1)]

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
    assert narrowed(kv(), filters) == Narrowed(names)


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
    found = narrowed(kv(includeHistory="true"), filters)
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
    found = narrowed(kv(includeHistory="true"), filters)
    assert found.since == (None if since is None else since - MARGIN)
    assert found.until == (None if until is None else until + MARGIN)


ALL: list[Filter] = [
    *(EqualTo((column,), "a.b") for column in ("key", "subject")),
    *(GreaterThan((column,), 5) for column in ("revision", "sequence")),
    *(GreaterThan((column,), NOON) for column in ("created", "timestamp")),
]
NAMED = Narrowed(("a.b",))
BOUNDED = Narrowed(("a.b",), first=6, since=NOON_NS + 1000 - MARGIN)

READS: dict[str, tuple[KvOptions | StreamOptions, Narrowed]] = {
    "a bucket as it is now": (kv(), NAMED),
    "as it was": (kv(asOfSequence="9"), NAMED),
    "as it was then": (kv(asOfTime="2026-11-21T12:00:00Z"), NAMED),
    "its history": (kv(includeHistory="true"), BOUNDED),
    "from a revision on": (kv(startSequence="3"), BOUNDED),
    "from a time on": (kv(startTime="2026-11-21T12:00:00Z"), BOUNDED),
    "a stream": (stream(), BOUNDED),
    "its part": (stream(startSequence="3", endTime="2026-11-21T12:00:00Z"), BOUNDED),
    "the last message of each subject": (stream(deliverPolicy="last_per_subject"), NAMED),
    "the last message": (stream(deliverPolicy="last"), Narrowed()),
}


@pytest.mark.parametrize(("options", "expected"), READS.values(), ids=READS)
def test_what_is_narrowed_in_which_read(
    options: KvOptions | StreamOptions, expected: Narrowed
) -> None:
    assert narrowed(options, ALL) == expected


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
    content = Content(filters=filters, everything="p.>", prefix="p.", whole=True)
    found = Narrowed(names).content(content)
    expected = None if left is None else replace(content, filters=left, whole=False)
    assert found == expected


def test_what_narrows_nothing_leaves_the_content_as_it_was() -> None:
    content = Content(filters=("p.a.>",), everything="p.>", prefix="p.", whole=True)
    assert Narrowed().content(content) is content
    assert Narrowed(("a.>",)).content(content) is content


@pytest.mark.parametrize(
    ("narrow", "left"),
    [
        (Narrowed(), (10, 20)),
        (Narrowed(first=5, last=30), (10, 20)),
        (Narrowed(first=15, last=17), (14, 17)),
        (Narrowed(first=21), (20, 20)),
        (Narrowed(first=99), (20, 20)),
        (Narrowed(last=10), (10, 10)),
        (Narrowed(last=-5), (10, 10)),
        (Narrowed(first=18, last=12), (17, 17)),
    ],
    ids=repr,
)
def test_a_range_is_cut(narrow: Narrowed, left: tuple[int, int]) -> None:
    assert narrow.sequences(10, 20) == left


def test_a_stream_has_no_filters_to_push() -> None:
    with pytest.raises(OptionError, match="filterPushdown"):
        kv_options({**SERVERS, "bucket": "b", "filterPushdown": "true"}, Mode.STREAMING)
    options = kv_options({**SERVERS, "bucket": "b", "filterPushdown": "false"}, Mode.STREAMING)
    assert not options.reading.filter_pushdown


# -- any filters on any stream ----------------------------------------------------------------


@dataclass(frozen=True)
class Message:
    name: str
    seq: int
    time: int

    def row(self) -> dict[str, object]:
        """With the columns of both formats that filters are pushed for."""
        created = datetime.fromtimestamp(0, timezone.utc) + self.time // 1000 * MICRO
        named = dict.fromkeys(("key", "subject"), self.name)
        numbered = dict.fromkeys(("revision", "sequence"), self.seq)
        return {**named, **numbered, **dict.fromkeys(("created", "timestamp"), created)}


def before(messages: Sequence[Message], moment: int) -> int:
    """The sequence before the first message of ``moment`` or later, by bisection as it is done."""

    async def later(seq: int) -> bool:
        return next((m.time >= moment for m in messages if m.seq >= seq), True)

    found = first_after(messages[0].seq, messages[-1].seq)
    return asyncio.run(answered(found, later)) - 1


def read(
    options: KvOptions | StreamOptions, messages: Sequence[Message], narrow: Narrowed
) -> list[Message]:
    """The rows of a batch read of a stream whose subjects are the names, with ``narrow``."""
    names = options.keys if isinstance(options, KvOptions) else options.filter_subjects
    content = narrow.content(Content(filters=names))
    if content is None or not messages:
        return []
    beginning = options.beginning
    start, end = 0, messages[-1].seq
    point = options.as_of_sequence if isinstance(options, KvOptions) else None
    if beginning.sequence is not None:
        start = beginning.sequence - 1
    if point is not None:
        end = min(end, point)
    start, end = narrow.sequences(start, end)
    if narrow.since is not None:
        start = max(start, before(messages, narrow.since))
    if narrow.until is not None:
        end = min(end, before(messages, narrow.until))
    filters = content.filters or (">",)
    found = [
        m for m in messages if start < m.seq <= end and any(covers(one, m.name) for one in filters)
    ]
    if beginning.policy is DeliverPolicy.LAST:
        return found[-1:]
    if beginning.policy is DeliverPolicy.LAST_PER_SUBJECT:
        return sorted({m.name: m for m in found}.values(), key=lambda m: m.seq)
    return found


_NAME = st.sampled_from(["a", "b", "ab", "a.a", "a.b", "b.b.a", "a.ä", "a*b", "a.a*b"])
_MINUTE = 60 * 10**9


@st.composite
def _messages(draw: st.DrawFn) -> list[Message]:
    """A stream with holes, whose times grow but for less than the margin."""
    seq, clock, found = draw(st.integers(0, 5)), NOON_NS, []
    for name in draw(st.lists(_NAME, min_size=2, max_size=12)):
        seq += draw(st.integers(1, 3))
        clock += draw(st.sampled_from([0, 1, 999, 1000, _MINUTE, 5 * _MINUTE]))
        found.append(Message(name, seq, clock - draw(st.sampled_from([0, 1, _MINUTE - 1]))))
    return found


_TIME = st.one_of(
    st.sampled_from([-1, 0, 1, 60_000_000, 300_000_000]),
    st.integers(-(10**9), 4 * 10**9),
).map(lambda micros: NOON + micros * MICRO)
_FILTERS = any_filters("key", "revision", "created", names=_NAME, times=_TIME)
_OF_STREAMS = any_filters("subject", "sequence", "timestamp", names=_NAME, times=_TIME)

_KV = st.sampled_from(
    [
        {},
        {"asOfSequence": "12"},
        {"includeHistory": "true"},
        {"startSequence": "5"},
        {"keys": "a.>,b"},
        {"keys": "*.a,a,b.b.>", "includeHistory": "true"},
    ]
)
_STREAM = st.sampled_from(
    [
        {},
        {"startSequence": "5"},
        {"filterSubjects": "a.*,b.>"},
        {"deliverPolicy": "last"},
        {"deliverPolicy": "last", "filterSubjects": "a,b"},
        {"deliverPolicy": "last_per_subject"},
    ]
)


@settings(max_examples=500, deadline=None)
@given(_messages(), _KV, _FILTERS)
def test_a_pushed_filter_never_changes_a_bucket(
    messages: list[Message], given: dict[str, str], filters: list[Filter]
) -> None:
    _same(kv(**given), messages, filters)


@settings(max_examples=500, deadline=None)
@given(_messages(), _STREAM, _OF_STREAMS)
def test_a_pushed_filter_never_changes_a_stream(
    messages: list[Message], given: dict[str, str], filters: list[Filter]
) -> None:
    _same(stream(**given), messages, filters)


def _same(
    options: KvOptions | StreamOptions, messages: list[Message], filters: list[Filter]
) -> None:
    def rows(narrow: Narrowed) -> list[Message]:
        return [
            message
            for message in read(options, messages, narrow)
            if matches(message.row(), filters)
        ]

    assert rows(narrowed(options, filters)) == rows(Narrowed())


@given(st.lists(_NAME, min_size=1, max_size=4, unique=True), _FILTERS)
def test_names_do_not_overlap_so_that_one_consumer_takes_them(
    keys: list[str], filters: list[Filter]
) -> None:
    content = narrowed(kv(), filters).content(Content(filters=tuple(keys)))
    found = content.filters if content else ()
    assert not any(overlap(a, b) for a in found for b in found if a != b)


def test_every_kind_of_filter_that_is_not_known_is_left_alone() -> None:
    assert narrowed(kv(includeHistory="true"), [IsNull(KEY), IsNotNull(CREATED)]) == Narrowed()
