"""How a follower keeps its table equal to a bucket: reading, commits, start.

**Reading.** One endless ordered consumer at the stream leader
(:mod:`nats_stream_source.rows.endless`) delivers messages, which wait for the next commit. With 64
MiB of them the reader pauses, and the server's flow control stops the deliveries.

**Commits.** A thread makes rows of what has arrived since the last commit, all at once: a batch of
one message costs as much as one of hundreds. It merges the rows at the times of :mod:`pace`, and
commits the position behind them. Reading goes on meanwhile. Entries that change no row make no
commit. The position is then committed alone once it is 60 s behind, before the stream removes the
messages after it, and at the end.

**Start.** With a position in the table, the stream is compared with it
(:mod:`nats_stream_source.rows.data_loss`), and reading goes on exactly there. Without one, the
initial values are read. When they are complete, the rows of keys that were not among them are
compared with the bucket, as ``reconcile`` does, and the first position is committed: until then a
restart begins again, and merges the same rows without a change.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import pyarrow as pa

from nats_stream_source.aio.tasks import cancel_and_wait, run_to_completion, wait_cancellable
from nats_stream_source.delta.driver.position import order
from nats_stream_source.delta.follower.pace import FollowProgress, Pace
from nats_stream_source.delta.follower.table import FollowedTable
from nats_stream_source.delta.merge_result import MergeResult
from nats_stream_source.errors import ConfigurationError
from nats_stream_source.jetstream.kv.bucket import (
    bucket_errors,
    bucket_stream_info,
    stream_info_with_revision,
)
from nats_stream_source.jetstream.reusable_connection import SharedConnection
from nats_stream_source.jetstream.stream_identity import (
    Identity,
    KnownStream,
    StreamChangedError,
    compare,
)
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.times import nanoseconds, rfc3339
from nats_stream_source.logs import field_logger
from nats_stream_source.options import DeliverPolicy
from nats_stream_source.rows.base import StreamView
from nats_stream_source.rows.data_loss import (
    DataLossCheck,
    SequenceGapTracker,
    report_aged_out,
    timestamp_at,
)
from nats_stream_source.rows.endless import EndlessRead
from nats_stream_source.rows.formats import KvFormat
from nats_stream_source.rows.offsets import Position
from nats_stream_source.rows.start_position import resolve_start
from nats_stream_source.wire.consumer.deliveries import Deliveries

_T = TypeVar("_T")

_log = field_logger(__name__)

_WAITING_BYTES = 64 << 20
_POLL_INTERVAL = 2.0  # seconds between two requests of the stream's state
_STOP_TIMEOUT = 2.0  # seconds
_END_TIMEOUT = 10.0  # seconds until the tasks have ended
_POSITION_LAG = 60.0  # seconds until a position without rows is committed


class _StoppedError(Exception):
    """The follower was stopped while it waited for a server."""


class Run:
    """The follower from one start to its end, or until it begins again.

    Args:
        thread: calls the table's methods.
        stop: is set to end the run.
        once: whether the run ends when the table has what the bucket had at the start.
        reconcile: whether all rows are compared with the bucket first.
        progress: of the earlier runs.
        on_merge: called with the result of each merge.

    Attributes:
        progress: of this run and the earlier ones.
    """

    def __init__(
        self,
        adapter: KvFormat,
        table: FollowedTable,
        connection: SharedConnection,
        thread: ThreadPoolExecutor,
        stop: asyncio.Event,
        pace: Pace,
        *,
        once: bool,
        reconcile: bool,
        progress: FollowProgress,
        on_merge: Callable[[MergeResult], None] | None,
    ) -> None:
        self.progress = progress
        self._adapter, self._options = adapter, adapter.options
        assert adapter.options.bucket is not None
        self._bucket: str = adapter.options.bucket
        self._table, self._stored = table, table.position
        self._connection, self._thread, self._stop = connection, thread, stop
        self._once, self._on_merge, self._pace = once, on_merge, pace
        self._reconcile = reconcile
        self._waiting: list[Deliveries] = []
        self._waiting_bytes = 0
        common = adapter.options.common
        self._limits = common.max_rows_per_trigger, common.max_bytes_per_trigger  # of a commit
        self._changed = asyncio.Event()  # entries have arrived
        self._room = asyncio.Event()  # the entries that waited were taken
        self._urgent = asyncio.Event()  # the next commit does not wait
        self._check = DataLossCheck(self._adapter, connection, time.monotonic)
        self._gaps: SequenceGapTracker | None = None
        self._seen: list[pa.Array] | None = None  # keys of the initial values, if rows may be gone
        self._committed = time.monotonic()  # the last position
        self._begun, self._passed = time.monotonic(), 0.0  # of the last commit
        self._done = 0  # the table has the entries up to this sequence
        self._merged_through = 0  # a query of Spark has merged entries up to this sequence

    async def run(self) -> None:
        """Follow until the end."""
        try:
            await self._follow()
        except _StoppedError:
            _log.warning("the follower stops while servers are away", table=self._table.name)

    async def _follow(self) -> None:
        info = await self._retry(self._first_info)
        self._connection.wait_for_outages(self._options.common.outage_timeout)
        self._scope = self._adapter.read_scope(info)
        self._adapter.report_silent_removals(info, self._scope)
        stored = await self._in_thread(self._table.open)
        if stored is not None:
            # Another follower may have read further while the table was opened.
            info = await self._retry(self._first_info)
        info, at = await self._start(info, stored)
        self._info, self._at = info, at  # the stream, and the position behind what was taken
        self._target = info.last_seq
        if self._reconcile:
            await self._retry(lambda: self._delete_unseen([]))
        last_per_subject = (
            self._adapter.last_per_subject
            and not self._complete
            and self._scope.history != 1
            and at.stream_seq == 0
        )
        if self._adapter.missing_is_loss(self._scope) and not last_per_subject:
            allowed = self._check.expiry_allowed_through(info.name, at.stream_seq, at)
            required_after = max(at.stream_seq, self._merged_through)
            self._gaps = SequenceGapTracker(required_after + 1, allowed)
        self._read = EndlessRead(
            self._adapter,
            self._connection,
            info,
            at.stream_seq,
            initial_through=at.initial_through,
            last_per_subject=last_per_subject,
            at_leader=True,
            accumulate=True,
            max_rows=self._limits[0],
            max_bytes=self._limits[1],
        )
        self._done = at.stream_seq
        _log.info(
            "follower reads the bucket",
            stream=info.name,
            table=self._table.name,
            after=at.stream_seq,
            last=info.last_seq,
        )
        tasks = {asyncio.ensure_future(self._receive()), asyncio.ensure_future(self._poll())}
        stop = asyncio.ensure_future(self._stop.wait())
        for task in (*tasks, stop):
            task.add_done_callback(lambda _: self._changed.set())
            task.add_done_callback(lambda _: self._urgent.set())
        try:
            while not (self._stop.is_set() or self._ended()):
                for task in tasks:
                    if task.done():
                        task.result()
                await self._commit()
                await self._wait(self._begun + self._pace.seconds)
            if self._complete and self._is_ahead():
                await self._merge([], await self._position(), required=True)
        finally:
            # Once: a second cancellation would interrupt the deletion of the consumer.
            for task in (*tasks, stop):
                task.cancel()
            await asyncio.wait({*tasks, stop}, timeout=_END_TIMEOUT)
            self._report()

    # -- start ----------------------------------------------------------------------------------

    async def _first_info(self) -> StreamInfo:
        jetstream = await self._connection.jetstream()
        bucket, minimum = self._bucket, self._options.min_last_revision
        info = await stream_info_with_revision(jetstream, bucket, minimum)
        info = await self._adapter.completed(jetstream, info)
        await self._adapter.verify_filters(jetstream, info)
        return info

    async def _start(
        self, info: StreamInfo, stored: Position | None
    ) -> tuple[StreamInfo, Position]:
        """The stream, and where reading begins."""
        if stored is not None:
            lagging = info
            info = await self._retry(lambda: self._check.caught_up(stored, lagging))
            if info.first_seq > stored.stream_seq + 1:
                # A query of Spark may have gone on: what it has merged is not required again.
                created = nanoseconds(info.created) // 1000
                newest = await self._in_thread(self._table.newest_revision, created)
                self._merged_through = newest
            resumed = await self._retry(
                lambda: self._check.resume_from(stored, info, merged_through=self._merged_through)
            )
            assert resumed is not None  # a mirror has caught up, or does not lag any more
            if resumed.epoch:
                self._stored.stored = None  # the next one counts, also if it is lower
            read = KnownStream(stored.created, stored.stream_seq, stored.time)
            if not resumed.epoch or compare(read, info) is not Identity.RECREATED:
                if self._starts_later:
                    _log.warning(
                        "start option ignored: the follower continues after its position",
                        option=self._adapter.start_option,
                        resumes_after=resumed.stream_seq,
                    )
                return info, resumed
        if self._starts_later and stored is None and self._stored.known:
            raise ConfigurationError(
                f"could not follow into table {self._table.name!r}: its position is void, by a "
                f"RESTORE or an expired log, and option {self._adapter.start_option!r} would leave "
                f"out entries; remove the option, or follow into a new table"
            )
        self._stored.reads_initial_values = True
        if self._table.keys:
            self._seen = []
        origin = 0
        if stored is None:  # a bucket that was created again is read from its start

            async def resolved() -> int:
                jetstream = await self._connection.jetstream()
                view = StreamView(jetstream, info, self._scope)
                return await resolve_start(view, self._options.start_position)

            origin = await self._retry(resolved)
        if origin:
            self._seen = None  # rows of keys before the start are not known to be missing
        return info, Position(
            created=info.created,
            epoch=0,
            origin=origin,
            stream_seq=origin,
            time=None,
            consumer_seq=0,
            initial_through=max(origin, info.last_seq),
        )

    @property
    def _complete(self) -> bool:
        """Whether the table has the initial values, and lacks the rows that they do not have."""
        return not self._stored.reads_initial_values

    @property
    def _starts_later(self) -> bool:
        """Whether an option leaves out entries that the bucket has at the first start."""
        policy = self._options.start_position.policy
        return policy not in (DeliverPolicy.ALL, DeliverPolicy.LAST_PER_SUBJECT)

    # -- reading --------------------------------------------------------------------------------

    async def _receive(self) -> None:
        """Read into the buffer, while it has room."""
        jetstream = await self._connection.jetstream()
        # Also deletes the consumer if this task is cancelled while it waits for room.
        with bucket_errors(jetstream, self._bucket):
            async with contextlib.aclosing(self._read.batches()) as batches:
                await self._keep(batches)

    async def _keep(self, batches: AsyncGenerator[Deliveries, None]) -> None:
        async for messages in batches:
            if self._gaps is not None:
                self._gaps.add(messages.stream_seq)
            self._waiting.append(messages)
            self._waiting_bytes += messages.size
            self._changed.set()
            while self._waiting_bytes > _WAITING_BYTES:
                self._urgent.set()
                self._room.clear()
                await self._room.wait()

    async def _poll(self) -> None:
        """Look at the stream from time to time: its leader, its ends."""
        while True:
            info = await self._retry(self._leaders_info)
            if info.created != self._info.created:
                observed = f"it was created at {info.created}, expected {self._info.created}"
                known = KnownStream.of(self._info)
                raise StreamChangedError(info.name, Identity.RECREATED, known, observed)
            self._info = info
            self._read.update(info)
            await self._in_thread(self._table.refresh)
            self._report()
            await asyncio.sleep(_POLL_INTERVAL)

    async def _leaders_info(self) -> StreamInfo:
        return await bucket_stream_info(await self._connection.jetstream(), self._bucket)

    async def _retry(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Repeat a request while servers are away; two more seconds once the follower stops."""
        task = asyncio.ensure_future(self._connection.retry_transient(work))
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({task}, timeout=_STOP_TIMEOUT)
            if not task.done():
                raise _StoppedError
            return task.result()
        finally:
            await cancel_and_wait({task, stop}, 10.0)

    # -- commits --------------------------------------------------------------------------------

    async def _wait(self, until: float) -> None:
        """Wait for entries, and until the time of the next commit; at most a second."""
        self._changed.clear()
        if not self._waiting and not self._ended():
            try:
                await wait_cancellable(1.0, self._changed.wait())
            except asyncio.TimeoutError:
                return
        if (seconds := until - time.monotonic()) > 0:
            with contextlib.suppress(asyncio.TimeoutError):
                await wait_cancellable(seconds, self._urgent.wait())

    async def _commit(self) -> None:
        """Merge what has arrived, and the position if it is due."""
        ends = not self._complete and self._read.complete
        now = time.monotonic()
        self._passed, self._begun = now - self._begun, now
        taken = self._take()
        self._room.set()
        if not self._stop.is_set():
            self._urgent.clear()
        if taken:
            last = taken[-1]
            written = rfc3339(int(last.time[-1]))
            self._at = replace(self._at, stream_seq=int(last.stream_seq[-1]), time=written)
            await self._verify_gaps()
        elif self._read.through > self._at.stream_seq:
            # Messages that the filter leaves out follow the last entry.
            self._at = replace(self._at, stream_seq=self._read.through, time=None)
        if ends and not self._waiting:
            if self._seen is not None:
                await self._merge(taken, None)
                seen = self._seen
                await self._retry(lambda: self._delete_unseen(seen))
                taken = []
            self._stored.reads_initial_values, self._seen = False, None
            await self._merge(taken, await self._position(), required=True)
        elif taken or (self._complete and self._position_is_due()):
            position = await self._position() if self._complete else None
            await self._merge(taken, position, required=not taken)
        self._done = self._at.stream_seq
        self._report()

    def _take(self) -> list[Deliveries]:
        """The next messages, within the limits of a commit, which one arrival does not exceed."""
        max_rows, max_bytes = (limit or math.inf for limit in self._limits)
        count = rows = nbytes = 0
        for one in self._waiting:
            rows, nbytes = rows + len(one), nbytes + one.size
            if count and (rows > max_rows or nbytes > max_bytes):
                break
            count += 1
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        self._waiting_bytes -= sum(one.size for one in taken)
        return taken

    async def _position(self) -> Position:
        """The position behind the entries that were taken."""
        if self._at.time is None:

            async def stored_time() -> str | None:
                jetstream = await self._connection.jetstream()
                return await timestamp_at(jetstream, self._info, self._at.stream_seq)

            self._at = replace(self._at, time=await self._retry(stored_time))
        return self._at

    async def _merge(
        self, messages: list[Deliveries], position: Position | None, *, required: bool = False
    ) -> None:
        stored = self._stored.stored

        def merge() -> tuple[int, MergeResult]:
            rows = self._read.rows(Deliveries.chain(messages))
            if self._seen is not None:
                self._seen.append(rows["key"])
            return len(rows), self._table.merge(rows, position, required=required)

        count, result = await self._in_thread(merge)
        if self._stored.stored != stored:
            self._committed = time.monotonic()
        before = self.progress
        self.progress = replace(
            before,
            rows=before.rows + count,
            changed=before.changed + result.changed,
            commits=before.commits + (result.changed > 0),
        )
        self._pace.add(result, self._passed)
        if self._on_merge is not None:
            self._on_merge(result)

    async def _delete_unseen(self, seen: list[pa.Array]) -> None:
        filters = self._scope.filters if self._options.keys else ()
        prefix = self._scope.prefix
        keys = [one.removeprefix(prefix) for one in filters]
        await self._in_thread(self._table.delete_unseen, pa.chunked_array(seen, pa.string()), keys)

    async def _verify_gaps(self) -> None:
        """Report messages that aged out before they were read, where all are required."""
        if self._gaps is None or not self._gaps.has_gaps:
            return
        info = await self._retry(self._leaders_info)
        received = self._read.position
        lost = self._gaps.aged_out(info.first_seq, received)
        self._gaps = SequenceGapTracker(received + 1)
        if lost is not None:
            first, last, number = lost
            jetstream = await self._connection.jetstream()
            await report_aged_out(self._adapter, jetstream, info, first, last, number)

    def _is_ahead(self) -> bool:
        """Whether the entries that were taken are beyond the stored position."""
        stored = self._stored.stored
        return stored is None or order(stored) < order(self._at)

    def _position_is_due(self) -> bool:
        """Whether a position is committed without a row."""
        stored = self._stored.stored
        if stored is None or not self._is_ahead():
            return stored is None
        # Where all messages are required, the stream can remove those after the stored position
        # before the read advances as far again.
        first, passed = self._info.first_seq, self._at.stream_seq - stored.stream_seq
        nearly_removed = self._gaps is not None and first > 1 and stored.stream_seq - first < passed
        return nearly_removed or time.monotonic() - self._committed >= _POSITION_LAG

    def _ended(self) -> bool:
        """Whether ``once`` is fulfilled."""
        return self._once and self._complete and self._done >= self._target

    # -- figures --------------------------------------------------------------------------------

    def _report(self) -> None:
        info, done = self._info, self._done
        behind, seconds = max(0, info.last_seq - done), None
        if not behind:
            seconds = 0.0
        elif self._at.time and info.last_time:
            seconds = max(0, nanoseconds(info.last_time) - nanoseconds(self._at.time)) / 1e9
        self.progress = replace(
            self.progress,
            revision=done,
            behind=behind,
            seconds_behind=seconds,
            keys=self._table.keys,
            caught_up=self._complete and not behind,
        )

    async def _in_thread(self, work: Callable[..., _T], *arguments: object) -> _T:
        """Call ``work`` in the thread of the table, to its end also if the caller is cancelled."""

        async def call() -> _T:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, work, *arguments)

        return await run_to_completion(call())
