"""The planner: which range of the stream is the next micro-batch. It runs on the driver.

Everything that decides is asked of the stream's leader (``STREAM.INFO``, ``STREAM.MSG.GET``).
An idle query costs one small request, at most every 20 ms, however often Spark asks.

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
split, whatever ``maxRowsPerTrigger`` says. With history 1 they are a range like any other.

Before it plans, ``source.continuity`` compares the stream with the offset; data loss is found
there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from nats_stream_source.errors import OffsetError
from nats_stream_source.jetstream.api import JetStream, StoredMessage, StreamInfo
from nats_stream_source.jetstream.bucket import Bucket, look_up
from nats_stream_source.jetstream.link import Link
from nats_stream_source.jetstream.rank import count_from
from nats_stream_source.jetstream.subjects import stream_of
from nats_stream_source.options import KvOptions
from nats_stream_source.source.continuity import Continuity, time_at
from nats_stream_source.source.offsets import Offset, range_between
from nats_stream_source.source.ranges import answered, limited_end, moves_on

log = logging.getLogger(__name__)

_IDLE_INTERVAL = 0.02  # seconds
_RANK_SECONDS = 2.0  # for all ranks of one micro-batch; then sequence arithmetic has to do


@dataclass(frozen=True, slots=True)
class Plan:
    """One split: what a reader has to deliver, and how to label it.

    Attributes:
        start, end: the range ``(start, end]``.
        last_per_subject: read each key's last entry only.
        complete_from: after the read, the stream must not begin after this sequence, or entries
            went away unread; None where that does not matter.
    """

    bucket: str
    stream: str
    created: str
    prefix: str
    filters: tuple[str, ...]
    start: int
    end: int
    initial_through: int
    last_per_subject: bool
    complete_from: int | None


class Planner:
    """Plans the micro-batches of one query. Not thread-safe; Spark calls it from one thread."""

    def __init__(
        self, options: KvOptions, link: Link, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._link = link
        self._clock = clock
        self._continuity = Continuity(options, link)
        self._bucket: Bucket | None = None
        self._first_seq = 0
        self._initial: Offset | None = None
        self._target: int | None = None
        self._newest: Offset | None = None
        self._planned: Offset | None = None
        self._idle: tuple[Offset, float] | None = None

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

    async def latest(self, start: Offset, limit: int | None) -> Offset:
        """The end of the micro-batch that begins at ``start``; ``start`` when there is nothing.

        Args:
            limit: the most rows; None for no limit.

        Raises:
            DataLossError: with ``failOnDataLoss``; OffsetError: an offset of another query.
        """
        if self._idle is not None:
            resting, asked = self._idle
            if resting == start and self._clock() - asked < _IDLE_INTERVAL:
                return start
        self._accept(start)
        info = await self._look()
        self._idle = None
        begin = await self._continuity.go_on(start, info)
        last = info.last_seq if self._target is None else min(info.last_seq, self._target)
        end, newest = await self._end(begin, last, info, limit)
        self._newest = newest
        self._planned = end
        if end == start:
            self._idle = start, self._clock()
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
        return [
            Plan(
                bucket=self._options.bucket,
                stream=end.stream,
                created=end.created,
                prefix=bucket.prefix,
                filters=self._filters(per_subject),
                start=first,
                end=last,
                initial_through=end.initial_through,
                last_per_subject=per_subject,
                complete_from=max(first + 1, self._first_seq) if history else None,
            )
        ]

    # -- where a query begins -------------------------------------------------------------------

    async def _jetstream(self) -> JetStream:
        return JetStream(await self._link.connection())

    async def _look(self, *, warn: bool = False) -> StreamInfo:
        info = await look_up(await self._jetstream(), self._options.bucket)
        self._bucket = Bucket.of(self._options.bucket, info.config)
        self._first_seq = info.first_seq
        if warn and self._bucket.vanishing:
            log.warning(
                "bucket %s: keys can vanish without a marker (%s), and no row will say so; "
                "nats_stream_source.delta.reconcile removes their rows from a table",
                self._options.bucket,
                ", ".join(self._bucket.vanishing),
            )
        return info

    def _known_bucket(self) -> Bucket:
        assert self._bucket is not None, "no stream info yet"
        return self._bucket

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
            found = await self._last_match(start, last, filters)
            if found is None:
                if not moves_on(start, info.first_seq, last):
                    return begin, begin
                quiet = replace(
                    begin, stream_seq=last, time=await time_at(await self._jetstream(), info, last)
                )
                return quiet, quiet
            end, seen = found
        limited, rows, total = await self._within(start, end, limit, filters)
        newest = replace(begin, stream_seq=end, time=seen, consumer_seq=begin.consumer_seq + total)
        if limited == end and seen is not None:
            return newest, newest
        return (
            replace(
                begin,
                stream_seq=limited,
                time=await time_at(await self._jetstream(), info, limited),
                consumer_seq=begin.consumer_seq + rows,
            ),
            newest,
        )

    async def _initial_values(
        self, begin: Offset, last: int, info: StreamInfo
    ) -> tuple[Offset, Offset]:
        through = begin.initial_through
        count = info.subjects if not self._options.keys else 0
        end = replace(
            begin,
            stream_seq=through,
            time=await time_at(await self._jetstream(), info, through),
            consumer_seq=count,
        )
        return end, replace(end, stream_seq=last, consumer_seq=count + last - through)

    async def _last_match(
        self, start: int, last: int, filters: tuple[str, ...]
    ) -> tuple[int, str | None] | None:
        """Sequence and time of the last matching message in ``(start, last]``; None when none is.

        When the last one lies beyond ``last``, the answer is ``last`` itself: any sequence that
        the leader has will do as an end.
        """
        jetstream = await self._jetstream()
        stream = self._known_bucket().stream
        # The next message first: it is cheap even for a wide filter, which the last is not.
        upcoming = await asyncio.gather(
            *(jetstream.message(stream, seq=start + 1, next_by_subj=one) for one in filters)
        )
        hits = [
            one
            for one, message in zip(filters, upcoming, strict=True)
            if message is not None and message.seq <= last
        ]
        if not hits:
            return None
        found = await asyncio.gather(*(jetstream.message(stream, last_by_subj=one) for one in hits))
        newest = max((m for m in found if m is not None), key=_seq, default=None)
        if newest is None or not start < newest.seq <= last:
            return last, None
        return newest.seq, newest.time

    async def _within(
        self, start: int, end: int, limit: int | None, filters: tuple[str, ...]
    ) -> tuple[int, int, int]:
        """The limited end, its rows, and the rows up to ``end``; see ``ranges.limited_end``."""
        if limit is None and not filters:
            return end, end - start, end - start
        jetstream = await self._jetstream()
        stream = self._known_bucket().stream
        most = end - start

        async def rows_after(seq: int) -> int:
            # Entries written meanwhile come after `end`. At the range's start they must not be
            # missing (the total would be too small), elsewhere not be counted: hence the order.
            if seq == start:
                beyond = await count_from(jetstream, stream, end + 1, filters)
                return await count_from(jetstream, stream, seq + 1, filters) - beyond
            rows = await count_from(jetstream, stream, seq + 1, filters)
            return rows - await count_from(jetstream, stream, end + 1, filters)

        if limit is None:
            total = min(most, await rows_after(start)) if most > 1 else most
            return end, total, total
        total = most
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _RANK_SECONDS

        async def answer(seq: int) -> int | None:
            nonlocal total
            if loop.time() > deadline:
                return None
            rows = max(0, await rows_after(seq))
            if seq == start:
                total = rows
            return rows

        limited, rows = await answered(limited_end(start, end, limit), answer)
        return limited, rows, total


def _seq(message: StoredMessage) -> int:
    return message.seq
