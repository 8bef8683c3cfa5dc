"""Watch of a bucket (ADR-8): its current entries, the end-of-initial-data signal, and its changes.

A watch is an endless ordered consumer (``ordered/reader.py``) over the keys' subjects. The reader
requests lost messages again. This module decides where the consumer starts and when the initial
values end.

**Start.** With ``include_history`` the watch starts at the bucket's first message. Without it, it
starts with the last message of each key. If the bucket keeps one revision per key, every message is
the last of its key, and a plain range is cheaper (and resumes from its position after a rebuild);
otherwise the deliver policy is ``last_per_subject``. From ``resume_from_revision`` on, or after the
newest message (``updates_only``), it is a plain range.

**End of the initial values.** At the start, the watch requests the last message that matches from
the leader: ``initial_end``. If no message matches, the signal is sent at once. A replica that has
not reached ``initial_end`` has not delivered all initial values, even if its pending count is 0
(ADR-53). A message or a heartbeat shows when it has reached it.

``initial_end`` alone is not sufficient: a key that is superseded before its delivery is delivered
after ``initial_end``, and a reader that copies the bucket up to the signal would miss it. So after
``initial_end`` the watch requests the last message that matches from the leader again. If the watch
has delivered that message, no key is missing. Otherwise it continues to that message and repeats
the request, as long as each such catch-up range is shorter than the one before. Under continuous
writes this might never end. Then the leader lists the keys, and the next revision of each key that
was not sent yet is fetched and sent early. (It is skipped when it is delivered later.) Why not wait
for "nothing pending": the server decrements the count for a replaced revision before it increments
it for the new one, so under writes it reports 0 too early.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.aio.tasks import gather_limited
from nats_stream_source.jetstream.api import StoredMessage, as_delivered, list_subjects
from nats_stream_source.jetstream.kv.bucket import Bucket, stream_info_with_revision
from nats_stream_source.jetstream.kv.codec import SkippedEntries
from nats_stream_source.jetstream.kv.entry import Entry, decoded_entry, entries_from_frames
from nats_stream_source.jetstream.kv.last_revision import last_matching_seq
from nats_stream_source.jetstream.kv.watch_options import WatchOptions
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import ENDLESS, RangeRequest, report_left_out
from nats_stream_source.jetstream.retry import retry_transient
from nats_stream_source.jetstream.reusable_connection import SharedConnection
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.jetstream.subjects import RESERVED, is_literal
from nats_stream_source.wire.columns import entry_operations, subjects, within
from nats_stream_source.wire.consumer.deliveries import Deliveries
from nats_stream_source.wire.encode import encode_delivery
from nats_stream_source.wire.framing.frames import Framer

T = TypeVar("T")

_MAX_SEEN_ROWS = 1 << 20


class Watch:
    """Entries and changes of a bucket: an async iterator and an async context manager.

    Yields :class:`Entry`, and exactly once None: the end-of-initial-data signal. The iteration ends
    only when the watch is closed or fails::

        async with kv.watch("auth.>") as watch:
            async for entry in watch:
                if entry is None:
                    print("all initial values received; changes follow")

    Each entry is yielded once, and the entries of each key in the order of their revisions. The
    order holds across keys too, except for initial values that are sent early (see the module): to
    resume from the received entries, use the last entry after the signal. A slow or paused reader
    makes the server wait.

    A cancelled read, as by ``asyncio.wait_for``, does not lose an entry: the next read resumes. So
    the watch must be closed, by ``async with`` or :meth:`close`, also after a cancelled read.

    Any call may raise:
        StreamNotFoundError, DataLossError: the bucket was deleted, re-created or rolled back.
        MinLastSequenceError: the delivering replica did not reach the leader's position at the
            start. ConsumerLostError, ConnectError, …: as :class:`OrderedReader`.
    """

    def __init__(self, connection: SharedConnection, bucket: Bucket, options: WatchOptions) -> None:
        self.bucket = bucket
        self.options = options
        self.initial_done = False
        """Whether the end-of-initial-data signal was sent."""
        self._connection = connection
        self._reader: OrderedReader | None = None
        self._initial_end = 0
        self._position = 0  # the last sequence that was yielded; at first, the start
        self._first_requested = 0  # earlier sequences are skipped
        self._catch_up_target: int | None = None
        self._catch_up_length = 0
        self._seen: list[pa.Array] | None = None  # sent subjects; None once they are not needed
        self._seen_rows, self._left_out, self._skipped = 0, 0, SkippedEntries()
        self._sent_early: set[int] = set()  # sequences to skip when they are delivered
        self._pending_read: asyncio.Future[Deliveries] | None = None
        self._batches: AsyncGenerator[Deliveries | None, None] | None = None
        self._queue: deque[Entry | None] = deque()
        self._refill_task: asyncio.Future[Deliveries | None] | None = None
        self._initial_entries: list[Entry] = []
        self._include_reserved = any(key.startswith(RESERVED) for key in options.keys)

    def __repr__(self) -> str:
        return f"<Watch {self.bucket.name} {', '.join(self.options.keys)} {self._reader!r}>"

    @property
    def reader(self) -> OrderedReader | None:
        """The ordered consumer of the watch; None before the start."""
        return self._reader

    async def __aenter__(self) -> Watch:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> Entry | None:
        while True:
            while not self._queue:
                await self._fill_queue()
            stored = self._queue.popleft()
            if stored is None:
                return None
            # Here: after the error of an entry, the next read continues with the next entry.
            if (entry := decoded_entry(stored, self.bucket, self._skipped)) is not None:
                return entry

    async def initial(self) -> list[Entry]:
        """All entries up to the signal: the current values, or the history."""
        while self._queue or not self.initial_done:
            if (entry := await self.__anext__()) is None:
                break
            self._initial_entries.append(entry)
        entries, self._initial_entries = self._initial_entries, []
        return entries

    async def start(self) -> None:
        """Determine the start of the watch and its initial values. Later calls do nothing.

        Raises:
            BucketNotFoundError: the bucket does not exist.
            MinLastSequenceError: it does not reach ``min_last_revision``.
        """
        if self._reader is not None:
            return
        options, bucket = self.options, self.bucket
        jetstream = await self._connection.jetstream()
        info = await stream_info_with_revision(jetstream, bucket.name, options.min_last_revision)
        filters = bucket.filter_subjects(options.keys)
        initial_end = await last_matching_seq(
            jetstream, info, bucket, options.keys, headers_only=options.meta_only
        )
        start, last_per_subject = 0, False
        if options.updates_only or not initial_end:
            start = initial_end = info.last_seq
        elif options.resume_from_revision is not None:
            # A revision in the future: start at the stream's last sequence.
            start = min(options.resume_from_revision - 1, info.last_seq)
            self._first_requested = options.resume_from_revision
        elif not options.include_history and bucket.history != 1:
            last_per_subject = True
            filters = filters or (f"{bucket.prefix}>",)
        self._seen = None if start else []
        self._position = start
        self._initial_end = max(start, initial_end)
        request = RangeRequest(
            info.name,
            KnownStream.of(info),
            start,
            ENDLESS,
            filters,
            last_per_subject=last_per_subject,
            headers_only=options.meta_only,
            eager=True,
            min_last_seq=self._initial_end,
            heartbeat=options.heartbeat,
        )
        self._reader = OrderedReader(self._connection, request)

    def batches(self) -> AsyncGenerator[Deliveries | None, None]:
        """The same as the iterator, but as columns: received frames, for ``wire.columns``.

        Yields at least one delivery at a time, as it is stored, and exactly once None: the signal.
        A watch is read either by this method or by iteration, and only once.

        Raises:
            RuntimeError: the watch is already being read.
        """
        if self._batches is not None:
            raise RuntimeError(f"could not read {self!r}: it is already being read; open another")
        # A cancelled read ends this generator, see _fill_queue.
        self._batches = self._generate_batches()
        return self._batches

    async def close(self) -> None:
        """Close the watch and delete its consumer. A concurrent read ends the iteration."""
        if (refill := self._refill_task) is not None:
            refill.cancel()
            await asyncio.gather(refill, return_exceptions=True)
        if self._batches is not None:
            await self._batches.aclose()
        self._skipped.report()
        report_left_out(self.bucket.stream, self.bucket.prefix, self._left_out)

    # -- frames ---------------------------------------------------------------------------------

    async def _fill_queue(self) -> None:
        """Read the next batch into the queue."""
        # A separate task that survives a cancelled wait: cancelling a generator while it runs ends
        # it, and the next read would report an end of data.
        if (refill := self._refill_task) is None:
            batches = self._batches or self.batches()
            refill = self._refill_task = asyncio.ensure_future(batches.__anext__())
            # Without this, asyncio logs "exception was never retrieved" after the last read.
            refill.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait({refill})
        if self._refill_task is not refill:
            return  # another task received the batch
        self._refill_task = None
        if refill.cancelled():
            raise StopAsyncIteration  # close() was called
        frames = refill.result()
        self._queue.extend([None] if frames is None else entries_from_frames(frames, self.bucket))

    async def _generate_batches(self) -> AsyncGenerator[Deliveries | None, None]:
        await self.start()
        reader = self._reader
        assert reader is not None
        if reader.request.start >= self._initial_end:
            self.initial_done, self._seen = True, None
            yield None
        source = reader.batches()
        try:
            while True:
                frames = await self._next_frames(source)
                if len(unsent := self._select_unsent(frames)):
                    yield unsent
                if not self.initial_done and await self._initial_values_end():
                    missing = await self._retry(self._fetch_unsent_keys)
                    if len(requested := self._select_requested(missing)):
                        yield requested
                    self.initial_done, self._seen = True, None
                    yield None
        finally:
            if (pending_read := self._pending_read) is not None:
                pending_read.cancel()
                await asyncio.gather(pending_read, return_exceptions=True)
            await source.aclose()

    async def _next_frames(self, source: AsyncGenerator[Deliveries, None]) -> Deliveries:
        """The next frames; empty if only the consumer's position may have advanced."""
        if self.initial_done and self._pending_read is None:
            return await source.__anext__()
        if self._pending_read is None:
            self._pending_read = asyncio.ensure_future(source.__anext__())
        if self._catch_up_target is None or self.initial_done:
            # The reader yields empty frames when it has reached its target by heartbeat.
            await asyncio.wait({self._pending_read})
        else:
            # Pending messages may be superseded. Then only heartbeats are received, and the reader
            # does not yield them.
            await asyncio.wait({self._pending_read}, timeout=self.options.heartbeat)
        if not self._pending_read.done():
            return Deliveries.join([])
        completed, self._pending_read = self._pending_read, None
        return completed.result()

    def _select_unsent(self, frames: Deliveries) -> Deliveries:
        """The frames that the watch sends and has not sent yet."""
        if not len(frames):
            return frames
        self._position = int(frames.stream_seq[-1])
        if self._seen is not None:
            self._seen.append(subjects(frames))
            self._seen_rows += len(frames)
            if self._seen_rows > _MAX_SEEN_ROWS:
                # Many revisions per key: keep each subject once.
                self._seen = [pa.chunked_array(self._seen).unique()]
                self._seen_rows = 0
        if self._first_requested:
            frames = frames.select(frames.stream_seq >= self._first_requested)
            if self._position >= self._first_requested:
                self._first_requested = 0
        if self._sent_early:
            repeated = np.isin(frames.stream_seq, list(self._sent_early))
            frames = frames.select(~repeated)
            if self._position >= max(self._sent_early):
                self._sent_early.clear()
        return self._select_requested(frames)

    def _select_requested(self, frames: Deliveries) -> Deliveries:
        # Not in the reader: its position is then behind the cursor's, see _delivered_through.
        received, frames = len(frames), within(frames, self.bucket.prefix)
        self._left_out += received - len(frames)
        if not len(frames):
            return frames
        keep = np.ones(len(frames), np.bool_)
        if not self._include_reserved:
            reserved = pc.starts_with(subjects(frames), self.bucket.prefix + RESERVED)
            keep &= ~reserved.to_numpy(zero_copy_only=False)
        operation = entry_operations(frames) if self.options.ignore_deletes else None
        if operation is not None:
            keep &= pc.equal(operation, "PUT").to_numpy(zero_copy_only=False)
        return frames if keep.all() else frames.select(keep)

    # -- end of the initial values --------------------------------------------------------------

    def _delivered_through(self) -> int:
        """The sequence up to which all messages were yielded."""
        assert self._reader is not None
        cursor = self._reader.cursor
        # The cursor may be ahead: the reader yields the kept messages batch by batch.
        return cursor.seen_through if cursor.position <= self._position else self._position

    async def _initial_values_end(self) -> bool:
        """Whether the signal is due now."""
        through = self._delivered_through()
        return through >= self._initial_end and await self._catch_up_is_complete(through)

    async def _catch_up_is_complete(self, through: int) -> bool:
        """Whether all messages of the leader were yielded, or catching up cannot end."""
        while self._catch_up_target is None or through >= self._catch_up_target:
            last = await self._last_matching_seq()
            if last <= through:
                self._seen = None  # no key was superseded
                return True
            previous_target, self._catch_up_target = self._catch_up_target, last
            if previous_target is None:
                self._catch_up_length = last - self._initial_end
                continue
            if last - previous_target >= self._catch_up_length:
                return True
            self._catch_up_length = last - previous_target
        return False

    async def _last_matching_seq(self) -> int:
        """The sequence of the leader's current last message that matches."""

        async def request() -> int:
            jetstream = await self._connection.jetstream()
            info = await jetstream.stream_info(self.bucket.stream)
            return await last_matching_seq(
                jetstream,
                info,
                self.bucket,
                self.options.keys,
                headers_only=self.options.meta_only,
            )

        return await self._retry(request)

    async def _retry(self, request: Callable[[], Awaitable[T]]) -> T:
        return await retry_transient(request, self._connection.settings.connect_timeout)

    async def _fetch_unsent_keys(self) -> Deliveries:
        """The next revision of each key of the leader that was not sent yet."""
        if self._seen is None:
            return Deliveries.join([])
        through, bucket = self._delivered_through(), self.bucket
        jetstream = await self._connection.jetstream()
        filters = [bucket.prefix + key for key in self.options.keys]
        names = await list_subjects(jetstream, bucket.stream, filters)
        listed = pa.array(sorted(filter(is_literal, names)), pa.string())
        seen = pa.chunked_array(self._seen, pa.string())
        unseen = listed.filter(pc.invert(pc.is_in(listed, value_set=seen.combine_chunks())))

        async def next_revision(name: str) -> StoredMessage | None:
            return await jetstream.message(bucket.stream, seq=through + 1, next_by_subj=name)

        # None: removed since the subjects were listed.
        responses = await gather_limited(next_revision, unseen.to_pylist())
        messages = sorted(
            (message for message in responses if message is not None),
            key=lambda message: message.seq,
        )
        self._sent_early = {message.seq for message in messages}
        delivered = (
            as_delivered(message, headers_only=self.options.meta_only) for message in messages
        )
        block = b"".join(encode_delivery(bucket.stream, message) for message in delivered)
        return Deliveries.of(Framer().feed(block))
