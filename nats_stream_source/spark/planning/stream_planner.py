"""Plans the ranges of one stream: their ends and their splits. It runs on the driver.

Every decision uses responses of the stream leader (``STREAM.INFO``, ``STREAM.MSG.GET``).
``spark.planning.match_finder`` detects new messages, ``spark.planning.splitter`` limits the range
and cuts it into splits.

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

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from nats_stream_source.errors import OffsetError
from nats_stream_source.jetstream.api import StreamInfo
from nats_stream_source.jetstream.kv.bucket import UNMARKED_TTLS
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.logs import field_logger
from nats_stream_source.options import StartPosition
from nats_stream_source.spark.formats.base import FormatAdapter
from nats_stream_source.spark.formats.offsets import Offset, range_between
from nats_stream_source.spark.formats.splits import Split
from nats_stream_source.spark.planning.data_loss import DataLossCheck, timestamp_at
from nats_stream_source.spark.planning.leader import Leader
from nats_stream_source.spark.planning.match_finder import MatchFinder
from nats_stream_source.spark.planning.range_math import RangeLimit, should_advance
from nats_stream_source.spark.planning.splitter import RangeSplitter
from nats_stream_source.spark.planning.start_position import report_ignored_start, resolve_start

log = field_logger(__name__)


@dataclass(frozen=True, slots=True)
class PlannedRange:
    """A range that starts at ``start``: empty if ``end`` equals it.

    Attributes:
        start: the offset that the range follows; of a new epoch after a data loss.
        end: the end under the limit.
        stream_end: the end without a limit.
        exhausted: whether the plan covered all filters, so that only new messages change it.
        whole: whether the range is read as a whole under any limit: the initial values of
            ``last_per_subject``.
    """

    start: Offset
    end: Offset
    stream_end: Offset
    exhausted: bool
    whole: bool

    @property
    def rows(self) -> int:
        """The number of rows up to the stream's end: an estimate."""
        return self.stream_end.consumer_seq - self.start.consumer_seq


def check_filter(adapter: FormatAdapter, stored: tuple[str, ...]) -> None:
    """Raise OffsetError if the filters that an offset stores are not those of the query."""
    if stored != adapter.user_filters:
        option = adapter.terms.filter_option
        raise OffsetError(
            f"could not resume from the checkpoint: it was written with {option}="
            f"{','.join(stored) or '(all)'}, the query has {option}="
            f"{','.join(adapter.user_filters) or '(all)'}, and resuming with different filters "
            f"would skip messages; use the same option {option!r} or another checkpoint location"
        )


class StreamPlanner:
    """Plans the ranges of one stream for one query. Not safe for concurrent calls.

    Args:
        stream: the stream's name; None to look it up as the adapter says.
        cores: the number of tasks that run in parallel; by default the driver's cores.
        timer: the time in seconds, for the time limit of ranks.
    """

    def __init__(
        self,
        adapter: FormatAdapter,
        connection: ReusableConnection,
        stream: str | None = None,
        cores: int | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._adapter = adapter
        self.leader = Leader(adapter, connection, stream)
        self._data_loss_check = DataLossCheck(adapter, connection)
        self._splitter = RangeSplitter(adapter.common, cores or os.cpu_count() or 1, timer)
        self._match_finder = MatchFinder(self.leader)
        self._thorough = False
        self._planned_end: Offset | None = None

    def read_thoroughly(self) -> None:
        """From now on, request all filters in each plan: the run ends at the first empty one."""
        self._thorough = True

    async def plan(
        self, start: Offset, info: StreamInfo, last: int, limit: RangeLimit | None
    ) -> PlannedRange:
        """Plan the range from ``start`` up to the stream sequence ``last``.

        Args:
            info: the stream as its leader has just reported it to :attr:`leader`.
            limit: the limits of the range; None for all messages.

        Raises:
            DataLossError: with ``failOnDataLoss``.
        """
        resumed = await self._data_loss_check.resume_from(start, info)
        end, stream_end = await self._plan_end(resumed, last, info, limit)
        self._planned_end = end
        exhausted = end != start or self._match_finder.is_exhausted(last)
        whole = self._needs_last_per_subject(end, resumed.stream_seq, end.stream_seq)
        return PlannedRange(resumed, end, stream_end, exhausted, whole)

    async def report_resumed(self, start: Offset, info: StreamInfo) -> None:
        """Log that the start options do not apply to a query that resumes at ``start``."""
        await report_ignored_start(
            await self.leader.jetstream(), info, self._adapter, resumed=start
        )

    async def splits(
        self, start: Offset, end: Offset, min_splits: int | None = None
    ) -> list[Split]:
        """The splits of the range between two offsets; an empty list for an empty range.

        Args:
            min_splits: the minimum number; by default ``minPartitions``.
        """
        planned = end == self._planned_end
        info = self.leader.info if planned else await self.leader.stream_info()
        self.validate_offset(start, info)
        self.validate_offset(end, info)
        first, last = range_between(start, end)
        time = end.time
        # After a restart Spark requests the empty range at the query's position, which loses none.
        if first < last and not planned:
            readable = await self._data_loss_check.readable_end(end, info)
            last, time = readable.stream_seq, readable.time
        if first >= last:
            return []
        last_per_subject = self._needs_last_per_subject(end, first, last)
        missing_is_loss = self._adapter.missing_is_loss(self.leader.scope) and not last_per_subject
        if not planned and not last_per_subject:
            self._data_loss_check.check_aged_out(info, first, end, last)
        expiry_allowed_through = self._data_loss_check.expiry_allowed_through(first, end)
        splits = []
        ends = [last] if last_per_subject else await self._split_ends(first, last, min_splits)
        for split_end in ends:
            splits.append(
                Split(
                    stream=end.stream,
                    created=end.created,
                    prefix=self.leader.scope.prefix,
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

    async def _split_ends(self, start: int, end: int, min_splits: int | None) -> list[int]:
        jetstream, info = await self.leader.jetstream(), self.leader.info
        return await self._splitter.split_ends(
            jetstream, info, self._effective_filters(), start, end, min_splits
        )

    # -- the start position of a query ----------------------------------------------------------

    def _effective_filters(self) -> tuple[str, ...]:
        """The filters for requests that count or search messages."""
        return self.leader.scope.effective_filters

    def _consumer_filters(self, last_per_subject: bool) -> tuple[str, ...]:
        """The filters for a reader."""
        scope = self.leader.scope
        return scope.filters or ((scope.match_all,) if last_per_subject else ())

    async def initial_offset(
        self, info: StreamInfo, position: StartPosition | None = None
    ) -> Offset:
        """The start position in the stream that ``info`` describes.

        Args:
            position: by default that of the query.
        """
        jetstream, scope = await self.leader.jetstream(), self.leader.scope
        if scope.silent_removals and self._adapter.last_per_subject:
            # nats-py allows TTLs in every bucket that it creates: no sign that one is used.
            used = set(scope.silent_removals) != {UNMARKED_TTLS}
            (log.warning if used else log.info)(
                "keys can be removed without a marker, so that no row reports it; "
                "nats_stream_source.delta.reconcile removes their rows from a table",
                stream=info.name,
                why=", ".join(scope.silent_removals),
            )
        position = position or self._adapter.start_position
        origin = await resolve_start(jetstream, info, position, scope.filters)
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

    def validate_offset(self, offset: Offset, info: StreamInfo) -> None:
        """Raise OffsetError for an offset of another stream or with other filters."""
        terms = self._adapter.terms
        if offset.stream != info.name:
            raise OffsetError(
                f"could not resume from the checkpoint: it is of stream {offset.stream}, the query "
                f"reads {info.name} ({terms.stream_option}); use the checkpoint's stream or "
                f"another checkpoint location"
            )
        check_filter(self._adapter, offset.filter)

    def _needs_last_per_subject(self, end: Offset, first: int, last: int) -> bool:
        """Whether a range is the initial values of a query that needs ``last_per_subject``."""
        return (
            self._adapter.last_per_subject
            and end.epoch == 0
            and first == end.origin == 0
            and last == end.initial_through
            and self.leader.scope.history != 1
        )

    # -- the end of a micro-batch ---------------------------------------------------------------

    async def _plan_end(
        self, start: Offset, last: int, info: StreamInfo, limit: RangeLimit | None
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
            finder = self._match_finder
            newest = await finder.find_newest(filters, start_seq, last, thorough=self._thorough)
            if newest is None and advance and not finder.is_exhausted(last):
                newest = await finder.find_newest(filters, start_seq, last, thorough=True)
            if newest is None:
                if not advance:
                    return start, start
                empty = await self._offset_at(start, last, None, 0)
                return empty, empty
            end, end_time = newest
        limited_end, rows, total = await self._splitter.limit(
            await self.leader.jetstream(), info, filters, start_seq, end, limit
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
            time = await timestamp_at(await self.leader.jetstream(), self.leader.info, seq)
            if time is None:
                await self.leader.confirm_missing(seq)
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
            jetstream, filters = await self.leader.jetstream(), self._effective_filters()
            count = await self._splitter.count_subjects(jetstream, info, filters)
        end = await self._offset_at(start, through, None, count)
        return end, replace(end, stream_seq=last, consumer_seq=count + last - through)
