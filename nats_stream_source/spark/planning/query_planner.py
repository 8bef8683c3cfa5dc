"""The planner of a query: decides the range of the next micro-batch. It runs on the driver.

One poll requests the states of all streams of the query (``spark.planning.stream_states``). Where a
stream has changed, its own planner plans its range (``spark.planning.stream_planner``): initial
values, End-Of-Initial-Data and data loss belong to each stream. A query of one stream is the case
with one entry: its offsets have format 1, and its stream must exist.

With several streams, the limits are shared by the rows that are available in each
(``spark.planning.limits``). The last messages of each subject, with which a query of a bucket
with history starts, cannot be cut: such a range is in one micro-batch as a whole, and the others
share the rest. The streams may change. A stream that is new to the query begins where the query
begins; if it was created after the query, with its first message. A stream that the options no
longer select is left out, which is logged. A stream that was deleted is a data loss: an error with
``failOnDataLoss``, else it is left out. A restore deletes the stream first, so the planner keeps
the position: a stream of the same name with the same messages continues there, another is new.

:class:`PollBackoff`: Spark calls an idle query every 10 ms. A poll costs the planner a millisecond
of a core and the server a third of one, and Spark's call itself costs time. So the planner waits
for the next poll inside of Spark's call, and polls become rarer while the stream is unchanged: the
interval is a hundredth of the time since the last change, at least 20 ms and at most 250 ms. While
other subjects receive messages that the query does not read, the planner waits ten times as long
as the last poll took, at most 100 ms. A poll of many streams consists of several requests: there
are at most five requests in a second.

A query with ``minRowsPerTrigger`` reads nothing until so many rows are
available, or until ``maxTriggerDelay`` seconds have passed since its last micro-batch. The first
micro-batch of a run does not wait, as with Spark's Kafka source (``minOffsetsPerTrigger``): a query
that was stopped for a while catches up at once. ``Trigger.AvailableNow`` and ``Trigger.Once`` do
not wait either.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from nats_stream_source.aio.tasks import gather_limited
from nats_stream_source.errors import StreamNotFoundError
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.logs import field_logger
from nats_stream_source.options import DeliverPolicy, StartPosition
from nats_stream_source.rows.base import FormatAdapter, Split, StreamView
from nats_stream_source.rows.data_loss import report_data_loss
from nats_stream_source.rows.offsets import NO_STREAM_YET, ONE_STREAM, Offset, Position
from nats_stream_source.rows.start_position import report_ignored_start
from nats_stream_source.spark.planning.limits import (
    NOTHING,
    Demand,
    RangeLimit,
    next_first,
    plan_tasks,
    share_limits,
)
from nats_stream_source.spark.planning.stream_planner import PlannedRange, StreamPlanner
from nats_stream_source.spark.planning.stream_states import (
    MAX_STREAMS,
    StreamStates,
    verify_filters,
)

_MIN_INTERVAL = 0.02  # seconds between two polls
_MAX_INTERVAL = 0.25
_SHARE_OF_SILENCE = 0.01
_MAX_INTERVAL_UNDER_WRITES = 0.1
_INTERVAL_PER_POLL_TIME = 10
_INTERVAL_PER_REQUEST = 0.2  # seconds, of polls with several requests
_POLLING = 0.05  # seconds between two calls of Spark when the query has no other source


class PollBackoff:
    """When the next poll is due, and the stream's state at the last one."""

    def __init__(
        self, clock: Callable[[], float], sleep: Callable[[float], Awaitable[None]]
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._empty_at: object = None
        self._last_state: object = None
        self._silent_since = 0.0
        self._returned_at = 0.0
        self._polled_at = 0.0
        self._due = 0.0

    async def wait_until_due(self, start: object) -> bool:
        """Wait until a poll from ``start`` is due; return at once unless the last one was empty.

        Returns False without a wait if the poll is not due and Spark did other work since its last
        call, for example for another source of the same query, which must not wait for this one.
        """
        now = self._clock()
        remaining = self._due - now if start == self._empty_at else 0.0
        if remaining > 0:
            if now - self._returned_at > _POLLING:
                self._returned_at = now
                return False
            await self._sleep(remaining)
        self._polled_at = self._clock()
        return True

    def is_unchanged(self, start: object, state: object, requests: int = 1) -> bool:
        """Whether the state, after so many requests, is that of the empty poll from ``start``."""
        if self._last_state is None or start != self._empty_at or state != self._last_state:
            return False
        silence = self._clock() - self._silent_since
        self._wait(silence * _SHARE_OF_SILENCE, _MAX_INTERVAL, requests)
        return True

    def record_empty(self, start: object, state: object, requests: int = 1) -> None:
        """Record a poll that found no message after ``start``.

        Args:
            state: the state of the stream or streams that the poll covered; None if the next one
                may find more without a change of it (a delay, a mirror that lags).
        """
        self._empty_at, self._last_state = start, state
        self._silent_since = now = self._clock()
        interval = _INTERVAL_PER_POLL_TIME * (now - self._polled_at)
        self._wait(interval, _MAX_INTERVAL_UNDER_WRITES, requests)

    def _wait(self, interval: float, longest: float, requests: int) -> None:
        self._returned_at = now = self._clock()
        slowest = _INTERVAL_PER_REQUEST * requests if requests > 1 else 0.0
        self._due = now + max(min(max(interval, _MIN_INTERVAL), longest), slowest)

    def reset(self) -> None:
        """Record a poll that found messages."""
        self._empty_at = None


log = field_logger(__name__)

Views = Mapping[str, StreamView]
"""The streams of one poll, by name."""

_FROM_FIRST = StartPosition(DeliverPolicy.ALL)
_SKIPPING = (DeliverPolicy.NEW, DeliverPolicy.LAST, DeliverPolicy.BY_START_SEQUENCE)


class QueryPlanner:
    """Plans the micro-batches of one query. Spark calls it from one thread.

    Args:
        clock, sleep: the time in seconds, and a wait of some; tests replace both.
        cores: the number of tasks that run in parallel; by default the driver's cores.
    """

    def __init__(
        self,
        adapter: FormatAdapter,
        connection: ReusableConnection,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        cores: int | None = None,
    ) -> None:
        self._adapter = adapter
        self._set = adapter.stream_set
        self._connection = connection
        self._states = StreamStates(adapter, connection, clock)
        self._cores = cores or os.cpu_count() or 1
        self._clock = clock
        self._backoff = PollBackoff(clock, sleep)
        options = adapter.options.common
        self._min_partitions = options.min_partitions or 1
        self._limit = RangeLimit(options.max_rows_per_trigger, options.max_bytes_per_trigger)
        self._last_trigger: float | None = None
        # A query of several streams continues without one that is deleted after a poll.
        gone = () if self._set is None else (StreamNotFoundError,)
        self._deleted: tuple[type[StreamNotFoundError], ...] = gone
        self._streams: dict[str, StreamPlanner] = {}
        self._initial_offset: Offset | None = None
        self._available_now: dict[str, StreamInfo] | None = None
        self.stream_end: Offset | None = None  # at the last `latest_offset`, for the lag
        self.bytes_behind: dict[str, int] = {}  # estimated, of the last ends that were planned
        self._started = False
        self._first = ""  # the stream that comes first in the limits of the next micro-batch

    # -- the calls of Spark ---------------------------------------------------------------------

    async def initial_offset(self) -> Offset:
        """The start positions of a query without a checkpoint; decided once."""
        if self._initial_offset is None:
            # The initial values of a run of Trigger.AvailableNow end where the run ends.
            if (ends := self._available_now) is None:
                views = await self._states.first_poll()
            else:
                views = {name: await self._states.reuse(info) for name, info in ends.items()}
            await self._states.verify_listed(views)
            positions, filters = await self._begin(views, None), self._adapter.user_filters
            if self._set is None:
                self._initial_offset = Offset(positions, filters, ONE_STREAM)
            else:
                now = _server_time(views) or NO_STREAM_YET
                self._initial_offset = Offset(positions, filters, started=now)
        return self._initial_offset

    async def prepare_available_now(self) -> None:
        """Fix the last sequences that this run reads (``Trigger.AvailableNow``)."""
        views = await self._states.first_poll()
        self._available_now = {name: view.info for name, view in views.items()}

    async def latest_offset(self, start: Offset, *, limited: bool = True) -> Offset:
        """The end of the micro-batch that starts at ``start``; ``start`` if it is empty.

        After an empty poll it may wait before it polls again.

        Args:
            limited: whether the limits and ``minRowsPerTrigger`` apply.
        """
        if not await self._backoff.wait_until_due(start):
            return start
        await self._states.verify(start)
        found = [name for name, stream in self._streams.items() if stream.found is not None]
        views = await self._states.poll([*start.streams, *found])
        state = {name: view.info.position for name, view in views.items()}
        requests = self._states.requests
        if self._backoff.is_unchanged(start, state, requests):
            return start
        base = start if self._set is None else await self._present(start, views)
        if not self._started:
            if start == self._initial_offset:
                await verify_filters(self._adapter, views.values())
            else:
                await self._report_resumed(base, views)
            self._started = True
        planned = await self._plan(base, views, limited)
        self.stream_end = _moved(base, {name: one.stream_end for name, one in planned.items()})
        behind = {name: one.bytes_behind for name, one in planned.items()}
        self.bytes_behind = {name: size for name, size in behind.items() if size}
        rows = sum(one.rows for one in planned.values())
        # An end without rows, or after lost data, does not wait.
        lost = any(one.start != base.streams[name] for name, one in planned.items())
        waits = limited and self._available_now is None and rows > 0 and not lost
        if waits and self._delays(rows):
            # The delay ends without a change of a stream.
            self._backoff.record_empty(start, None, requests)
            return start
        end = _moved(base, {name: one.end for name, one in planned.items()})
        if end == start:
            # Not settled: a mirror is waited for, or a stream was away when it was planned.
            settled = all(self._stream(name).last is one for name, one in planned.items())
            self._backoff.record_empty(start, state if settled else None, requests)
            return start
        self._backoff.reset()
        self._last_trigger = self._clock()
        return end

    def _delays(self, rows: int) -> bool:
        """Whether a micro-batch of so many rows waits for more of them."""
        options, last = self._adapter.options.common, self._last_trigger
        if last is None or rows >= (options.min_rows_per_trigger or 0):
            return False
        return self._clock() - last < options.max_trigger_delay

    async def tasks(self, start: Offset, end: Offset) -> list[tuple[Split, ...]]:
        """The splits of the ranges between two offsets, by the task that reads them."""
        await self._states.verify(start)
        await self._states.verify(end)
        ranges = {
            name: (start.streams.get(name) or at.at_origin(), at)
            for name, at in end.streams.items()
            if start.streams.get(name) != at
        }
        rows = {
            name: max(1, last.consumer_seq - first.consumer_seq)
            for name, (first, last) in ranges.items()
        }

        async def plan(name: str, min_splits: int) -> list[tuple[Split, int]]:
            try:
                splits = await self._splits(name, *ranges[name], min_splits)
            except self._deleted:
                self._report_deleted(name, ranges[name][0])
                return []
            return [(split, rows[name] // len(splits)) for split in splits]

        return await plan_tasks(rows, plan, min_partitions=self._min_partitions, cores=self._cores)

    async def _splits(
        self, name: str, first: Position, last: Position, min_splits: int
    ) -> list[Split]:
        stream = self._stream(name)
        if planned := stream.last is not None and stream.last.end == last:
            view = await self._states.reuse(stream.last.info)
        else:
            view = await self._states.request(name)
        return await stream.splits(view, first, last, min_splits, planned=planned)

    # -- the streams of the query ---------------------------------------------------------------

    def _stream(self, name: str) -> StreamPlanner:
        if name not in self._streams:
            self._streams[name] = StreamPlanner(
                self._adapter, self._connection, self._cores, self._clock
            )
        return self._streams[name]

    async def _begin(self, views: Views, started: str | None) -> dict[str, Position]:
        """Where streams begin that are new to the query, or continue after a restore.

        The query started at ``started``; None if it starts now.
        """

        async def begin(name: str) -> Position | None:
            view = views[name]
            later = started is not None and nanoseconds(view.info.created) > nanoseconds(started)
            skips = self._adapter.start_of(name).policy in _SKIPPING
            start = _FROM_FIRST if later and skips else None
            stream = self._stream(name)
            at = stream.deleted_at
            try:
                restored = at and await stream.data_loss_check.restored_position(at, view.info)
                return restored or await stream.initial_position(view, start)
            except self._deleted:
                return None

        names = list(views)
        positions = await gather_limited(begin, names, MAX_STREAMS)
        return {name: at for name, at in zip(names, positions, strict=True) if at is not None}

    async def _present(self, start: Offset, views: Views) -> Offset:
        """``start`` with the streams that exist and that the options select."""
        streams: dict[str, Position] = {}
        for name, at in start.streams.items():
            if not self._adapter.selects(name):
                option = str(self._set)
                self._states.warn_once("stream is not read any more", stream=name, option=option)
            elif name not in views:
                self._report_deleted(name, at)
            else:
                streams[name] = at
        started = start.started or _server_time(views)
        new = {name: view for name, view in views.items() if name not in streams}
        must_exist = self._adapter.options.common.fail_on_data_loss and self._initial_offset is None
        await self._states.verify_listed(views, must_exist=must_exist)
        for name, stream in self._streams.items():
            if stream.found and (name not in new or stream.found.created != new[name].info.created):
                stream.found = None
        unknown = {name: view for name, view in new.items() if not self._stream(name).found}
        for name, at in (await self._begin(unknown, started)).items():
            log.info("stream found", stream=name, after=at.origin)
            self._stream(name).found = at
        streams |= {name: found for name in new if (found := self._stream(name).found)}
        return Offset(dict(sorted(streams.items())), start.filter, started=started)

    async def _report_resumed(self, base: Offset, views: Views) -> None:
        """Log that start options do not apply: for one stream, which stands for all."""
        with contextlib.suppress(*self._deleted):  # the next poll reports it
            for name, at in list(base.streams.items())[:1]:
                await report_ignored_start(views[name], self._adapter, at)

    def _report_deleted(self, name: str, at: Position) -> None:
        sequence = self._adapter.terms.sequence
        self._streams.pop(name, None)
        report_data_loss(
            self._adapter,
            name,
            f"stream was deleted: it does not exist, expected it with the messages after "
            f"{sequence} {at.stream_seq}",
            "continue without it until it is restored",
        )
        self._stream(name).deleted_at = at

    # -- the ends of a micro-batch --------------------------------------------------------------

    async def _plan(self, base: Offset, views: Views, limited: bool) -> dict[str, PlannedRange]:
        """The ranges of the streams that may have changed."""
        starts = {
            name: at
            for name, at in base.streams.items()
            if self._stream(name).may_have_rows(at, views[name].info)
        }
        limited = limited and self._limit != RangeLimit(None)
        # One stream takes all of the limit. Of several, all is planned before it is shared.
        alone = self._limit if limited and len(starts) == 1 else None
        planned = await self._plan_each(starts, views, dict.fromkeys(starts, alone))
        if not limited or len(starts) <= 1:
            return planned
        demands = {
            name: Demand(one.rows, one.rows * one.info.mean_size, one.whole)
            for name, one in planned.items()
        }
        limits = share_limits(self._limit, demands, self._first)
        self._first = next_first(limits, self._first)
        again = {
            name: one.start
            for name, one in planned.items()
            if limits[name] not in (None, NOTHING) and one.end != starts[name]
        }
        shortened = await self._plan_each(again, views, limits)
        for name in planned:
            if limits[name] == NOTHING:
                planned[name] = replace(planned[name], end=starts[name])
            elif name in shortened:
                planned[name] = replace(shortened[name], start=planned[name].start)
        return planned

    async def _plan_each(
        self,
        starts: Mapping[str, Position],
        views: Views,
        limits: Mapping[str, RangeLimit | None],
    ) -> dict[str, PlannedRange]:
        run_ends = self._available_now

        async def plan(name: str) -> PlannedRange:
            view, start, last = views[name], starts[name], views[name].info.last_seq
            if run_ends is not None:
                # A stream that was found later is read by the next run.
                last = min(last, run_ends[name].last_seq if name in run_ends else start.stream_seq)
            try:
                # A run ends at its first empty micro-batch.
                return await self._stream(name).plan(
                    view, start, last, limits[name], wait=run_ends is not None
                )
            except self._deleted:
                return PlannedRange(view.info, start, start, start)

        ranges = await gather_limited(plan, list(starts), MAX_STREAMS)
        return dict(zip(starts, ranges, strict=True))


def _moved(base: Offset, positions: Mapping[str, Position]) -> Offset:
    return replace(base, streams={**base.streams, **positions})


def _server_time(views: Views) -> str | None:
    """The latest time that a response names."""
    times = [view.info.now for view in views.values() if view.info.now is not None]
    return max(times, key=nanoseconds, default=None)
