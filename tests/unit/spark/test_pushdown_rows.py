"""Pushed filters do not change the rows of a batch read: any filters on any stream.

The model reads a stream's messages as the options specify and applies every filter to every row.
Reading the narrowed stream must return the same rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    Filter,
)

from nats_stream_source.jetstream.subjects import covers, overlap
from nats_stream_source.options import (
    DeliverPolicy,
    KvOptions,
    StreamOptions,
)
from nats_stream_source.spark.formats.base import ReadScope
from nats_stream_source.spark.planning.range_math import first_after, run_search
from nats_stream_source.spark.pushdown import PushedFilters, pushed_filters
from tests.support.oracle.filter_model import any_filters, matches
from tests.unit.spark.batch_options import MICRO, NOON, NOON_NS, kv, stream


@dataclass(frozen=True)
class Message:
    name: str
    seq: int
    time: int

    def row(self) -> dict[str, object]:
        """Return the columns of both formats for which filters are pushed."""
        created = datetime.fromtimestamp(0, timezone.utc) + self.time // 1000 * MICRO
        named = dict.fromkeys(("key", "subject"), self.name)
        numbered = dict.fromkeys(("revision", "sequence"), self.seq)
        return {**named, **numbered, **dict.fromkeys(("created", "timestamp"), created)}


def before(messages: Sequence[Message], time: int) -> int:
    """Bisect to the sequence before the first message at ``time`` or later, as the planner does."""

    async def later(seq: int) -> bool:
        return next((m.time >= time for m in messages if m.seq >= seq), True)

    found = first_after(messages[0].seq, messages[-1].seq)
    return asyncio.run(run_search(found, later)) - 1


def read(
    options: KvOptions | StreamOptions, messages: Sequence[Message], narrow: PushedFilters
) -> list[Message]:
    """Return the rows of a batch read with ``narrow``; the subjects of the stream are the names."""
    names = options.keys if isinstance(options, KvOptions) else options.filter_subjects
    content = narrow.narrow(ReadScope(filters=names))
    if content is None or not messages:
        return []
    beginning = options.start_position
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
    """Draw a stream with deleted messages, whose times decrease by less than the margin only."""
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
    def rows(narrow: PushedFilters) -> list[Message]:
        return [
            message
            for message in read(options, messages, narrow)
            if matches(message.row(), filters)
        ]

    assert rows(pushed_filters(options, filters)) == rows(PushedFilters())


@given(st.lists(_NAME, min_size=1, max_size=4, unique=True), _FILTERS)
def test_names_do_not_overlap_so_that_one_consumer_takes_them(
    keys: list[str], filters: list[Filter]
) -> None:
    content = pushed_filters(kv(), filters).narrow(ReadScope(filters=tuple(keys)))
    found = content.filters if content else ()
    assert not any(overlap(a, b) for a in found for b in found if a != b)
