"""How many rows a range has: what the planner may believe, and what it may ask.

A limit needs an upper bound of the rows between two sequences, and split borders a fair guess. A
rank (``jetstream.rank``) counts the messages from a sequence on. Two ranks are of two moments, and
in between others write and the bucket compacts; so with ``L`` the leader's last sequence before the
first one, and of messages up to ``L`` only:

- a count stays an upper bound for ever, since messages before ``L`` only go away;
- a later count, less all that was written since, is a lower bound.

The difference errs towards more rows, and no batch exceeds its limit. A follower that lags counts
too few; what the leader knows of its lag is added to the upper bound.

Ranks cost from half a millisecond to a tenth of a second (DESIGN 3.5: many keys, a filter that
covers them all). So each planning has a time, and a question that is expected to exceed it is not
asked. What was answered is kept: the next micro-batch begins where this one ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from nats_stream_source.jetstream.api import JetStream, StreamInfo
from nats_stream_source.jetstream.rank import count_from
from nats_stream_source.source.ranges import Shape

_REMEMBERED = 64
_A_RANK = 0.0005  # seconds; without a filter 50 ns more for each key, with some 2 ms for each
_MOST_FILTER_SECONDS = 0.008


class Counts:
    """Counts rows for one query, one planning after the other."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._cost: float | None = None
        self._known: dict[int, tuple[int, int]] = {}  # seq: rows after it, last_seq at that time

    def begin(self, jetstream: JetStream, info: StreamInfo, filters: Sequence[str]) -> None:
        """A new planning, which begins with ``info``."""
        self._jetstream = jetstream
        self._info = info
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
        rows, last_seq = self._known[before]
        written = info.last_seq - last_seq
        return rows + written if 0 <= written <= tolerance else None

    async def total(self, start: int) -> int | None:
        """The rows after ``start``, or more, at the leader; None when there is no time to ask."""
        if not self._may_ask(1):
            return None
        await self._count(start)
        return self._known[start][0]

    async def after(self, seq: int) -> int | None:
        """The rows after ``seq`` of those that a total counted, or fewer; None as in ``total``."""
        return (await self.each_after((seq,)))[0]

    async def each_after(self, sequences: Sequence[int]) -> list[int | None]:
        """:meth:`after` for each sequence, asked in parallel."""
        if not self._may_ask(len(sequences)):
            return [None] * len(sequences)
        return list(await asyncio.gather(*map(self._count, sequences)))

    def _may_ask(self, questions: int) -> bool:
        if questions <= self._granted:
            self._granted -= questions
            return True
        assert self._cost is not None
        # The server works at about two in parallel.
        return self._clock() + self._cost * (1 + questions // 2) <= self._deadline

    async def _count(self, seq: int) -> int:
        last_seq, began = self._last_seq, self._clock()
        rows = await count_from(self._jetstream, self._info.name, seq + 1, self._filters)
        now = await self._jetstream.stream_info(self._info.name)
        assert self._cost is not None
        self._cost = max(self._clock() - began, self._cost / 2)
        while len(self._known) >= _REMEMBERED:
            del self._known[next(iter(self._known))]
        self._known[seq] = rows + now.lag, last_seq
        self._last_seq = max(self._last_seq, now.last_seq)
        return max(0, rows - (now.last_seq - self._info.last_seq))
