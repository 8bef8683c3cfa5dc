"""The planner of a query of several streams. It runs on the driver.

One poll requests the states of all streams (``spark.planning.stream_states``). Where a stream has
changed, its own planner plans its range (``spark.planning.stream_planner``), as for a query of that
stream alone: initial values, End-Of-Initial-Data and data loss belong to each stream. The limits of
a micro-batch are shared by the rows that are available in each
(``spark.planning.range_shares``). The last messages of each subject, with which a query of a bucket
with history starts, cannot be cut: such a range is in one micro-batch as a whole, and the others
share the rest.

The streams of a query change. A stream that is new to the query begins where the query begins; if
it was created after the query, with its first message. A stream that the options no longer select
is left out, which is logged. A stream that was deleted is a data loss: an error with
``failOnDataLoss``, else it is left out, and one of the same name is new to the query.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace

from nats_stream_source.aio.tasks import gather_limited
from nats_stream_source.errors import OffsetError, StreamNotFoundError
from nats_stream_source.jetstream.api import StreamInfo
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.logs import field_logger
from nats_stream_source.options import DeliverPolicy, StartPosition
from nats_stream_source.spark.data_loss_report import report_data_loss
from nats_stream_source.spark.formats.base import FormatAdapter
from nats_stream_source.spark.formats.multi_stream_offset import NO_STREAM_YET, MultiStreamOffset
from nats_stream_source.spark.formats.offsets import Offset
from nats_stream_source.spark.formats.splits import Split
from nats_stream_source.spark.planning.leader import MAX_STREAMS, validate_filters
from nats_stream_source.spark.planning.poll_backoff import PollBackoff
from nats_stream_source.spark.planning.range_math import RangeLimit
from nats_stream_source.spark.planning.range_shares import (
    NOTHING,
    Demand,
    group_splits,
    share_limits,
)
from nats_stream_source.spark.planning.stream_planner import (
    PlannedRange,
    StreamPlanner,
    check_filter,
)
from nats_stream_source.spark.planning.stream_states import StreamStates
from nats_stream_source.spark.planning.trigger_delay import TriggerDelay

log = field_logger(__name__)

_FROM_FIRST = StartPosition(DeliverPolicy.ALL)


class MultiStreamPlanner:
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
        assert adapter.stream_set is not None
        self._adapter = adapter
        self._set = adapter.stream_set
        self._connection = connection
        self._states = StreamStates(adapter, connection, clock)
        self._cores = cores or os.cpu_count() or 1
        self._timer = timer
        self._backoff = PollBackoff(clock, sleep)
        options = adapter.common
        self._min_partitions = options.min_partitions or 1
        self._limit = RangeLimit(options.max_rows, options.max_bytes)
        self._delay = TriggerDelay(options.min_rows, options.max_trigger_delay, clock)
        self._planners: dict[str, StreamPlanner] = {}
        self._found: dict[str, Offset] = {}  # where streams begin that no offset has yet
        self._idle: dict[str, tuple[Offset, tuple[object, ...]]] = {}  # empty plans, by stream
        self._initial_offset: MultiStreamOffset | None = None
        self._available_now: dict[str, int] | None = None
        self._stream_end: MultiStreamOffset | None = None
        self._started = False
        self._turn = 0

    # -- the calls of Spark ---------------------------------------------------------------------

    async def initial_offset(self) -> MultiStreamOffset:
        """The start positions of a query without a checkpoint; decided once.

        Raises:
            BucketNotFoundError, StreamNotFoundError: a listed name does not exist.
            ConfigurationError: no stream has a subject that the filters match.
        """
        if self._initial_offset is None:
            infos = await self._states.poll(())
            await self._states.check_listed(infos)
            await self._check_filters(infos)
            times = [info.now for info in infos.values() if info.now is not None]
            self._initial_offset = MultiStreamOffset(
                started=max(times, key=nanoseconds, default=NO_STREAM_YET),
                filter=self._adapter.user_filters,
                streams=await self._begin(infos, None),
            )
        return self._initial_offset

    async def prepare_available_now(self) -> None:
        """Fix the last sequences that this run reads (``Trigger.AvailableNow``)."""
        infos = await self._states.poll(())
        self._available_now = {name: info.last_seq for name, info in infos.items()}

    async def latest_offset(
        self, start: MultiStreamOffset, *, limited: bool = True
    ) -> MultiStreamOffset:
        """The end of the micro-batch that starts at ``start``; ``start`` if it is empty.

        After an empty poll it may wait before it polls again.

        Args:
            limited: whether ``maxRowsPerTrigger``, ``maxBytesPerTrigger`` and
                ``minRowsPerTrigger`` apply.

        Raises:
            DataLossError: with ``failOnDataLoss``; the error names the stream.
            OffsetError: an offset of another query.
        """
        if not await self._backoff.wait_until_due(start):
            return start
        self._validate(start)
        infos = await self._states.poll({**start.streams, **self._found})
        state = {name: info.position for name, info in infos.items()}
        requests = self._states.requests
        if self._backoff.is_unchanged(start, state, requests):
            return start
        base = await self._present(start, infos)
        if not self._started and start != self._initial_offset:
            await self._report_resumed(base, infos)
        self._started = True
        planned = await self._plan(base, infos, limited)
        rows = sum(one.rows for one in planned.values())
        lost = any(one.start != base.streams[name] for name, one in planned.items())
        waits = limited and self._available_now is None and rows > 0 and not lost
        if waits and not self._delay.is_due(rows):
            # The delay ends without a change of a stream.
            self._backoff.record_empty(start, None, requests)
            return start
        ends = {name: one.end for name, one in planned.items()}
        stream_ends = {name: one.stream_end for name, one in planned.items()}
        self._stream_end = replace(base, streams={**base.streams, **stream_ends})
        end = replace(base, streams={**base.streams, **ends})
        if end == start:
            exhausted = all(one.exhausted for one in planned.values())
            self._backoff.record_empty(start, state if exhausted else None, requests)
            return start
        self._backoff.reset()
        self._delay.record()
        return end

    def report_latest_offset(self) -> MultiStreamOffset | None:
        """The streams' ends at the last :meth:`latest_offset`, for the lag in the progress."""
        return self._stream_end

    async def tasks(
        self, start: MultiStreamOffset, end: MultiStreamOffset
    ) -> list[tuple[Split, ...]]:
        """The splits of the ranges between two offsets, by the task that reads them.

        Raises:
            DataLossError: a stream of ``end`` does not exist, with ``failOnDataLoss``.
        """
        self._validate(start)
        self._validate(end)
        ranges = {
            # A stream that the start lacks begins at its origin.
            name: (start.streams.get(name) or replace(at, stream_seq=at.origin, consumer_seq=0), at)
            for name, at in end.streams.items()
            if start.streams.get(name) != at
        }
        rows = {
            name: max(0, last.consumer_seq - first.consumer_seq)
            for name, (first, last) in ranges.items()
        }
        total = max(1, sum(rows.values()))

        async def plan(name: str) -> list[Split]:
            first, last = ranges[name]
            min_splits = max(1, self._min_partitions * rows[name] // total)
            try:
                return await self._planner(name).splits(first, last, min_splits)
            except StreamNotFoundError:
                self._report_deleted(name, first)
                return []

        names = list(ranges)
        planned = await gather_limited(plan, names, MAX_STREAMS)
        splits, weights = [], []
        for name, of_stream in zip(names, planned, strict=True):
            splits += of_stream
            weights += [rows[name] // max(1, len(of_stream))] * len(of_stream)
        if not splits:
            return []
        groups = group_splits(weights, at_least=self._min_partitions, cores=self._cores)
        return [tuple(splits[index] for index in group) for group in groups]

    # -- the streams of the query ---------------------------------------------------------------

    def _planner(self, name: str) -> StreamPlanner:
        if name not in self._planners:
            self._planners[name] = StreamPlanner(
                self._adapter, self._connection, name, self._cores, self._timer
            )
        return self._planners[name]

    def _validate(self, offset: MultiStreamOffset) -> None:
        adapter = self._adapter
        check_filter(adapter, offset.filter)
        if offset.streams and not any(map(adapter.selects, offset.streams)):
            names = sorted(offset.streams)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise OffsetError(
                f"could not resume from the checkpoint: it is of {', '.join(names[:3])}{more}, "
                f"and {self._set} selects none of them; use the same option or another checkpoint "
                f"location"
            )

    async def _check_filters(self, infos: Mapping[str, StreamInfo]) -> None:
        leaders = [self._planner(name).leader for name in infos]
        for leader, info in zip(leaders, infos.values(), strict=True):
            leader.accept(info)
        await validate_filters(leaders)

    async def _begin(
        self, infos: Mapping[str, StreamInfo], started: str | None
    ) -> dict[str, Offset]:
        """Where streams begin that are new to the query.

        Args:
            started: the time at which the query started; None if it starts now.
        """

        async def begin(name: str) -> Offset | None:
            info = infos[name]
            later = started is not None and nanoseconds(info.created) > nanoseconds(started)
            skips = self._adapter.start_position.policy in (DeliverPolicy.NEW, DeliverPolicy.LAST)
            planner = self._planner(name)
            planner.leader.accept(info)
            try:
                return await planner.initial_offset(info, _FROM_FIRST if later and skips else None)
            except StreamNotFoundError:
                return None  # deleted since the poll

        names = list(infos)
        offsets = await gather_limited(begin, names, MAX_STREAMS)
        return {
            name: offset for name, offset in zip(names, offsets, strict=True) if offset is not None
        }

    async def _present(
        self, start: MultiStreamOffset, infos: Mapping[str, StreamInfo]
    ) -> MultiStreamOffset:
        """``start`` with the streams that exist and that the options select."""
        streams: dict[str, Offset] = {}
        for name, at in start.streams.items():
            if not self._adapter.selects(name):
                self._states.report_not_selected(name)
            elif name not in infos:
                self._report_deleted(name, at)
            else:
                streams[name] = at
        started = start.started
        if started is None:
            times = [info.now for info in infos.values() if info.now is not None]
            started = max(times, key=nanoseconds, default=None)
        new = {name: info for name, info in infos.items() if name not in streams}
        must_exist = self._adapter.common.fail_on_data_loss and self._initial_offset is None
        await self._states.check_listed(infos, must_exist=must_exist)
        for name in self._found.keys() - new.keys():
            del self._found[name]
        unknown = {
            name: info
            for name, info in new.items()
            if name not in self._found or self._found[name].created != info.created
        }
        found = await self._begin(unknown, started)
        for name, at in found.items():
            log.info("stream found", stream=name, after=at.origin)
        self._found |= found
        streams |= {name: self._found[name] for name in new if name in self._found}
        return replace(start, started=started, streams=dict(sorted(streams.items())))

    async def _report_resumed(
        self, base: MultiStreamOffset, infos: Mapping[str, StreamInfo]
    ) -> None:
        """Log that start options do not apply: for one stream, which stands for all."""
        for name, at in list(base.streams.items())[:1]:
            planner = self._planner(name)
            planner.leader.accept(infos[name])
            with contextlib.suppress(StreamNotFoundError):  # the next poll reports it
                await planner.report_resumed(at, infos[name])

    def _report_deleted(self, name: str, at: Offset) -> None:
        sequence = self._adapter.terms.sequence
        self._idle.pop(name, None)
        self._planners.pop(name, None)
        report_data_loss(
            self._adapter,
            name,
            f"stream was deleted: it does not exist, expected it with the messages after "
            f"{sequence} {at.stream_seq}",
            "continue without it",
        )

    # -- the ends of a micro-batch --------------------------------------------------------------

    async def _plan(
        self, base: MultiStreamOffset, infos: Mapping[str, StreamInfo], limited: bool
    ) -> dict[str, PlannedRange]:
        """The ranges of the streams that may have changed."""
        changed = [
            name for name, at in base.streams.items() if self._may_have_rows(at, infos[name])
        ]
        planned = await self._plan_each(changed, base, infos, dict.fromkeys(changed))
        for name, one in planned.items():
            if one.end == base.streams[name] and one.exhausted:
                self._idle[name] = (one.end, infos[name].position)
            else:
                self._idle.pop(name, None)
        if not limited or self._limit == RangeLimit(None):
            return planned
        limits = self._shared_limits(planned, infos)
        return await self._plan_each(planned, base, infos, limits, planned)

    def _may_have_rows(self, at: Offset, info: StreamInfo) -> bool:
        if (at.created, at.stream_seq, at.time) == (info.created, info.last_seq, info.last_time):
            return False
        return self._idle.get(info.name) != (at, info.position)

    async def _plan_each(
        self,
        names: Iterable[str],
        base: MultiStreamOffset,
        infos: Mapping[str, StreamInfo],
        limits: Mapping[str, RangeLimit | None],
        unlimited: Mapping[str, PlannedRange] | None = None,
    ) -> dict[str, PlannedRange]:
        """The ranges under ``limits``; those of ``unlimited`` where a limit cannot apply."""

        async def plan(name: str) -> PlannedRange:
            start, info, limit = base.streams[name], infos[name], limits[name]
            if unlimited is not None:
                whole = unlimited[name]
                if limit is None or whole.end == start:
                    return whole
                if limit == NOTHING:
                    return replace(whole, end=start)
                start = whole.start
            planner = self._planner(name)
            planner.leader.accept(info)
            last = info.last_seq
            if self._available_now is not None:
                planner.read_thoroughly()
                # A stream that was found later is read by the next run.
                last = min(last, self._available_now.get(name, start.stream_seq))
            try:
                ranged = await planner.plan(start, info, last, limit)
            except StreamNotFoundError:
                # Deleted since the poll: the next one reports it.
                return PlannedRange(start, start, start, exhausted=False, whole=False)
            return ranged if unlimited is None else replace(ranged, start=unlimited[name].start)

        ordered = list(names)
        ranges = await gather_limited(plan, ordered, MAX_STREAMS)
        return dict(zip(ordered, ranges, strict=True))

    def _shared_limits(
        self, planned: Mapping[str, PlannedRange], infos: Mapping[str, StreamInfo]
    ) -> dict[str, RangeLimit | None]:
        """The share of each stream in the limits of a micro-batch; None for a range as a whole."""
        demands = [
            Demand(
                one.rows, one.rows * infos[name].nbytes / max(1, infos[name].messages), one.whole
            )
            for name, one in planned.items()
        ]
        limits = share_limits(self._limit, demands, self._turn)
        self._turn = (self._turn + sum(limit != NOTHING for limit in limits)) % max(1, len(limits))
        return dict(zip(planned, limits, strict=True))
