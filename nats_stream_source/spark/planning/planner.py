"""The planner: decides the range of the next micro-batch. It runs on the driver.

``spark.planning.stream_planner`` plans the range, ``spark.planning.trigger_delay`` waits for
``minRowsPerTrigger``, ``spark.planning.poll_backoff`` spaces the polls of an idle query. This
module has the state of the query: its start position, decided once per process, and the end of a
run of ``Trigger.AvailableNow``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.spark.formats.base import FormatAdapter
from nats_stream_source.spark.formats.offsets import Offset
from nats_stream_source.spark.formats.splits import Split
from nats_stream_source.spark.planning.poll_backoff import PollBackoff
from nats_stream_source.spark.planning.range_math import RangeLimit
from nats_stream_source.spark.planning.stream_planner import StreamPlanner
from nats_stream_source.spark.planning.trigger_delay import TriggerDelay


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
        self._stream = StreamPlanner(adapter, connection, cores=cores, timer=timer)
        self._leader = self._stream.leader
        self._backoff = PollBackoff(clock, sleep)
        options = adapter.common
        self._limit = RangeLimit(options.max_rows, options.max_bytes)
        self._delay = TriggerDelay(options.min_rows, options.max_trigger_delay, clock)
        self._initial_offset: Offset | None = None
        self._started = False
        self._available_now_end: int | None = None
        self._stream_end: Offset | None = None

    async def initial_offset(self) -> Offset:
        """The start position of a query without a checkpoint; decided once."""
        if self._initial_offset is None:
            info = await self._leader.initial_stream_info()
            self._initial_offset = await self._stream.initial_offset(info)
        return self._initial_offset

    async def prepare_available_now(self) -> None:
        """Fix the last sequence that this run reads (``Trigger.AvailableNow``)."""
        await self.initial_offset()
        self._available_now_end = (await self._leader.stream_info()).last_seq
        self._stream.read_thoroughly()

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
        self._stream.validate_offset(start, info)
        if not self._started and start != self._initial_offset:
            await self._stream.report_resumed(start, info)
        self._started = True
        if start.stream_seq == start.origin and start.epoch == 0:
            await self._leader.validate_filters()
        if self._backoff.is_unchanged(start, info.position):
            return start
        available = self._available_now_end
        last = info.last_seq if available is None else min(info.last_seq, available)
        planned = await self._stream.plan(start, info, last, self._limit if limited else None)
        self._stream_end = planned.stream_end
        rows = planned.rows
        # An end without rows, or after lost data, does not wait.
        waits = limited and available is None and rows > 0 and planned.start == start
        if waits and not self._delay.is_due(rows):
            # The delay ends without a change of the stream.
            self._backoff.record_empty(start, None)
            return start
        if planned.end == start:
            self._backoff.record_empty(start, info.position if planned.exhausted else None)
        else:
            self._backoff.reset()
            self._delay.record()
        return planned.end

    def report_latest_offset(self) -> Offset | None:
        """The stream's end at the last :meth:`latest_offset`, for the lag in Spark's progress."""
        return self._stream_end

    async def tasks(self, start: Offset, end: Offset) -> list[tuple[Split, ...]]:
        """The splits by the task that reads them: one each."""
        return [(split,) for split in await self.splits(start, end)]

    async def splits(self, start: Offset, end: Offset) -> list[Split]:
        """The splits of the range between two offsets; an empty list for an empty range."""
        return await self._stream.splits(start, end)
