"""Filter pushdown: which filters of a query reduce what a batch reads.

Spark passes a batch reader the filters of its query, which are combined with AND. Two kinds exclude
messages whose rows cannot match:

- *names*: a key or subject that is equal to a string, ``IN`` a list, or ``LIKE 'prefix%'`` becomes
  filter subjects, within those of the options. A filter subject consists of whole tokens, so
  ``fleet.truck%`` becomes ``fleet.>``. More names than one consumer should have become a filter
  for their common prefix.
- *bounds*: bounds of revisions, sequences and times become bounds of the range.

Spark also applies every filter to each row. So a narrowed read may return more than the matching
rows, and only returning fewer would be wrong. Therefore these are *not* narrowed:

- by bounds, a bucket's state, present or past: without a key's last entry, an earlier one would
  take its place. The same holds for any read of last messages.
- by names, ``deliverPolicy=last``: the last message of all, if it matches, is not the last message
  that matches.
- by a name that a stream can have but a filter cannot express, such as ``a*b``. A message cannot
  have a name with an empty token or a space.

Timestamps are those of the servers that stored the messages. Where they do not grow with sequences,
since the clocks of two leaders differ, a bound is wrong by that difference: time bounds have a
margin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from nats_stream_source.errors import InvalidNameError
from nats_stream_source.jetstream.subjects import (
    check_subject_filter,
    intersection,
    is_literal,
)
from nats_stream_source.options import DeliverPolicy, KvOptions, StreamOptions
from nats_stream_source.spark.formats.base import ReadScope

MAX_NAMES = 512
"""The maximum number of names that become filters of a consumer.

The server compares each filter of a new consumer with every other (2.15.1: 256 take 15 ms, 1,000
take 70 ms, 4,000 take 760 ms), and each split has a consumer, as has each rank of more than a few.
"""

_MAX_BYTES = 64 << 10  # of all names, well below a server's max_payload
_MAX_SUBJECT = 4096  # bytes, the server's max_control_line

MARGIN = 60 * 1_000_000_000
"""Nanoseconds by which the order of timestamps may differ from that of sequences."""

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_RANGES = (DeliverPolicy.ALL, DeliverPolicy.BY_START_SEQUENCE, DeliverPolicy.BY_START_TIME)


@dataclass(frozen=True, slots=True)
class PushedFilters:
    """The part of a stream that has all rows that match a query's filters.

    Attributes:
        names: keys or subjects, or one filter for them, sorted; None for all, empty if no row can
            match.
        first, last: stream sequences, both included; None for no bound.
        since, until: nanoseconds since 1970, ``until`` not included; None for no bound.
    """

    names: tuple[str, ...] | None = None
    first: int | None = None
    last: int | None = None
    since: int | None = None
    until: int | None = None

    def narrow(self, scope: ReadScope) -> ReadScope | None:
        """``scope`` reduced to the names; None if no message of it can match."""
        if self.names is None:
            return scope
        names = [scope.prefix + name for name in self.names]
        filters = scope.filters or (scope.match_all,)
        narrowed = {
            common
            for subject_filter in filters
            for name in names
            if (common := intersection(subject_filter, name)) is not None
        }
        if narrowed == set(filters):
            return scope
        if not narrowed:
            return None
        return replace(scope, filters=tuple(sorted(narrowed)), covers_stream=False)

    def sequences(self, start: int, end: int) -> tuple[int, int]:
        """The range ``(start, end]`` reduced to the sequence bounds; it may be empty."""
        first = start if self.first is None else max(start, self.first - 1)
        last = end if self.last is None else min(end, self.last)
        return min(first, end), max(min(first, end), last)


def pushed_filters(options: KvOptions | StreamOptions, filters: Sequence[Filter]) -> PushedFilters:
    """The part of the stream to read for the rows that match all of ``filters``.

    Filters of other columns and of other kinds are ignored.

    Args:
        filters: as Spark passes them to ``DataSourceReader.pushFilters``: times are aware
            ``datetime`` objects, integers ``int``.
    """
    kv = isinstance(options, KvOptions)
    name, sequence, time = (
        ("key", "revision", "created") if kv else ("subject", "sequence", "timestamp")
    )
    policy = options.start_position.policy
    names = None if policy is DeliverPolicy.LAST else _names(_of(filters, name))
    if policy not in _RANGES:
        return PushedFilters(names)
    first, last = _bounds(_of(filters, sequence), _integer)
    earliest, latest = _bounds(_of(filters, time), _microseconds)
    return PushedFilters(
        names,
        first,
        last,
        None if earliest is None else earliest * 1000 - MARGIN,
        # The column is floored to microseconds; the timestamp is up to one microsecond later.
        None if latest is None else (latest + 1) * 1000 + MARGIN,
    )


def _of(filters: Sequence[Filter], column: str) -> list[Filter]:
    return [f for f in filters if getattr(f, "attribute", None) == (column,)]


def _values(column_filter: Filter) -> set[object] | None:
    """The values that a filter for equality allows; None for any other filter."""
    if isinstance(column_filter, In):
        return set(column_filter.value)
    if isinstance(column_filter, (EqualTo, EqualNullSafe)):
        return {column_filter.value}
    return None


def _names(filters: Sequence[Filter]) -> tuple[str, ...] | None:
    names: set[str] | None = None
    prefix = ""
    for column_filter in filters:
        if isinstance(column_filter, StringStartsWith):
            shorter, longer = sorted((prefix, column_filter.value), key=len)
            if not longer.startswith(shorter):
                return ()
            prefix = longer
        elif (values := _values(column_filter)) is not None:
            strings = {value for value in values if isinstance(value, str)}
            if strings != values - {None}:
                continue  # the user's own schema has another type for this column
            names = strings if names is None else names & strings
    if names is None:
        return _prefix_filter(prefix)
    names = {name for name in names if name.startswith(prefix) and _is_possible(name)}
    few = len(names) <= MAX_NAMES and sum(map(len, names)) <= _MAX_BYTES
    if few and all(map(_is_filter, names)):
        return tuple(sorted(names))
    # All names share the common prefix of the first and the last in order.
    return _prefix_filter(_common_prefix(min(names), max(names)))


def _common_prefix(first: str, second: str) -> str:
    pairs = enumerate(zip(first, second, strict=False))
    length = next((index for index, (a, b) in pairs if a != b), None)
    return min(first, second, key=len) if length is None else first[:length]


def _prefix_filter(prefix: str) -> tuple[str, ...] | None:
    """A filter for all names that start with the whole tokens of ``prefix``."""
    tokens, dot, rest = prefix.rpartition(".")
    if not dot:
        return None
    if not (_is_possible(tokens) and _is_possible(rest or "-")):
        return ()
    return (f"{tokens}.>",) if _is_filter(tokens) else None


def _is_possible(name: str) -> bool:
    """Whether a message can have this name: subjects have no empty tokens and no spaces."""
    return all(name.split(".")) and not set(name) & set(" \t\r\n")


def _is_filter(name: str) -> bool:
    """Whether a filter can match this name and no other."""
    try:
        check_subject_filter(name)
    except InvalidNameError:
        return False
    return is_literal(name) and len(name.encode()) <= _MAX_SUBJECT


def _bounds(
    filters: Sequence[Filter], to_number: Callable[[object], int | None]
) -> tuple[int | None, int | None]:
    """The lowest and the highest number that ``filters`` allow; None for no bound.

    Args:
        to_number: converts a filter's value; None for a value of another type, which is ignored.
    """
    lower: list[int] = []
    upper: list[int] = []
    for column_filter in filters:
        if (values := _values(column_filter)) is not None:
            converted = [to_number(value) for value in values if value is not None]
            numbers = [number for number in converted if number is not None]
            if numbers and len(numbers) == len(converted):
                lower.append(min(numbers))
                upper.append(max(numbers))
        elif isinstance(
            column_filter, (GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual)
        ):
            if (number := to_number(column_filter.value)) is None:
                continue
            if isinstance(column_filter, (GreaterThan, GreaterThanOrEqual)):
                lower.append(number + isinstance(column_filter, GreaterThan))
            else:
                upper.append(number - isinstance(column_filter, LessThan))
    return max(lower, default=None), min(upper, default=None)


def _integer(value: object) -> int | None:
    return value if type(value) is int else None


def _microseconds(value: object) -> int | None:
    if not isinstance(value, datetime) or value.tzinfo is None:
        return None
    return (value - _EPOCH) // timedelta(microseconds=1)
