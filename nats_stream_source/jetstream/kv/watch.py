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
the request, a few times. Under continuous writes this might never end. Then the leader lists the
keys, and the next revision of each key that was not sent yet is fetched and sent early. (It is
skipped when it is delivered later.) Why not wait for "nothing pending": the server decrements the
count for a replaced revision before it increments it for the new one, so under writes it reports 0
too early.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.aio.tasks import Pump
from nats_stream_source.errors import ConfigurationError
from nats_stream_source.jetstream.api import missing_messages
from nats_stream_source.jetstream.kv.bucket import ALL_KEYS, Bucket, stream_info_with_revision
from nats_stream_source.jetstream.kv.codec import SkippedEntries
from nats_stream_source.jetstream.kv.entry import (
    Entry,
    decoded_entry,
    entries_from_frames,
    validate_revision,
)
from nats_stream_source.jetstream.kv.requests import last_matching_seq
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import ENDLESS, RangeRequest
from nats_stream_source.jetstream.reusable_connection import SharedConnection
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.jetstream.subjects import RESERVED, validate_filters
from nats_stream_source.wire.columns import entry_operations, subjects
from nats_stream_source.wire.consumer.deliveries import Deliveries

_MIN_HEARTBEAT = 0.1  # seconds; the shortest interval that servers accept
_CATCH_UPS = 5  # ranges that are read before the leader lists the keys
_MAX_SEEN_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """What a watch sends and where it starts.

    Attributes:
        keys: filters that do not overlap; ``>`` for all keys.
        include_history: all revisions in the bucket, not only the last of each key.
        ignore_deletes: omit markers.
        meta_only: omit values.
        updates_only: omit existing entries; the signal is sent at once.
        resume_from_revision: start at this revision: all entries from it on.
        min_last_revision: fail if the bucket does not reach this revision before the start
            (ADR-53).
        heartbeat: seconds between the server's idle heartbeats, at least 0.1. After three
            intervals without a message or heartbeat the consumer is re-created.

    Raises:
        InvalidNameError: a filter is invalid.
        ConfigurationError: an option is out of range, or two contradict each other.
    """

    keys: tuple[str, ...] = ALL_KEYS
    include_history: bool = False
    ignore_deletes: bool = False
    meta_only: bool = False
    updates_only: bool = False
    resume_from_revision: int | None = None
    min_last_revision: int | None = None
    heartbeat: float = 0.5

    def __post_init__(self) -> None:
        validate_filters(self.keys)
        starts = [name for name in ("include_history", "updates_only") if getattr(self, name)]
        if self.resume_from_revision is not None:
            starts.append("resume_from_revision")
            validate_revision("watch", "resume_from_revision", self.resume_from_revision, first=1)
        validate_revision("watch", "min_last_revision", self.min_last_revision, optional=True)
        if len(starts) > 1:
            raise ConfigurationError(
                f"could not watch: {' and '.join(starts)} are both set, but a watch has one start; "
                f"set one of them"
            )
        if self.heartbeat < _MIN_HEARTBEAT:
            raise ConfigurationError(
                f"could not watch: heartbeat is {self.heartbeat}, expected at least "
                f"{_MIN_HEARTBEAT} seconds; increase heartbeat"
            )


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

    Any call may raise, and later calls raise it again:
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
        self._seen: list[pa.Array] | None = None  # sent subjects; None once they are not needed
        self._seen_rows, self._skipped = 0, SkippedEntries()
        self._sent_early: set[int] = set()  # sequences to skip when they are delivered
        self._batches: AsyncGenerator[Deliveries | None, None] | None = None
        self._queue: deque[Entry | None] = deque()
        self._pump: Pump[Deliveries | None] | None = None
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
                if self._pump is None:
                    self._pump = Pump(self.batches(), self._enqueue)
                await self._pump.advance()
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
        initial_end = await last_matching_seq(jetstream, info, bucket, options.keys)
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
            prefix=bucket.prefix,
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
        self._batches = self._generate_batches()
        return self._batches

    async def close(self) -> None:
        """Close the watch and delete its consumer. A concurrent read ends the iteration."""
        if self._pump is not None:
            await self._pump.close()
        elif self._batches is not None:
            await self._batches.aclose()
        self._skipped.report()

    # -- frames ---------------------------------------------------------------------------------

    def _enqueue(self, frames: Deliveries | None) -> None:
        self._queue.extend([None] if frames is None else entries_from_frames(frames, self.bucket))

    async def _generate_batches(self) -> AsyncGenerator[Deliveries | None, None]:
        await self.start()
        assert self._reader is not None
        async with contextlib.aclosing(self._reader.batches()) as source:
            async with contextlib.aclosing(self._initial_batches(source)) as initial:
                async for frames in initial:
                    if len(frames):
                        yield frames
            self.initial_done, self._seen = True, None
            yield None
            async for frames in source:
                if len(unsent := self._select_unsent(frames)):
                    yield unsent

    async def _initial_batches(
        self, source: AsyncGenerator[Deliveries, None]
    ) -> AsyncGenerator[Deliveries, None]:
        """The frames before the signal; a batch may be empty."""
        assert self._reader is not None
        target = self._initial_end
        if self._reader.request.start >= target:
            return
        for _ in range(1 + _CATCH_UPS):
            while self._delivered_through() < target:
                yield self._select_unsent(await anext(source))
            target = await self._connection.retry_transient(self._last_matching_seq)
            if target <= self._delivered_through():
                return  # no key was superseded
        if self._seen is not None:
            unsent = await self._connection.retry_transient(self._fetch_unsent_keys)
            yield self._select_requested(unsent)

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
        reader = self._reader
        # The cursor may be ahead: the reader yields the received messages batch by batch.
        return reader.cursor.seen_through if reader.intake.drained else self._position

    async def _last_matching_seq(self) -> int:
        jetstream = await self._connection.jetstream()
        info = await jetstream.stream_info(self.bucket.stream)
        return await last_matching_seq(jetstream, info, self.bucket, self.options.keys)

    async def _fetch_unsent_keys(self) -> Deliveries:
        """The next revision of each key of the leader that was not sent yet."""
        assert self._seen is not None
        seen = pa.chunked_array(self._seen, pa.string()).to_pylist()
        found = await missing_messages(
            await self._connection.jetstream(),
            self.bucket.stream,
            [self.bucket.prefix + key for key in self.options.keys],
            set(seen),
            after=self._delivered_through(),
            headers_only=self.options.meta_only,
        )
        self._sent_early = set(found.stream_seq.tolist())
        return found
