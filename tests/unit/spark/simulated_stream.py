"""A stream without a server: it responds to the planner's requests while others change it."""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast
from unittest import mock

from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.direct_get.request import MessageCount
from nats_stream_source.jetstream.stream_info import Replica, StreamInfo
from nats_stream_source.rows.base import ReadScope, StreamView
from nats_stream_source.spark.planning import limits
from nats_stream_source.spark.planning.limits import RangeLimit

FILTER = "wanted.>"


class SimulatedStream:
    """Messages by their sequences; those that a query reads are its rows.

    Args:
        stored: the sequences of its messages.
        last_seq: by default the last of ``stored``.
        matches: which messages a filtered query reads; None for a query without a filter.
        change: what others do before and after each request.
        names_first: whether a count has the first message, as with Direct Get.

    Attributes:
        counts: the sequences after which messages were counted.
        infos: the number of requests for the stream's state.
    """

    name = "S"

    def __init__(
        self,
        stored: Iterable[int],
        last_seq: int | None = None,
        *,
        matches: Callable[[int], bool] | None = None,
        change: Callable[[SimulatedStream], None] = lambda _: None,
        names_first: bool = True,
        max_consumers: int = -1,
        message_size: int = 100,
        cores: int = 2,
    ) -> None:
        self.stored = sorted(stored)
        self.last_seq = last_seq or max(self.stored, default=0)
        self.replicas: tuple[Replica, ...] = ()
        self.leader_since: str | None = None
        self.created = "2026-11-25T10:00:00Z"
        self.limits = limits.Limits(cores)
        self.counts: list[int] = []
        self.infos = 0
        self._matches = matches
        self._change = change
        self._names_first = names_first
        self._max_consumers = max_consumers
        self._message_size = message_size

    def rows(self, start: int, end: int) -> int:
        """The number of rows in ``(start, end]`` now."""
        return len(self._rows_between(start, end))

    def write(self, count: int) -> None:
        """Store messages at the end."""
        self.stored += range(self.last_seq + 1, self.last_seq + count + 1)
        self.last_seq += count

    def remove(self, indices: Iterable[int]) -> None:
        """Remove messages, by indices of those that are stored, modulo their number."""
        for index in indices:
            if self.stored:
                del self.stored[index % len(self.stored)]

    def view(self) -> StreamView:
        """The state as a poll reports it."""
        scope = ReadScope(filters=() if self._matches is None else (FILTER,))
        return StreamView(cast(JetStream, self), self._info(), scope)

    def limit(self, start: int, end: int, limit: RangeLimit | None) -> tuple[int, int, int]:
        """The result of ``Limits.limit``."""
        return self._run(self.limits.limit(self.view(), start, end, limit))

    def split_ends(self, start: int, end: int, min_splits: int) -> list[int]:
        """The result of ``Limits.split_ends``."""
        return self._run(self.limits.split_ends(self.view(), start, end, min_splits))

    async def stream_info(self, name: str) -> StreamInfo:
        """Stands for :meth:`JetStream.stream_info`."""
        self.infos += 1
        self._change(self)
        info = self._info()
        self._change(self)
        return info

    def _run(self, planning: Any) -> Any:
        with mock.patch.object(limits, "count_messages", self._count):
            return asyncio.run(planning)

    async def _count(
        self, jetstream: JetStream, stream: str, seq: int, filters: Sequence[str]
    ) -> MessageCount:
        self.counts.append(seq - 1)
        self._change(self)
        rows = self._rows_between(seq - 1, self.last_seq)
        self._change(self)
        return MessageCount(len(rows), rows[0] if rows and self._names_first else None)

    def _rows_between(self, start: int, end: int) -> list[int]:
        stored = self.stored[bisect_right(self.stored, start) : bisect_right(self.stored, end)]
        return [seq for seq in stored if self._matches is None or self._matches(seq)]

    def _info(self) -> StreamInfo:
        stored = len(self.stored)
        return StreamInfo(
            name=self.name,
            created=self.created,
            first_seq=self.stored[0] if stored else self.last_seq + 1,
            last_seq=self.last_seq,
            last_time=None,
            subjects=stored,
            messages=stored,
            nbytes=stored * self._message_size,
            config={"max_consumers": self._max_consumers},
            now="2026-11-25T10:00:00Z",
            leader_since=self.leader_since,
            replicas=self.replicas,
        )


def overwritten(writes: int, keys: int, skew: float = 1.0) -> list[int]:
    """The last sequence of each key after ``writes`` writes to random keys."""
    chance = random.Random(1)
    return sorted(
        {int(keys * chance.random() ** skew): seq for seq in range(1, writes + 1)}.values()
    )
