"""The planner: which range of the stream is the next micro-batch. It runs on the driver.

Everything that decides is asked of the stream's leader (``STREAM.INFO``, ``STREAM.MSG.GET``).
Whether there is anything to read: ``source.matches``; how much of it, in how many splits:
``source.cuts``; how often an idle query looks: ``source.idle``.

Where a query begins, and which of its rows are initial values (End-Of-Initial-Data), is decided
once per process and carried by every offset (``origin``, ``initial_through``):

=====================  ============================  =====================================
deliver policy         begins after                  initial values
=====================  ============================  =====================================
``all``                0                             all messages that there are now
``last_per_subject``   0                             the last message of each subject, as of now
``new``                the last sequence now         none
``last``               before the last that matches  that one
``by_start_sequence``  N - 1                         from N to the last sequence now
``by_start_time``      before the first of that      from there to the last sequence now
                       time or later
=====================  ============================  =====================================

(``nats_kv`` begins with ``last_per_subject``, ``includeHistory`` is ``all``, ``updatesOnly`` is
``new``.) The initial values of ``last_per_subject`` need a consumer of that policy where a stream
keeps more than one message of a subject. Such a consumer cannot be cut into ranges, so they are one
micro-batch with one split, whatever limits and ``minPartitions`` say. With history 1 they are a
range like any other.

Before it plans, ``source.continuity`` compares the stream with the offset; data loss is found
there.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from nats_stream_source.errors import OffsetError
from nats_stream_source.jetstream.api import StreamInfo
from nats_stream_source.jetstream.link import Link
from nats_stream_source.logs import field_logger
from nats_stream_source.source.beginning import begins_after
from nats_stream_source.source.continuity import Continuity, time_at
from nats_stream_source.source.cuts import Cuts
from nats_stream_source.source.idle import Idle
from nats_stream_source.source.leader import Leader
from nats_stream_source.source.matches import Matches
from nats_stream_source.source.offsets import Offset, range_between
from nats_stream_source.source.plan import Plan
from nats_stream_source.source.query import Query
from nats_stream_source.source.ranges import moves_on, row_limit

log = field_logger(__name__)


class Planner:
    """Plans the micro-batches of one query. Not thread-safe; Spark calls it from one thread.

    Args:
        clock, sleep: seconds, and how to let some pass; a test has its own.
        cores: how many tasks run at a time, as far as is known.
        timer: seconds, for how long ranks may take.
    """

    def __init__(
        self,
        query: Query,
        link: Link,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        cores: int | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._query = query
        self._leader = Leader(query, link)
        self._continuity = Continuity(query, link)
        self._cuts = Cuts(query.reading.min_partitions or 1, cores or os.cpu_count() or 1, timer)
        self._matches = Matches(self._leader)
        self._idle = Idle(clock, sleep)
        self._initial: Offset | None = None
        self._target: int | None = None
        self._newest: Offset | None = None
        self._planned: Offset | None = None

    # -- what Spark asks ------------------------------------------------------------------------

    async def initial(self) -> Offset:
        """Where a query without a checkpoint begins; decided once."""
        if self._initial is None:
            self._initial = await self._beginning()
        return self._initial

    async def prepare_available_now(self) -> None:
        """Fix the last sequence that this run reads (``Trigger.AvailableNow``)."""
        await self.initial()
        self._target = (await self._leader.look()).last_seq

    async def latest(self, start: Offset, rows: int | None, nbytes: int | None = None) -> Offset:
        """The end of the micro-batch that begins at ``start``; ``start`` when there is nothing.

        Where there was nothing the last time, it may wait a moment before it looks again.

        Args:
            rows, nbytes: the most rows, and about the most bytes; None for no limit.

        Raises:
            DataLossError: with ``failOnDataLoss``; OffsetError: an offset of another query.
        """
        if not await self._idle.rest(start):
            return start
        info = await self._leader.look()
        self._accept(start, info)
        if start.stream_seq == start.origin and start.epoch == 0:
            await self._leader.check()
        if self._idle.unchanged(start, info):
            return start
        begin = await self._continuity.go_on(start, info)
        last = info.last_seq if self._target is None else min(info.last_seq, self._target)
        limit = row_limit(rows, nbytes, info.nbytes / max(info.messages, 1))
        end, newest = await self._end(begin, last, info, limit)
        self._newest = newest
        self._planned = end
        if end == start:
            self._idle.nothing(start, info, self._matches.settled(last))
        else:
            self._idle.over()
        return end

    def newest(self) -> Offset | None:
        """The stream's end as of the last :meth:`latest`, for the lag in Spark's progress."""
        return self._newest

    async def plans(self, start: Offset, end: Offset) -> list[Plan]:
        """The splits of the range between two offsets; none when it is empty."""
        planned = end == self._planned
        info = self._leader.info if planned else await self._leader.look()
        self._accept(start, info)
        self._accept(end, info)
        first, last = range_between(start, end)
        time = end.time
        # A restart asks for the empty range where it stands, of which nothing can be lost.
        if first < last and not planned:
            readable = await self._continuity.readable_through(end, info)
            last, time = readable.stream_seq, readable.time
        if first >= last:
            return []
        per_subject = self._per_subject(end, first, last)
        complete = self._query.complete(self._leader.content) and not per_subject
        if not planned and not per_subject:
            self._continuity.still_has(info, first, end, last)
        history_through = self._continuity.history_through(first, end)
        plans = []
        for stop in [last] if per_subject else await self._stops(first, last):
            plans.append(
                Plan(
                    stream=end.stream,
                    created=end.created,
                    prefix=self._leader.content.prefix,
                    filters=self._filters(per_subject),
                    start=first,
                    end=stop,
                    initial_through=end.initial_through,
                    last_per_subject=per_subject,
                    complete_from=max(first + 1, info.first_seq) if complete else None,
                    history_through=history_through,
                    pinned=None if time is None else (last, time),
                )
            )
            first, history_through = stop, 0
        return plans

    async def _stops(self, start: int, end: int) -> list[int]:
        """The ends of the splits of ``(start, end]``."""
        return await self._cuts.splits(
            await self._leader.jetstream(), self._leader.info, self._counted(), start, end
        )

    # -- where a query begins -------------------------------------------------------------------

    def _counted(self) -> tuple[str, ...]:
        """The filters for all questions about how much there is."""
        return self._leader.content.counted

    def _filters(self, last_per_subject: bool) -> tuple[str, ...]:
        """The filters for a reader."""
        content = self._leader.content
        return content.filters or ((content.everything,) if last_per_subject else ())

    async def _beginning(self) -> Offset:
        info = await self._leader.look_first()
        jetstream, content = await self._leader.jetstream(), self._leader.content
        if content.vanishing and self._query.last_first:
            log.warning(
                "keys can vanish without a marker, and no row will say so; "
                "nats_stream_source.delta.reconcile removes their rows from a table",
                stream=info.name,
                why=", ".join(content.vanishing),
            )
        origin = await begins_after(jetstream, info, self._query.beginning, content.filters)
        known = 0 < origin <= info.last_seq
        return Offset(
            stream=info.name,
            created=info.created,
            epoch=0,
            origin=origin,
            stream_seq=origin,
            # Without it, a stream that is set back before the first row would not be noticed.
            time=await time_at(jetstream, info, origin) if known else None,
            consumer_seq=0,
            initial_through=max(origin, info.last_seq),
            filter=self._query.filter,
        )

    def _accept(self, offset: Offset, info: StreamInfo) -> None:
        words = self._query.words
        if offset.stream != info.name:
            raise OffsetError(
                f"the checkpoint is of stream {offset.stream}, the query reads {info.name} "
                f"({words.place}): use another checkpoint location"
            )
        if offset.filter != self._query.filter:
            raise OffsetError(
                f"the checkpoint was written with {words.filters}="
                f"{','.join(offset.filter) or '(all)'}, the query has {words.filters}="
                f"{','.join(self._query.filter) or '(all)'}: what others hold would be missing. "
                f"Use the same option {words.filters!r} or another checkpoint location"
            )

    def _per_subject(self, end: Offset, first: int, last: int) -> bool:
        """Whether a range is the default's initial values of a bucket with history."""
        return (
            self._query.last_first
            and end.epoch == 0
            and first == end.origin == 0
            and last == end.initial_through
            and self._leader.content.history != 1
        )

    # -- where a micro-batch ends ---------------------------------------------------------------

    async def _end(
        self, begin: Offset, last: int, info: StreamInfo, limit: int | None
    ) -> tuple[Offset, Offset]:
        """The end of the micro-batch, and the newest offset, both after ``begin``."""
        start = begin.stream_seq
        if last <= start:
            return begin, begin
        through = begin.initial_through
        if start < through <= last and self._per_subject(begin, start, through):
            return await self._initial_values(begin, last, info)
        filters = self._counted()
        if not filters:
            end = last
            seen = info.last_time if last == info.last_seq else None
        else:
            moving = moves_on(start, info.first_seq, last)
            thorough = self._target is not None
            found = await self._matches.newest(filters, start, last, thorough=thorough)
            if found is None and moving and not self._matches.settled(last):
                found = await self._matches.newest(filters, start, last, thorough=True)
            if found is None:
                if not moving:
                    return begin, begin
                return (quiet := await self._at(begin, last, None, 0)), quiet
            end, seen = found
        limited, rows, total = await self._cuts.limited(
            await self._leader.jetstream(), info, filters, start, end, limit
        )
        delivered = self._delivered(begin, limited, rows)
        planned = await self._at(begin, limited, seen if limited == end else None, delivered)
        if limited == end:
            return planned, planned
        count = begin.consumer_seq + self._delivered(begin, end, total)
        return planned, replace(begin, stream_seq=end, time=seen, consumer_seq=count)

    async def _at(self, begin: Offset, seq: int, seen: str | None, delivered: int) -> Offset:
        """The offset at ``seq``; ``seen`` is the time of the message there, if it is known."""
        if seen is None:
            seen = await time_at(await self._leader.jetstream(), self._leader.info, seq)
            if seen is None:
                await self._leader.confirm(seq)
        count = begin.consumer_seq + delivered
        return replace(begin, stream_seq=seq, time=seen, consumer_seq=count)

    def _delivered(self, begin: Offset, seq: int, rows: int) -> int:
        """How many messages a consumer that is never behind gets from ``begin`` up to ``seq``.

        Of the initial values, what is left; of what comes later, all, also what was superseded
        since: known where every message matches.
        """
        if self._counted():
            return rows
        initial = max(0, min(seq, begin.initial_through) - begin.stream_seq)
        later = seq - max(begin.stream_seq, begin.initial_through)
        return min(initial, rows) + max(0, later)

    async def _initial_values(
        self, begin: Offset, last: int, info: StreamInfo
    ) -> tuple[Offset, Offset]:
        through = begin.initial_through
        count = info.subjects
        if self._query.filter:
            count = await self._cuts.subjects(await self._leader.jetstream(), info, self._counted())
        end = await self._at(begin, through, None, count)
        return end, replace(end, stream_seq=last, consumer_seq=count + last - through)
