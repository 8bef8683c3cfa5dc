"""The planner: which range of the stream is the next micro-batch. It runs on the driver.

Everything that decides is asked of the stream's leader (``STREAM.INFO``, ``STREAM.MSG.GET``).
Whether there is anything to read: ``source.matches``; how much of it, in how many splits:
``source.cuts``; how often an idle query looks: ``source.idle``.

Where a query begins, and which of its rows are initial values (End-Of-Initial-Data), is decided
once per process and carried by every offset (``origin``, ``initial_through``):

==================  ==========================  =====================================
query               begins after                initial values
==================  ==========================  =====================================
(default)           0                           the last entry of each key, as of now
``includeHistory``  0                           all entries that there are now
``updatesOnly``     the last sequence now       none
``startSequence=N`` N - 1                       from N to the last sequence now
==================  ==========================  =====================================

The default's initial values need a ``last_per_subject`` consumer where a bucket keeps more than one
revision of a key. Such a consumer cannot be cut into ranges, so they are one micro-batch with one
split, whatever limits and ``minPartitions`` say. With history 1 they are a range like any other.

Before it plans, ``source.continuity`` compares the stream with the offset; data loss is found
there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from nats_stream_source.errors import OffsetError
from nats_stream_source.jetstream.api import JetStream, StreamInfo
from nats_stream_source.jetstream.bucket import Bucket, look_up
from nats_stream_source.jetstream.link import Link
from nats_stream_source.jetstream.subjects import stream_of
from nats_stream_source.options import KvOptions
from nats_stream_source.source.continuity import Continuity, time_at
from nats_stream_source.source.cuts import Cuts
from nats_stream_source.source.idle import Idle
from nats_stream_source.source.matches import Matches
from nats_stream_source.source.offsets import Offset, range_between
from nats_stream_source.source.plan import Plan
from nats_stream_source.source.ranges import moves_on, row_limit

log = logging.getLogger(__name__)


class Planner:
    """Plans the micro-batches of one query. Not thread-safe; Spark calls it from one thread.

    Args:
        clock, sleep: seconds, and how to let some pass; a test has its own.
        cores: how many tasks run at a time, as far as is known.
        timer: seconds, for how long ranks may take.
    """

    def __init__(
        self,
        options: KvOptions,
        link: Link,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        cores: int | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._options = options
        self._link = link
        self._continuity = Continuity(options, link)
        self._cuts = Cuts(options.min_partitions or 1, cores or os.cpu_count() or 1, timer)
        self._matches = Matches()
        self._idle = Idle(clock, sleep)
        self._bucket: Bucket | None = None
        self._info: StreamInfo | None = None
        self._initial: Offset | None = None
        self._target: int | None = None
        self._newest: Offset | None = None
        self._planned: Offset | None = None

    # -- what Spark asks ------------------------------------------------------------------------

    async def initial(self) -> Offset:
        """Where a query without a checkpoint begins; decided once."""
        if self._initial is None:
            self._initial = self._beginning(await self._look(warn=True))
        return self._initial

    async def prepare_available_now(self) -> None:
        """Fix the last sequence that this run reads (``Trigger.AvailableNow``)."""
        await self.initial()
        self._target = (await self._look()).last_seq

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
        self._accept(start)
        info = await self._look()
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
        self._accept(start)
        self._accept(end)
        first, last = range_between(start, end)
        if end != self._planned:
            last = min(last, await self._continuity.readable_through(end, await self._look()))
        if first >= last:
            return []
        bucket = self._known_bucket()
        per_subject = self._per_subject(end, first, last)
        history = self._options.include_history
        first_seq = self._known_info().first_seq
        plans = []
        for stop in [last] if per_subject else await self._stops(first, last):
            plans.append(
                Plan(
                    bucket=self._options.bucket,
                    stream=end.stream,
                    created=end.created,
                    prefix=bucket.prefix,
                    filters=self._filters(per_subject),
                    start=first,
                    end=stop,
                    initial_through=end.initial_through,
                    last_per_subject=per_subject,
                    complete_from=max(first + 1, first_seq) if history else None,
                )
            )
            first = stop
        return plans

    async def _stops(self, start: int, end: int) -> list[int]:
        """The ends of the splits of ``(start, end]``."""
        return await self._cuts.splits(
            await self._jetstream(), self._known_info(), self._filters(), start, end
        )

    # -- where a query begins -------------------------------------------------------------------

    async def _jetstream(self) -> JetStream:
        return JetStream(await self._link.connection())

    async def _look(self, *, warn: bool = False) -> StreamInfo:
        info = await look_up(await self._jetstream(), self._options.bucket)
        if self._info is None or info.config != self._info.config:
            self._bucket = Bucket.of(self._options.bucket, info.config)
        self._info = info
        bucket = self._known_bucket()
        if warn and bucket.vanishing:
            log.warning(
                "bucket %s: keys can vanish without a marker (%s), and no row will say so; "
                "nats_stream_source.delta.reconcile removes their rows from a table",
                self._options.bucket,
                ", ".join(bucket.vanishing),
            )
        return info

    def _known_bucket(self) -> Bucket:
        assert self._bucket is not None, "no stream info yet"
        return self._bucket

    def _known_info(self) -> StreamInfo:
        assert self._info is not None, "no stream info yet"
        return self._info

    def _filters(self, last_per_subject: bool = False) -> tuple[str, ...]:
        bucket = self._known_bucket()
        filters = bucket.filters(self._options.keys)
        # The server refuses last_per_subject without a filter (10094).
        return filters or ((f"{bucket.prefix}>",) if last_per_subject else ())

    def _beginning(self, info: StreamInfo) -> Offset:
        options = self._options
        origin = 0
        if options.updates_only:
            origin = info.last_seq
        elif options.start_sequence is not None:
            origin = options.start_sequence - 1
        return Offset(
            stream=info.name,
            created=info.created,
            epoch=0,
            origin=origin,
            stream_seq=origin,
            time=info.last_time if options.updates_only else None,
            consumer_seq=0,
            initial_through=max(origin, info.last_seq),
            filter=options.keys,
        )

    def _accept(self, offset: Offset) -> None:
        stream = stream_of(self._options.bucket)
        if offset.stream != stream:
            raise OffsetError(
                f"the checkpoint is of stream {offset.stream}, the query reads {stream} (option "
                f"'bucket'): use another checkpoint location"
            )
        if offset.filter != self._options.keys:
            raise OffsetError(
                f"the checkpoint was written with keys={','.join(offset.filter) or '(all)'}, the "
                f"query has keys={','.join(self._options.keys) or '(all)'}: entries of other keys "
                f"would be missing. Use the same option 'keys' or another checkpoint location"
            )

    def _per_subject(self, end: Offset, first: int, last: int) -> bool:
        """Whether a range is the default's initial values of a bucket with history."""
        options = self._options
        return (
            not options.include_history
            and options.start_sequence is None
            and end.epoch == 0
            and first == end.origin == 0
            and last == end.initial_through
            and self._known_bucket().history != 1
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
        filters = self._filters()
        if not filters:
            end = last
            seen = info.last_time if last == info.last_seq else None
        else:
            found = await self._matches.newest(
                await self._jetstream(),
                info.name,
                filters,
                start,
                last,
                thorough=self._target is not None,
            )
            if found is None:
                if not moves_on(start, info.first_seq, last):
                    return begin, begin
                return (quiet := await self._at(begin, last, None, 0)), quiet
            end, seen = found
        limited, rows, total = await self._cuts.limited(
            await self._jetstream(), info, filters, start, end, limit
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
            seen = await time_at(await self._jetstream(), self._known_info(), seq)
        count = begin.consumer_seq + delivered
        return replace(begin, stream_seq=seq, time=seen, consumer_seq=count)

    def _delivered(self, begin: Offset, seq: int, rows: int) -> int:
        """How many messages a consumer that is never behind gets from ``begin`` up to ``seq``.

        Of the initial values, what is left; of what comes later, all, also what was superseded
        since: known where every message matches.
        """
        if self._filters():
            return rows
        initial = max(0, min(seq, begin.initial_through) - begin.stream_seq)
        later = seq - max(begin.stream_seq, begin.initial_through)
        return min(initial, rows) + max(0, later)

    async def _initial_values(
        self, begin: Offset, last: int, info: StreamInfo
    ) -> tuple[Offset, Offset]:
        through = begin.initial_through
        count = info.subjects
        if self._options.keys:
            count = await self._cuts.subjects(await self._jetstream(), info, self._filters())
        end = await self._at(begin, through, None, count)
        return end, replace(end, stream_seq=last, consumer_seq=count + last - through)
