"""The planner: decides the range of the next micro-batch. It runs on the driver.

Every decision uses responses of the stream leader (``STREAM.INFO``, ``STREAM.MSG.GET``).
``spark.planning.match_finder`` detects new messages, ``spark.planning.splitter`` limits the range
and cuts it into splits, ``spark.planning.trigger_delay`` waits for ``minRowsPerTrigger``,
``spark.planning.poll_backoff`` spaces the polls of an idle query.

The start position of a query, and which of its rows are initial values (End-Of-Initial-Data), is
decided once per process and carried by every offset (``origin``, ``initial_through``):

=====================  ============================  =====================================
deliver policy         starts after                  initial values
=====================  ============================  =====================================
``all``                0                             all messages in the stream now
``last_per_subject``   0                             the last message of each subject now
``new``                the last sequence now         none
``last``               before the last match         that message
``by_start_sequence``  N - 1                         from N to the last sequence now
``by_start_time``      before the first message of   from there to the last sequence now
                       that time or later
=====================  ============================  =====================================

(``nats_kv`` starts with ``last_per_subject``; ``includeHistory`` is ``all``, ``updatesOnly`` is
``new``.) The initial values of ``last_per_subject`` need a consumer of that policy where a stream
keeps more than one message per subject. Such a consumer cannot be cut into ranges, so they are one
micro-batch with one split, regardless of limits and ``minPartitions``. With history 1 they are a
range like any other.

Before it plans, the planner compares the stream with the offset to detect data loss
(``spark.planning.data_loss``).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from nats_stream_source.errors import OffsetError
from nats_stream_source.jetstream.api import StreamInfo
from nats_stream_source.jetstream.kv.bucket import UNMARKED_TTLS
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.logs import field_logger
from nats_stream_source.spark.formats.base import FormatAdapter
from nats_stream_source.spark.formats.offsets import Offset, range_between
from nats_stream_source.spark.formats.splits import Split
from nats_stream_source.spark.planning.data_loss import DataLossCheck, timestamp_at
from nats_stream_source.spark.planning.leader import Leader
from nats_stream_source.spark.planning.match_finder import MatchFinder
from nats_stream_source.spark.planning.poll_backoff import PollBackoff
from nats_stream_source.spark.planning.range_math import should_advance
from nats_stream_source.spark.planning.splitter import RangeSplitter
from nats_stream_source.spark.planning.start_position import report_ignored_start, resolve_start
from nats_stream_source.spark.planning.trigger_delay import TriggerDelay

log = field_logger(__name__)


class Planner:
    """Plans the micro-batches of one query. Not thread-safe; Spark calls it from one thread.

    Args:
        clock, sleep: the time in seconds, and a wait of some; tests replace both.
        cores: the number of tasks that run in parallel; by default the driver's cores.
        timer: the time in seconds, for the time limit of ranks.
    """

    def __init__(
        self,
        adapter: FormatAdapter,
        connection: ReusableConnection,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        cores: int | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._adapter = adapter
        self._leader = Leader(adapter, connection)
        self._data_loss_check = DataLossCheck(adapter, connection)
        self._splitter = RangeSplitter(adapter.common, cores or os.cpu_count() or 1, timer)
        self._match_finder = MatchFinder(self._leader)
        self._backoff = PollBackoff(clock, sleep)
        options = adapter.common
        self._delay = TriggerDelay(options.min_rows, options.max_trigger_delay, clock)
        self._initial_offset: Offset | None = None
        self._started = False
        self._available_now_end: int | None = None
        self._stream_end: Offset | None = None
        self._planned_end: Offset | None = None

    # -- the calls of Spark ---------------------------------------------------------------------

    async def initial_offset(self) -> Offset:
        """The start position of a query without a checkpoint; decided once."""
        if self._initial_offset is None:
            self._initial_offset = await self._resolve_initial_offset()
        return self._initial_offset

    async def prepare_available_now(self) -> None:
        """Fix the last sequence that this run reads (``Trigger.AvailableNow``)."""
        await self.initial_offset()
        self._available_now_end = (await self._leader.stream_info()).last_seq

    async def latest_offset(self, start: Offset, *, limited: bool = True) -> Offset:
        """The end of the micro-batch that starts at ``start``; ``start`` if it is empty.

        After an empty poll it may wait before it polls again.

        Args:
            limited: whether ``maxRowsPerTrigger``, ``maxBytesPerTrigger`` and
                ``minRowsPerTrigger`` apply.

        Raises:
            DataLossError: with ``failOnDataLoss``.
            OffsetError: an offset of another query.
        """
        if not await self._backoff.wait_until_due(start):
            return start
        info = await self._leader.stream_info()
        self._validate_offset(start, info)
        if not self._started and start != self._initial_offset:
            await report_ignored_start(
                await self._leader.jetstream(), info, self._adapter, resumed=start
            )
        self._started = True
        if start.stream_seq == start.origin and start.epoch == 0:
            await self._leader.validate_filters()
        if self._backoff.is_unchanged(start, info):
            return start
        resumed = await self._data_loss_check.resume_from(start, info)
        available = self._available_now_end
        last = info.last_seq if available is None else min(info.last_seq, available)
        end, stream_end = await self._plan_end(resumed, last, info, limited)
        self._stream_end = stream_end
        rows = stream_end.consumer_seq - resumed.consumer_seq
        # An end without rows, or after lost data, does not wait.
        waits = limited and available is None and rows > 0 and resumed == start
        if waits and not self._delay.is_due(rows):
            # Not exhausted: the delay ends without a change of the stream.
            self._backoff.record_empty(start, info, exhausted=False)
            return start
        self._planned_end = end
        if end == start:
            self._backoff.record_empty(start, info, self._match_finder.is_exhausted(last))
        else:
            self._backoff.reset()
            self._delay.record()
        return end

    def report_latest_offset(self) -> Offset | None:
        """The stream's end at the last :meth:`latest_offset`, for the lag in Spark's progress."""
        return self._stream_end

    async def splits(self, start: Offset, end: Offset) -> list[Split]:
        """The splits of the range between two offsets; an empty list for an empty range."""
        planned = end == self._planned_end
        info = self._leader.info if planned else await self._leader.stream_info()
        self._validate_offset(start, info)
        self._validate_offset(end, info)
        first, last = range_between(start, end)
        time = end.time
        # After a restart Spark requests the empty range at the query's position, which loses none.
        if first < last and not planned:
            readable = await self._data_loss_check.readable_end(end, info)
            last, time = readable.stream_seq, readable.time
        if first >= last:
            return []
        last_per_subject = self._needs_last_per_subject(end, first, last)
        missing_is_loss = self._adapter.missing_is_loss(self._leader.scope) and not last_per_subject
        if not planned and not last_per_subject:
            self._data_loss_check.check_aged_out(info, first, end, last)
        expiry_allowed_through = self._data_loss_check.expiry_allowed_through(first, end)
        splits = []
        for split_end in [last] if last_per_subject else await self._split_ends(first, last):
            splits.append(
                Split(
                    stream=end.stream,
                    created=end.created,
                    prefix=self._leader.scope.prefix,
                    filters=self._consumer_filters(last_per_subject),
                    start=first,
                    end=split_end,
                    initial_through=end.initial_through,
                    last_per_subject=last_per_subject,
                    required_from=max(first + 1, info.first_seq) if missing_is_loss else None,
                    expiry_allowed_through=expiry_allowed_through,
                    fingerprint=None if time is None else (last, time),
                )
            )
            first, expiry_allowed_through = split_end, 0
        return splits

    async def _split_ends(self, start: int, end: int) -> list[int]:
        jetstream, info = await self._leader.jetstream(), self._leader.info
        return await self._splitter.split_ends(
            jetstream, info, self._effective_filters(), start, end
        )

    # -- the start position of a query ----------------------------------------------------------

    def _effective_filters(self) -> tuple[str, ...]:
        """The filters for requests that count or search messages."""
        return self._leader.scope.effective_filters

    def _consumer_filters(self, last_per_subject: bool) -> tuple[str, ...]:
        """The filters for a reader."""
        scope = self._leader.scope
        return scope.filters or ((scope.match_all,) if last_per_subject else ())

    async def _resolve_initial_offset(self) -> Offset:
        info = await self._leader.initial_stream_info()
        jetstream, scope = await self._leader.jetstream(), self._leader.scope
        if scope.silent_removals and self._adapter.last_per_subject:
            # nats-py allows TTLs in every bucket that it creates: no sign that one is used.
            used = set(scope.silent_removals) != {UNMARKED_TTLS}
            (log.warning if used else log.info)(
                "keys can be removed without a marker, so that no row reports it; "
                "nats_stream_source.delta.reconcile removes their rows from a table",
                stream=info.name,
                why=", ".join(scope.silent_removals),
            )
        origin = await resolve_start(jetstream, info, self._adapter.start_position, scope.filters)
        exists = 0 < origin <= info.last_seq
        return Offset(
            stream=info.name,
            created=info.created,
            epoch=0,
            origin=origin,
            stream_seq=origin,
            # The timestamp detects a stream that is rolled back before the first row.
            time=await timestamp_at(jetstream, info, origin) if exists else None,
            consumer_seq=0,
            initial_through=max(origin, info.last_seq),
            filter=self._adapter.user_filters,
        )

    def _validate_offset(self, offset: Offset, info: StreamInfo) -> None:
        terms = self._adapter.terms
        if offset.stream != info.name:
            raise OffsetError(
                f"could not resume from the checkpoint: it is of stream {offset.stream}, the query "
                f"reads {info.name} ({terms.stream_option}); use the checkpoint's stream or "
                f"another checkpoint location"
            )
        if offset.filter != self._adapter.user_filters:
            option = terms.filter_option
            raise OffsetError(
                f"could not resume from the checkpoint: it was written with {option}="
                f"{','.join(offset.filter) or '(all)'}, the query has {option}="
                f"{','.join(self._adapter.user_filters) or '(all)'}, and resuming with different "
                f"filters would skip messages; use the same option {option!r} or another "
                f"checkpoint location"
            )

    def _needs_last_per_subject(self, end: Offset, first: int, last: int) -> bool:
        """Whether a range is the initial values of a query that needs ``last_per_subject``."""
        return (
            self._adapter.last_per_subject
            and end.epoch == 0
            and first == end.origin == 0
            and last == end.initial_through
            and self._leader.scope.history != 1
        )

    # -- the end of a micro-batch ---------------------------------------------------------------

    async def _plan_end(
        self, start: Offset, last: int, info: StreamInfo, limited: bool
    ) -> tuple[Offset, Offset]:
        """The end of the micro-batch, and the stream's end, both after ``start``."""
        start_seq = start.stream_seq
        if last <= start_seq:
            return start, start
        through = start.initial_through
        if start_seq < through <= last and self._needs_last_per_subject(start, start_seq, through):
            return await self._initial_values_end(start, last, info)
        filters = self._effective_filters()
        if not filters:
            end = last
            end_time = info.last_time if last == info.last_seq else None
        else:
            advance = should_advance(start_seq, info.first_seq, last)
            thorough = self._available_now_end is not None
            finder = self._match_finder
            newest = await finder.find_newest(filters, start_seq, last, thorough=thorough)
            if newest is None and advance and not finder.is_exhausted(last):
                newest = await finder.find_newest(filters, start_seq, last, thorough=True)
            if newest is None:
                if not advance:
                    return start, start
                empty = await self._offset_at(start, last, None, 0)
                return empty, empty
            end, end_time = newest
        limited_end, rows, total = await self._splitter.limit(
            await self._leader.jetstream(), info, filters, start_seq, end, limited=limited
        )
        delivered = self._delivered(start, limited_end, rows)
        time = end_time if limited_end == end else None
        planned = await self._offset_at(start, limited_end, time, delivered)
        if limited_end == end:
            return planned, planned
        consumer_seq = start.consumer_seq + self._delivered(start, end, total)
        stream_end = replace(start, stream_seq=end, time=end_time, consumer_seq=consumer_seq)
        return planned, stream_end

    async def _offset_at(self, start: Offset, seq: int, time: str | None, delivered: int) -> Offset:
        """The offset at ``seq``; ``time`` is the timestamp of its message, None if unknown."""
        if time is None:
            time = await timestamp_at(await self._leader.jetstream(), self._leader.info, seq)
            if time is None:
                await self._leader.confirm_missing(seq)
        consumer_seq = start.consumer_seq + delivered
        return replace(start, stream_seq=seq, time=time, consumer_seq=consumer_seq)

    def _delivered(self, start: Offset, seq: int, rows: int) -> int:
        """The number of messages that a consumer without lag receives in ``(start, seq]``.

        That is the remaining initial values, and every later message, superseded ones included:
        known exactly where every message matches.
        """
        if self._effective_filters():
            return rows
        initial = max(0, min(seq, start.initial_through) - start.stream_seq)
        later = seq - max(start.stream_seq, start.initial_through)
        return min(initial, rows) + max(0, later)

    async def _initial_values_end(
        self, start: Offset, last: int, info: StreamInfo
    ) -> tuple[Offset, Offset]:
        through = start.initial_through
        count = info.subjects
        if self._adapter.user_filters:
            jetstream, filters = await self._leader.jetstream(), self._effective_filters()
            count = await self._splitter.count_subjects(jetstream, info, filters)
        end = await self._offset_at(start, through, None, count)
        return end, replace(end, stream_seq=last, consumer_seq=count + last - through)
