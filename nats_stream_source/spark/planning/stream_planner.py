"""Plans the ranges of one stream: their ends and their splits. It runs on the driver.

Every decision uses responses of the stream leader (``STREAM.INFO``, ``STREAM.MSG.GET``).
``spark.planning.limits`` limits the range and cuts it into splits.

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
(``rows.data_loss``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from nats_stream_source.aio.tasks import gather_limited
from nats_stream_source.jetstream.api import max_concurrent_requests
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.subjects import overlap
from nats_stream_source.logs import field_logger
from nats_stream_source.options import StartPosition
from nats_stream_source.rows.base import FormatAdapter, Split, StreamView
from nats_stream_source.rows.data_loss import DataLossCheck, timestamp_at
from nats_stream_source.rows.offsets import Position, range_between
from nats_stream_source.rows.start_position import resolve_start
from nats_stream_source.spark.planning.limits import Limits, RangeLimit
from nats_stream_source.spark.planning.stream_states import warn_of_other_subjects

_FEW_FILTERS = 8  # whose next messages are requested, before their last ones

log = field_logger(__name__)


@dataclass(frozen=True, slots=True)
class PlannedRange:
    """A range that starts at ``start``: empty if ``end`` equals it.

    Attributes:
        info: the stream when the range was planned.
        start: the position that the range follows; of a new epoch after a data loss.
        end: the end under the limit.
        stream_end: the end without a limit.
        whole: whether the range is read as a whole under any limit: the initial values of
            ``last_per_subject``.
    """

    info: StreamInfo
    start: Position
    end: Position
    stream_end: Position
    whole: bool = False

    @property
    def rows(self) -> int:
        """The number of rows up to the stream's end: an estimate."""
        return self.stream_end.consumer_seq - self.start.consumer_seq

    @property
    def bytes_behind(self) -> int:
        """The size of the messages behind the end, estimated by the mean of the stream's."""
        rows = max(0, self.stream_end.consumer_seq - self.end.consumer_seq)
        return rows * self.info.nbytes // max(1, self.info.messages)


class StreamPlanner:
    """Plans the ranges of one stream for one query. Not safe for concurrent calls.

    Attributes:
        found: where a stream begins that is new to the query, until an offset has it.
        deleted_at: the last position, if a stream of this name was deleted.
        last: the last range that was planned.
    """

    def __init__(
        self,
        adapter: FormatAdapter,
        connection: ReusableConnection,
        cores: int,
        clock: Callable[[], float],
    ) -> None:
        self._adapter = adapter
        self.data_loss_check = DataLossCheck(adapter, connection, clock)
        self._limits = Limits(cores)
        self._other_subjects_due = 1.0
        self.found: Position | None = None
        self.deleted_at: Position | None = None
        self.last: PlannedRange | None = None

    def may_have_rows(self, at: Position, info: StreamInfo) -> bool:
        """Whether a range after ``at`` may not be empty, without a request."""
        if self.data_loss_check.waits_for_mirror:
            return True
        if (at.created, at.stream_seq, at.time) == (info.created, info.last_seq, info.last_time):
            return False
        last = self.last
        return last is None or not (last.start == at and self._is_last_end(at, info))

    def _is_last_end(self, at: Position, info: StreamInfo) -> bool:
        """Whether the last range ended at ``at``, and the stream has not changed since."""
        last = self.last
        return last is not None and last.end == at and last.info.position == info.position

    async def plan(
        self,
        view: StreamView,
        start: Position,
        last: int,
        limit: RangeLimit | None,
        *,
        wait: bool = False,
    ) -> PlannedRange:
        """Plan the range from ``start`` up to the stream sequence ``last``.

        Args:
            limit: the limits of the range; None for all messages.
            wait: wait for a mirror that lags, since an empty range would end the run.
        """
        self._other_subjects_due = await warn_of_other_subjects(view, self._other_subjects_due)
        resumed = start
        # A stream with the same messages at both ends as when it planned ``start`` has lost none.
        if not self._is_last_end(start, view.info):
            check = self.data_loss_check
            if wait:
                view = replace(view, info=await check.caught_up(start, view.info))
            position = await check.resume_from(start, view.info)
            if position is None:
                return PlannedRange(view.info, start, start, start)
            resumed = position
        if resumed.epoch != start.epoch:
            self._limits.forget()
        end, stream_end = await self._plan_end(view, resumed, last, limit)
        whole = self._needs_last_per_subject(view, end, resumed.stream_seq, end.stream_seq)
        self.last = PlannedRange(view.info, resumed, end, stream_end, whole)
        return self.last

    async def splits(
        self,
        view: StreamView,
        start: Position,
        end: Position,
        min_splits: int,
        *,
        planned: bool,
    ) -> list[Split]:
        """The splits of the range between two positions; an empty list for an empty range.

        Args:
            planned: whether :meth:`plan` has returned ``end`` for ``view``; else an earlier process
                planned the range.
        """
        info, scope = view.info, view.scope
        first, last = range_between(start, end)
        time = end.time
        # After a restart Spark requests the empty range at the query's position, which loses none.
        if first < last and not planned:
            info = await self.data_loss_check.caught_up(end, info)
            view = replace(view, info=info)
            readable = await self.data_loss_check.readable_end(end, info)
            last, time = readable.stream_seq, readable.time
        if first >= last:
            return []
        last_per_subject = self._needs_last_per_subject(view, end, first, last)
        missing_is_loss = self._adapter.missing_is_loss(scope) and not last_per_subject
        if not planned and not last_per_subject:
            await self.data_loss_check.verify_retained(info, first, end, last)
        expiry_allowed_through = self.data_loss_check.expiry_allowed_through(info.name, first, end)
        ends = [last]
        if not last_per_subject:
            ends = await self._limits.split_ends(view, first, last, min_splits)
        whole = self._adapter.range_request(
            scope, info, first, last, last_per_subject=last_per_subject
        )
        whole = replace(whole, known=KnownStream(end.created, last, time))
        splits = []
        for split_end in ends:
            splits.append(
                Split(
                    range=replace(whole, start=first, end=split_end),
                    initial_through=end.initial_through,
                    required_from=max(first + 1, info.first_seq) if missing_is_loss else None,
                    expiry_allowed_through=expiry_allowed_through,
                )
            )
            first, expiry_allowed_through = split_end, 0
        return splits

    async def initial_position(self, view: StreamView, start: StartPosition | None) -> Position:
        """The position at which a query starts; without ``start`` that of the options."""
        info, scope = view.info, view.scope
        self._adapter.report_silent_removals(info, scope)
        self._other_subjects_due = await warn_of_other_subjects(view, self._other_subjects_due)
        origin = await resolve_start(view, start or self._adapter.start_of(info.name))
        exists = 0 < origin <= info.last_seq
        return Position(
            created=info.created,
            epoch=0,
            origin=origin,
            stream_seq=origin,
            # The timestamp detects a stream that is rolled back before the first row.
            time=await timestamp_at(view.jetstream, info, origin) if exists else None,
            consumer_seq=0,
            initial_through=max(origin, info.last_seq),
        )

    def _needs_last_per_subject(
        self, view: StreamView, end: Position, first: int, last: int
    ) -> bool:
        """Whether a range is the initial values of a query that needs ``last_per_subject``."""
        return (
            self._adapter.last_per_subject
            and end.epoch == 0
            and first == end.origin == 0
            and last == end.initial_through
            and view.scope.history != 1
        )

    # -- the end of a micro-batch ---------------------------------------------------------------

    async def _plan_end(
        self,
        view: StreamView,
        start: Position,
        last: int,
        limit: RangeLimit | None,
    ) -> tuple[Position, Position]:
        """The end of the micro-batch, and the stream's end, both after ``start``."""
        info, start_seq = view.info, start.stream_seq
        if last <= start_seq:
            return start, start
        through = start.initial_through
        if start_seq < through <= last and self._needs_last_per_subject(
            view, start, start_seq, through
        ):
            return await self._initial_values_end(view, start, last)
        newest = await newest_match(view, start_seq, last)
        if newest is None:
            # Retention would pass the offset of a query whose filter rarely matches, a data loss
            # without a lost message. An end without rows costs an empty micro-batch: only once the
            # start lies in the older half of the stream.
            if start_seq - info.first_seq >= last - start_seq:
                return start, start
            empty = await _position_at(view, start, last, None, 0)
            return empty, empty
        end, end_time = newest
        limited_end, rows, total = await self._limits.limit(view, start_seq, end, limit)
        delivered = _delivered(view, start, limited_end, rows)
        time = end_time if limited_end == end else None
        planned = await _position_at(view, start, limited_end, time, delivered)
        if limited_end == end:
            return planned, planned
        consumer_seq = start.consumer_seq + _delivered(view, start, end, total)
        stream_end = replace(start, stream_seq=end, time=end_time, consumer_seq=consumer_seq)
        return planned, stream_end

    async def _initial_values_end(
        self, view: StreamView, start: Position, last: int
    ) -> tuple[Position, Position]:
        through = start.initial_through
        count = view.info.subjects
        if self._adapter.user_filters:
            count = await self._limits.count_subjects(view)
        end = await _position_at(view, start, through, None, count)
        return end, replace(end, stream_seq=last, consumer_seq=count + last - through)


async def newest_match(view: StreamView, start: int, last: int) -> tuple[int, str | None] | None:
    """The last message in ``(start, last]`` that matches the filters of the query, if it has some.

    A range that ends with a matching message ends when that is read; any other sequence is an end
    too, at the next idle heartbeat. The newest message alone often decides. Otherwise the leader is
    requested for each filter's next message after ``start``, and where that exists for its last
    one: a request for the last message of a wide filter without a match searches the whole stream.
    Of many filters none is wide, so only their last messages are requested.

    Returns:
        its sequence and timestamp; ``last`` without a timestamp where a filter's last message lies
        beyond; None if no message matches.

    Raises:
        RequestTimeoutError: no match was found, and the responding server may not be the stream
            leader any more.
    """
    jetstream, stream, filters = view.jetstream, view.info.name, view.scope.effective_filters
    if not filters:
        return last, view.info.last_time if last == view.info.last_seq else None
    newest = await jetstream.message(stream, seq=last)
    if newest is not None and any(overlap(newest.subject, one) for one in filters):
        return last, newest.time

    async def newest_of(subject_filter: str) -> tuple[int, str | None]:
        if len(filters) <= _FEW_FILTERS:
            following = await jetstream.message(stream, seq=start + 1, next_by_subj=subject_filter)
            if following is None or following.seq > last:
                return 0, None
        message = await jetstream.message(stream, last_by_subj=subject_filter)
        return (0, None) if message is None else (message.seq, message.time)

    found = await gather_limited(newest_of, filters, max_concurrent_requests(jetstream))
    seq, time = max(found, key=lambda one: one[0])
    if seq <= start:
        await view.verify_missing(last)
        return None
    return (seq, time) if seq <= last else (last, None)


async def _position_at(
    view: StreamView, start: Position, seq: int, time: str | None, delivered: int
) -> Position:
    """The position at ``seq``; ``time`` is the timestamp of its message, None if unknown."""
    if time is None:
        time = await timestamp_at(view.jetstream, view.info, seq)
        if time is None:
            await view.verify_missing(seq)
    consumer_seq = start.consumer_seq + delivered
    return replace(start, stream_seq=seq, time=time, consumer_seq=consumer_seq)


def _delivered(view: StreamView, start: Position, seq: int, rows: int) -> int:
    """The number of messages that a consumer without lag receives in ``(start, seq]``.

    That is the remaining initial values, and every later message, superseded ones included: known
    exactly where every message matches.
    """
    if view.scope.effective_filters:
        return rows
    initial = max(0, min(seq, start.initial_through) - start.stream_seq)
    later = seq - max(start.stream_seq, start.initial_through)
    return min(initial, rows) + max(0, later)
