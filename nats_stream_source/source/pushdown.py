"""Which of a query's filters make a batch read smaller.

Spark hands a batch reader the filters of its query, which hold all together. Two kinds leave
messages out whose rows cannot match:

- *names*: a key or subject that is equal to a text, ``IN`` some, or ``LIKE 'prefix%'`` becomes
  filter subjects, within those of the options. A filter subject is made of whole tokens, so
  ``fleet.truck%`` becomes ``fleet.>``. More names than one consumer should have become what they
  all begin with.
- *bounds*: of revisions and sequences, and of times, they become bounds of the range.

Every filter also stays with Spark, which looks at each row again. So a narrowed read may bring more
than matches, and only bringing less would be wrong. Hence what is *not* narrowed:

- to bounds, a bucket's state, now or at a point: without a key's last entry, an earlier one would
  be found in its place. The same goes for any read of last messages.
- to names, ``deliverPolicy=last``: the last message of all, if it matches, is not the last one that
  matches.
- a name that a stream can have and a filter cannot say, as ``a*b``; one with an empty token or a
  space, no message has.

Times are those of the servers that stored the messages. Where they do not grow with sequences,
since two leaders' clocks differ, a bound lies in the wrong place by as much: it is pushed with a
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
from nats_stream_source.source.query import Content

MOST_NAMES = 512
"""Names of one consumer.

The server compares each filter of a new consumer with every other (2.15.1: 256 take 15 ms, 1,000
take 70, 4,000 take 760), and every split has a consumer, as has every rank of more than a few.
"""

_MOST_BYTES = 64 << 10  # of all names, well below a server's max_payload
_LONGEST = 4096  # bytes of a subject, the server's max_control_line

MARGIN = 60 * 1_000_000_000
"""Nanoseconds by which messages may be stored in another order than that of their times."""

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_RANGES = (DeliverPolicy.ALL, DeliverPolicy.BY_START_SEQUENCE, DeliverPolicy.BY_START_TIME)


@dataclass(frozen=True, slots=True)
class Narrowed:
    """What of a stream has to be read for the rows that a query's filters let through.

    Attributes:
        names: keys or subjects, or one filter for them, sorted; None for all, empty when no row can
            match.
        first, last: stream sequences, both included; None for no bound.
        since, until: nanoseconds since 1970, the latter not included.
    """

    names: tuple[str, ...] | None = None
    first: int | None = None
    last: int | None = None
    since: int | None = None
    until: int | None = None

    def content(self, content: Content) -> Content | None:
        """What is left of ``content``; None when nothing of it can match."""
        if self.names is None:
            return content
        names = [content.prefix + name for name in self.names]
        within = content.filters or (content.everything,)
        both = {
            common
            for one in within
            for name in names
            if (common := intersection(one, name)) is not None
        }
        if both == set(within):
            return content
        return replace(content, filters=tuple(sorted(both)), whole=False) if both else None

    def sequences(self, start: int, end: int) -> tuple[int, int]:
        """What is left of the range ``(start, end]``, by its sequences; perhaps an empty one."""
        first = start if self.first is None else max(start, self.first - 1)
        last = end if self.last is None else min(end, self.last)
        return min(first, end), max(min(first, end), last)


def narrowed(options: KvOptions | StreamOptions, filters: Sequence[Filter]) -> Narrowed:
    """What has to be read for the rows that match all of ``filters``.

    Filters of other columns and of other kinds change nothing.

    Args:
        filters: as Spark hands them to ``DataSourceReader.pushFilters``: times are aware
            ``datetime`` objects, whole numbers ``int``.
    """
    kv = isinstance(options, KvOptions)
    name, sequence, time = (
        ("key", "revision", "created") if kv else ("subject", "sequence", "timestamp")
    )
    policy = options.beginning.policy
    names = None if policy is DeliverPolicy.LAST else _names(_of(filters, name))
    if policy not in _RANGES:
        return Narrowed(names)
    first, last = _bounds(_of(filters, sequence), _integer)
    earliest, latest = _bounds(_of(filters, time), _microseconds)
    return Narrowed(
        names,
        first,
        last,
        None if earliest is None else earliest * 1000 - MARGIN,
        # The column has microseconds, what it was floored from is up to one later.
        None if latest is None else (latest + 1) * 1000 + MARGIN,
    )


def _of(filters: Sequence[Filter], column: str) -> list[Filter]:
    return [one for one in filters if getattr(one, "attribute", None) == (column,)]


def _values(one: Filter) -> set[object] | None:
    """The values of which a column must have one; None for any other filter."""
    if isinstance(one, In):
        return set(one.value)
    return {one.value} if isinstance(one, (EqualTo, EqualNullSafe)) else None


def _names(filters: Sequence[Filter]) -> tuple[str, ...] | None:
    wanted: set[str] | None = None
    prefix = ""
    for one in filters:
        if isinstance(one, StringStartsWith):
            short, long = sorted((prefix, one.value), key=len)
            if not long.startswith(short):
                return ()
            prefix = long
        elif (values := _values(one)) is not None:
            some = {value for value in values if isinstance(value, str)}
            if some != values - {None}:
                continue  # not a column of texts, as the user's own schema has it
            wanted = some if wanted is None else wanted & some
    if wanted is None:
        return _beginning_with(prefix)
    wanted = {one for one in wanted if one.startswith(prefix) and _possible(one)}
    few = len(wanted) <= MOST_NAMES and sum(map(len, wanted)) <= _MOST_BYTES
    if few and all(map(_sayable, wanted)):
        return tuple(sorted(wanted))
    # What the first and the last in order begin with, all between them do.
    return _beginning_with(_shared(min(wanted), max(wanted)))


def _shared(one: str, other: str) -> str:
    """What both begin with."""
    length = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return min(one, other, key=len) if length is None else one[:length]


def _beginning_with(prefix: str) -> tuple[str, ...] | None:
    """A filter for all names that begin with ``prefix``: the tokens that it has in whole."""
    tokens, dot, rest = prefix.rpartition(".")
    if not dot:
        return None
    if not (_possible(tokens) and _possible(rest or "-")):
        return ()
    return (f"{tokens}.>",) if _sayable(tokens) else None


def _possible(name: str) -> bool:
    """Whether a message can have this name: the protocol knows no empty tokens and no spaces."""
    return all(name.split(".")) and not set(name) & set(" \t\r\n")


def _sayable(name: str) -> bool:
    """Whether a filter can name it, and it alone."""
    try:
        check_subject_filter(name)
    except InvalidNameError:
        return False
    return is_literal(name) and len(name.encode()) <= _LONGEST


def _bounds(
    filters: Sequence[Filter], whole: Callable[[object], int | None]
) -> tuple[int | None, int | None]:
    """The lowest and the highest number that ``filters`` let through; None for no bound.

    Args:
        whole: a filter's value as a number; None if it is none, and bounds nothing.
    """
    low: list[int] = []
    high: list[int] = []
    for one in filters:
        if (values := _values(one)) is not None:
            numbers = [whole(value) for value in values if value is not None]
            known = [number for number in numbers if number is not None]
            if known and len(known) == len(numbers):
                low.append(min(known))
                high.append(max(known))
        elif isinstance(one, (GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual)):
            if (number := whole(one.value)) is None:
                continue
            if isinstance(one, (GreaterThan, GreaterThanOrEqual)):
                low.append(number + isinstance(one, GreaterThan))
            else:
                high.append(number - isinstance(one, LessThan))
    return max(low, default=None), min(high, default=None)


def _integer(value: object) -> int | None:
    return value if type(value) is int else None


def _microseconds(value: object) -> int | None:
    if not isinstance(value, datetime) or value.tzinfo is None:
        return None
    return (value - _EPOCH) // timedelta(microseconds=1)
