"""Counts the rows of a range: which counts are valid bounds, and which requests are affordable.

A limit needs an upper bound of the rows between two sequences, and the ends of splits need an
estimate. A rank (``jetstream.direct_get.count``) counts the messages from a sequence on. Two ranks
are taken at two points in time, between which others write and the bucket is compacted. With ``L``
the leader's last sequence before the first rank, and counting messages up to ``L`` only:

- a count remains an upper bound, since messages before ``L`` can only be removed;
- a later count, minus all that was written since, is a lower bound.

The difference errs towards more rows, so a batch does not exceed its limit. A lagging follower
counts too few, by an unknown number: the leader reports its lag in operations, each of which may
store thousands of messages. So while any replica lags, a count is not an upper bound and is not
cached; a replica without contact to the leader for half a minute is down and does not respond. (The
operations that a replica has logged but not applied are not reported as lag: a count may lack the
newest few messages.)

Ranks take from half a millisecond to a tenth of a second (docs/internals/measurements.md,
"Servers": many keys, a filter that covers them all). So each planning has a time budget, and a
request that is expected to exceed it is not sent. Counts are cached: the next micro-batch starts
where this one ended. They also give the number of sequences without a row, which later grows at
most by the number of removed messages; where it is small, no rank is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nats_stream_source.errors import ConsumerLimitError
from nats_stream_source.jetstream.api import JetStream, StreamInfo
from nats_stream_source.jetstream.direct_get.count import count_messages
from nats_stream_source.spark.planning.range_math import Shape

_MAX_CACHED = 64
_RANK_SECONDS = 0.0005  # plus 50 ns per key without a filter, 2 ms per filter with some
_MAX_FILTER_SECONDS = 0.008
_REPLICA_DOWN = 30.0  # seconds without contact after which a replica is down


@dataclass(frozen=True, slots=True)
class _Rank:
    """A response: the rows after a sequence, and the stream's state at that time."""

    rows: int
    last_seq: int
    removed: int


class RowCounter:
    """Counts rows for one query, one planning after the other."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._cost: float | None = None  # expected seconds of a rank
        self._ranks: dict[int, _Rank] = {}  # by the sequence after which the rows are
        self._created: str | None = None
        self._silent_since: dict[str, float] = {}  # by replica

    def start_planning(
        self, jetstream: JetStream, info: StreamInfo, filters: Sequence[str]
    ) -> None:
        """Start a new planning with the stream as ``info`` describes it."""
        self._jetstream = jetstream
        self._info = info
        if info.created != self._created:
            self._ranks.clear()
        self._created = info.created
        # A stream that was rolled back assigns sequences again; ranks beyond it are invalid.
        for seq in [seq for seq, rank in self._ranks.items() if rank.last_seq > info.last_seq]:
            del self._ranks[seq]
        self._is_lagging(info)
        self._last_seq = info.last_seq  # never later than the next request
        self._filters = tuple(filters)
        if self._cost is None:
            each = 0.002 * len(filters) if filters else 50e-9 * info.subjects
            self._cost = _RANK_SECONDS + (min(each, _MAX_FILTER_SECONDS) if filters else each)
        else:
            self._cost *= 0.95  # so that one slow response does not rule out all later requests
        self.set_budget(0.0)

    def set_budget(self, seconds: float, requests: int = 0) -> None:
        """Allow requests for ``seconds`` from now, and ``requests`` of them regardless of time."""
        self._deadline = self._clock() + seconds
        self._granted = requests

    @property
    def shape(self) -> Shape:
        """An estimate of how the stream's messages are distributed."""
        info = self._info
        return Shape.of(info.last_seq - info.first_seq + 1, info.messages)

    def known_rows(self, start: int, tolerance: int) -> int | None:
        """The rows after ``start``, or up to twice ``tolerance`` more; None if not cached."""
        info = self._info
        if not self._filters and start < info.first_seq:
            return info.messages
        before = max((seq for seq in self._ranks if seq <= start), default=None)
        if before is None or start - before > tolerance:
            return None
        rank = self._ranks[before]
        written = info.last_seq - rank.last_seq
        return rank.rows + written if 0 <= written <= tolerance else None

    def missing_sequences(self, start: int) -> int | None:
        """About how many sequences after ``start`` have no row, or fewer; None if unknown.

        An estimate where the ranks are of several points in time: it decides how full a range is,
        never how many rows it may have.
        """
        info = self._info
        removed = _removed(info)
        estimates = [
            max(0, rank.last_seq - seq - rank.rows)
            + max(0, removed - rank.removed)
            # Messages written since need not match.
            + (info.last_seq - rank.last_seq if self._filters else 0)
            for seq, rank in self._ranks.items()
            if seq <= start and rank.last_seq <= info.last_seq
        ]
        if not self._filters:
            estimates.append(max(0, removed - max(0, info.first_seq - 1)))
        return min(estimates, default=None)

    async def upper_bound(self, start: int) -> int | None:
        """The rows after ``start``, or more, at the leader; None without budget or valid count."""
        if not self._has_budget(1):
            return None
        await self._count(start)
        return self._ranks[start].rows if start in self._ranks else None

    async def estimate(self, start: int) -> int | None:
        """The rows after ``start``, or some more or fewer; None as in :meth:`upper_bound`."""
        if not self._has_budget(1) or (counted := await self._count(start)) is None:
            return None
        return counted[0]

    async def lower_bound(self, seq: int) -> int | None:
        """The rows after ``seq`` that an upper bound has counted, or fewer; None likewise."""
        return (await self.lower_bounds((seq,)))[0]

    async def lower_bounds(self, sequences: Sequence[int]) -> list[int | None]:
        """:meth:`lower_bound` for each sequence, requested in parallel."""
        if not self._has_budget(len(sequences)):
            return [None] * len(sequences)
        counts = await asyncio.gather(*map(self._count, sequences))
        return [None if count is None else max(0, count[0] - count[1]) for count in counts]

    def _has_budget(self, requests: int) -> bool:
        if requests <= self._granted:
            self._granted -= requests
            return True
        assert self._cost is not None
        # The server processes about two in parallel.
        return self._clock() + self._cost * (1 + requests // 2) <= self._deadline

    async def _count(self, seq: int) -> tuple[int, int] | None:
        """The rows after ``seq``, and the number of messages written since the planning started.

        None where the count needs a consumer and the consumer limit is reached: the readers need
        the remaining ones.
        """
        last_seq, started = self._last_seq, self._clock()
        try:
            rows = await count_messages(self._jetstream, self._info.name, seq + 1, self._filters)
        except ConsumerLimitError:
            # An earlier count lacks later messages: it is not an upper bound any more.
            self._ranks.pop(seq, None)
            return None
        now = await self._jetstream.stream_info(self._info.name)
        assert self._cost is not None
        self._cost = max(self._clock() - started, self._cost / 2)
        self._ranks.pop(seq, None)
        if not self._is_lagging(now):
            while len(self._ranks) >= _MAX_CACHED:
                del self._ranks[next(iter(self._ranks))]
            self._ranks[seq] = _Rank(rows, last_seq, _removed(now))
        self._last_seq = max(self._last_seq, now.last_seq)
        return rows, now.last_seq - self._info.last_seq

    def _is_lagging(self, info: StreamInfo) -> bool:
        """Whether a replica that can respond lags behind the leader."""
        now = self._clock()
        for replica in info.replicas:
            if replica.recently_active:
                self._silent_since.pop(replica.name, None)
            else:
                self._silent_since.setdefault(replica.name, now)
        return any(
            replica.lag and now - self._silent_since.get(replica.name, now) < _REPLICA_DOWN
            for replica in info.replicas
        )


def _removed(info: StreamInfo) -> int:
    """The number of messages that the stream has had and no longer has."""
    return info.last_seq - info.messages
