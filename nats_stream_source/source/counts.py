"""How many rows a range has: what the planner may believe, and what it may ask.

A limit needs an upper bound of the rows between two sequences, and split borders a fair guess. A
rank (``jetstream.rank``) counts the messages from a sequence on. Two ranks are of two moments, and
in between others write and the bucket compacts; so with ``L`` the leader's last sequence before the
first one, and of messages up to ``L`` only:

- a count stays an upper bound for ever, since messages before ``L`` only go away;
- a later count, less all that was written since, is a lower bound.

The difference errs towards more rows, and no batch exceeds its limit. A follower that lags counts
too few, and nobody says by how many: the leader tells its lag in operations, each of which may
store thousands of messages. So while any replica lags, a count is no upper bound, and is not kept;
one that the leader has not heard of for half a minute is down and answers nobody. (What a replica
has logged and not applied yet is no lag: the newest few messages may be missing in a count.)

Ranks cost from half a millisecond to a tenth of a second (DESIGN 3.5: many keys, a filter that
covers them all). So each planning has a time, and a question that is expected to exceed it is not
asked. What was answered is kept: the next micro-batch begins where this one ended. It also tells
how many sequences are without a row; there are no more of them later than messages went away, and
where they are few, no rank is needed at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nats_stream_source.errors import ConsumerLimitError
from nats_stream_source.jetstream.api import JetStream, StreamInfo
from nats_stream_source.jetstream.rank import count_from
from nats_stream_source.source.ranges import Shape

_REMEMBERED = 64
_A_RANK = 0.0005  # seconds; without a filter 50 ns more for each key, with some 2 ms for each
_MOST_FILTER_SECONDS = 0.008
_DOWN = 30.0  # seconds of silence after which a replica is down


@dataclass(frozen=True, slots=True)
class _Rank:
    """An answer: rows after a sequence, and what the stream was like then."""

    rows: int
    last_seq: int
    gone: int


class Counts:
    """Counts rows for one query, one planning after the other."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._cost: float | None = None
        self._known: dict[int, _Rank] = {}  # by the sequence after which the rows are
        self._created: str | None = None
        self._silent: dict[str, float] = {}  # replicas: since when

    def begin(self, jetstream: JetStream, info: StreamInfo, filters: Sequence[str]) -> None:
        """A new planning, which begins with ``info``."""
        self._jetstream = jetstream
        self._info = info
        if info.created != self._created:
            self._known.clear()
        self._created = info.created
        # A stream that was set back counts from there; what it had says nothing any more.
        for seq in [seq for seq, rank in self._known.items() if rank.last_seq > info.last_seq]:
            del self._known[seq]
        self._lags(info)
        self._last_seq = info.last_seq  # never later than the next question
        self._filters = tuple(filters)
        if self._cost is None:
            each = 0.002 * len(filters) if filters else 50e-9 * info.subjects
            self._cost = _A_RANK + (min(each, _MOST_FILTER_SECONDS) if filters else each)
        else:
            self._cost *= 0.95  # or one slow answer would rule out all later questions
        self.allow(0.0)

    def allow(self, seconds: float, questions: int = 0) -> None:
        """From now on, ask for ``seconds``; ``questions`` may be asked however long they take."""
        self._deadline = self._clock() + seconds
        self._granted = questions

    @property
    def shape(self) -> Shape:
        """A guess at how the stream's messages lie."""
        info = self._info
        return Shape.of(info.last_seq - info.first_seq + 1, info.messages)

    def known(self, start: int, tolerance: int) -> int | None:
        """The rows after ``start``, or up to twice ``tolerance`` more; None if it must be asked."""
        info = self._info
        if not self._filters and start < info.first_seq:
            return info.messages
        before = max((seq for seq in self._known if seq <= start), default=None)
        if before is None or start - before > tolerance:
            return None
        rank = self._known[before]
        written = info.last_seq - rank.last_seq
        return rank.rows + written if 0 <= written <= tolerance else None

    def gaps(self, start: int) -> int | None:
        """About how many sequences after ``start`` have no row, or fewer; None if unknown.

        A guess in so far as the answers it comes from are of more than one moment: it decides how
        full a range is, never how many rows it may hold.
        """
        info = self._info
        gone = _gone(info)
        found = [
            max(0, rank.last_seq - seq - rank.rows)
            + max(0, gone - rank.gone)
            # What was written since need not match.
            + (info.last_seq - rank.last_seq if self._filters else 0)
            for seq, rank in self._known.items()
            if seq <= start and rank.last_seq <= info.last_seq
        ]
        if not self._filters:
            found.append(max(0, gone - max(0, info.first_seq - 1)))
        return min(found, default=None)

    async def total(self, start: int) -> int | None:
        """The rows after ``start``, or more, at the leader; None when nobody can say it in time."""
        if not self._may_ask(1):
            return None
        await self._count(start)
        return self._known[start].rows if start in self._known else None

    async def about(self, start: int) -> int | None:
        """The rows after ``start``, or some more or fewer; None as in ``total``."""
        if not self._may_ask(1) or (counted := await self._count(start)) is None:
            return None
        return counted[0]

    async def after(self, seq: int) -> int | None:
        """The rows after ``seq`` of those that a total counted, or fewer; None as in ``total``."""
        return (await self.each_after((seq,)))[0]

    async def each_after(self, sequences: Sequence[int]) -> list[int | None]:
        """:meth:`after` for each sequence, asked in parallel."""
        if not self._may_ask(len(sequences)):
            return [None] * len(sequences)
        counted = await asyncio.gather(*map(self._count, sequences))
        return [None if one is None else max(0, one[0] - one[1]) for one in counted]

    def _may_ask(self, questions: int) -> bool:
        if questions <= self._granted:
            self._granted -= questions
            return True
        assert self._cost is not None
        # The server works at about two in parallel.
        return self._clock() + self._cost * (1 + questions // 2) <= self._deadline

    async def _count(self, seq: int) -> tuple[int, int] | None:
        """The rows after ``seq``, and how much was written since the planning began.

        None where it takes a consumer and there may be no more: the readers need them more.
        """
        last_seq, began = self._last_seq, self._clock()
        try:
            rows = await count_from(self._jetstream, self._info.name, seq + 1, self._filters)
        except ConsumerLimitError:
            # What was answered earlier lacks what was written since: it is no total of now.
            self._known.pop(seq, None)
            return None
        now = await self._jetstream.stream_info(self._info.name)
        assert self._cost is not None
        self._cost = max(self._clock() - began, self._cost / 2)
        self._known.pop(seq, None)
        if not self._lags(now):
            while len(self._known) >= _REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[seq] = _Rank(rows, last_seq, _gone(now))
        self._last_seq = max(self._last_seq, now.last_seq)
        return rows, now.last_seq - self._info.last_seq

    def _lags(self, info: StreamInfo) -> bool:
        """Whether a replica that can answer is behind."""
        now = self._clock()
        for one in info.replicas:
            if one.heard:
                self._silent.pop(one.name, None)
            else:
                self._silent.setdefault(one.name, now)
        return any(
            one.lag and now - self._silent.get(one.name, now) < _DOWN for one in info.replicas
        )


def _gone(info: StreamInfo) -> int:
    """How many messages the stream had once and has no more."""
    return info.last_seq - info.messages
