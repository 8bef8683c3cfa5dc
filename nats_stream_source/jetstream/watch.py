"""Watching a bucket (ADR-8): its entries as they are, the end-of-initial-data signal, its changes.

A watch is an endless ordered consumer (``ordered.py``) over the keys' subjects; what is lost on the
way is asked for again there. What this module adds is where the consumer begins and when the
initial data end.

**Where it begins.** With ``include_history`` at the bucket's first message. Without, at the last
message of each key: where the bucket keeps one revision only, that is every message, and a plain
range is cheaper (and goes on where it was after a rebuild); else ``last_per_subject``. From
``resume_from_revision`` on, or after the newest message (``updates_only``), it is a plain range.

**When the initial data end.** At the start the leader is asked for the last message that matches:
``reach``. Where there is none, the signal comes at once. A replica that has not got as far as
``reach`` has not delivered the initial data, whatever its pending count says (ADR-53); a message or
a heartbeat shows when it has.

That alone is not enough: a key that is overwritten before its turn comes after ``reach``, and who
dumps the bucket up to the signal would miss it. So when ``reach`` is passed, the leader is asked
again for the last message that matches; if the watch has got that far, nothing is missing. Else it
goes on to there and asks again, for as long as each such stretch is shorter than the one before.
Writers that never pause would keep that up for ever; then the leader lists the keys, and of each
that was not sent yet the first revision to come is fetched and sent ahead. (It is left out when its
turn comes.) Why not wait for "nothing pending": the server counts a revision that is replaced down
before it counts the new one up, so under writes it says 0 too early.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.errors import ConfigurationError
from nats_stream_source.jetstream.api import StoredMessage
from nats_stream_source.jetstream.bucket import EVERYTHING, Bucket, info_of, last_matching
from nats_stream_source.jetstream.entry import Entry, entries_of
from nats_stream_source.jetstream.link import SharedLink
from nats_stream_source.jetstream.ordered import OrderedReader
from nats_stream_source.jetstream.patience import patiently
from nats_stream_source.jetstream.range_request import ENDLESS, RangeRequest
from nats_stream_source.jetstream.stored import as_delivered, listed_subjects
from nats_stream_source.jetstream.subjects import RESERVED, check_filters, is_literal
from nats_stream_source.jetstream.together import together
from nats_stream_source.wire.columns import ack_tokens, header_blocks, subjects
from nats_stream_source.wire.deliveries import frame_of
from nats_stream_source.wire.frames import Framer, Frames, Kind
from nats_stream_source.wire.headers import operations

T = TypeVar("T")

_MOST_SEEN_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """What a watch shall send.

    Attributes:
        keys: filters, not overlapping; ``>`` for all keys.
        include_history: all revisions that the bucket has, not the last of each key only.
        ignore_deletes: no markers.
        meta_only: no values.
        updates_only: nothing that is there already; the signal comes at once.
        resume_from_revision: begin at this revision: all that was written from there on.
        min_last_revision: fail, rather than begin without having seen this revision (ADR-53).
        heartbeat: seconds between the server's idle heartbeats, at least 0.1. After three of them
            without a sign the consumer is taken for lost.
    """

    keys: tuple[str, ...] = EVERYTHING
    include_history: bool = False
    ignore_deletes: bool = False
    meta_only: bool = False
    updates_only: bool = False
    resume_from_revision: int | None = None
    min_last_revision: int | None = None
    heartbeat: float = 0.5

    def __post_init__(self) -> None:
        check_filters(self.keys)
        chosen = [name for name in ("include_history", "updates_only") if getattr(self, name)]
        if self.resume_from_revision is not None:
            chosen.append("resume_from_revision")
            if self.resume_from_revision < 1:
                raise ConfigurationError("resume_from_revision: revisions begin at 1")
        if len(chosen) > 1:
            raise ConfigurationError(
                f"a watch begins at one place: {' and '.join(chosen)} exclude each other"
            )
        if self.heartbeat < 0.1:
            raise ConfigurationError("heartbeat: 0.1 seconds is the shortest that servers know")


class Watch:
    """A bucket's entries and changes: an async iterator, and an async context manager.

    Yields :class:`Entry`, and exactly once None: the end-of-initial-data signal. It ends only by
    being closed or by an error::

        async with kv.watch("auth.>") as watch:
            async for entry in watch:
                if entry is None:
                    print("that was all there is; what follows is new")

    Each entry comes once; each key's in the order of their revisions. So do all together, but for
    initial values that are fetched ahead of their turn (see the module): who wants to resume from
    what was seen counts from the last entry after the signal. A reader that is slow, or away, makes
    the server wait.

    A read that is cancelled, as by ``asyncio.wait_for``, loses nothing: the next one goes on. So a
    watch has to be closed, by ``async with`` or :meth:`close`, also after that.

    Raises, from whichever call meets it:
        StreamNotFoundError, DataLossError: the bucket was deleted, replaced or set back.
        MinLastSequenceError: what delivers does not get as far as the leader was at the start.
        ConsumerLostError, ConnectError, …: as ``ordered.OrderedReader``.
    """

    def __init__(self, link: SharedLink, bucket: Bucket, options: WatchOptions) -> None:
        self.bucket = bucket
        self.options = options
        self.initial_done = False
        """Whether the signal was sent."""
        self._link = link
        self._reader: OrderedReader | None = None
        self._reach = 0
        self._position = 0  # the last sequence that was handed over
        self._least = 0  # the first sequence that is wanted
        self._bound: int | None = None
        self._stretch = 0
        self._seen: list[pa.Array] | None = None  # the subjects that were sent, while that matters
        self._seen_rows = 0
        self._ahead: set[int] = set()  # sequences that were sent before their turn
        self._pulling: asyncio.Future[Frames] | None = None
        self._batches: AsyncGenerator[Frames | None, None] | None = None
        self._ready: deque[Entry | None] = deque()
        self._refill: asyncio.Future[Frames | None] | None = None
        self._initial: list[Entry] = []
        self._keeps_reserved = any(key.startswith(RESERVED) for key in options.keys)

    def __repr__(self) -> str:
        return f"<Watch {self.bucket.name} {', '.join(self.options.keys)} {self._reader!r}>"

    @property
    def reader(self) -> OrderedReader | None:
        """The ordered consumer under the watch, once it has begun."""
        return self._reader

    async def __aenter__(self) -> Watch:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> Entry | None:
        while not self._ready:
            await self._read()
        return self._ready.popleft()

    async def initial(self) -> list[Entry]:
        """All entries up to the signal: the bucket as it is, or with its history."""
        while self._ready or not self.initial_done:
            if (entry := await self.__anext__()) is None:
                break
            self._initial.append(entry)
        found, self._initial = self._initial, []
        return found

    async def start(self) -> None:
        """Fix where the watch begins and what its initial data are. Safe to call again.

        Raises:
            BucketNotFoundError: there is no such bucket.
            MinLastSequenceError: it does not get as far as ``min_last_revision``.
        """
        if self._reader is not None:
            return
        options, bucket = self.options, self.bucket
        jetstream = await self._link.jetstream()
        info = await info_of(jetstream, bucket.name, options.min_last_revision)
        filters = bucket.filters(options.keys)
        reach = await last_matching(jetstream, info, bucket, options.keys)
        start, last_per_subject = 0, False
        if options.updates_only or not reach:
            start = reach = info.last_seq
        elif options.resume_from_revision is not None:
            # What is to come is waited for from where the stream is: it never was further.
            start = min(options.resume_from_revision - 1, info.last_seq)
            self._least = options.resume_from_revision
        elif not options.include_history and bucket.history != 1:
            last_per_subject = True
            filters = filters or (f"{bucket.prefix}>",)
        if not start:
            self._seen = []
        self._reach = max(start, reach)
        request = RangeRequest(
            stream=info.name,
            created=info.created,
            start=start,
            end=ENDLESS,
            filters=filters,
            last_per_subject=last_per_subject,
            headers_only=options.meta_only,
            eager=True,
            reach=self._reach,
            heartbeat=options.heartbeat,
        )
        self._reader = OrderedReader(self._link, request)

    def batches(self) -> AsyncGenerator[Frames | None, None]:
        """The same as the iterator, but columns: received frames, for ``wire.columns``.

        Yields ``Frames`` of at least one delivery, and exactly once None: the signal. A watch is
        read once, this way or the other.
        """
        if self._batches is not None:
            raise RuntimeError(f"{self!r} is being read already")
        # A generator: where a read of it is cancelled, it is at its end.
        self._batches = self._run()
        return self._batches

    async def close(self) -> None:
        """End the watch; its consumer is deleted. Who is reading it then is at the end, too."""
        if (refill := self._refill) is not None:
            refill.cancel()
            await asyncio.gather(refill, return_exceptions=True)
        if self._batches is not None:
            await self._batches.aclose()

    # -- frames ---------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Make the next batch ready."""
        # In a task of its own, which outlives who waits for it: a generator that is cancelled in
        # the middle is at its end, and the next read would find an end of data that is none.
        if (refill := self._refill) is None:
            batches = self._batches or self.batches()
            refill = self._refill = asyncio.ensure_future(batches.__anext__())
            refill.add_done_callback(_looked_at)
        await asyncio.wait({refill})
        if self._refill is not refill:
            return  # another reader has it
        self._refill = None
        if refill.cancelled():
            raise StopAsyncIteration  # by `close`
        frames = refill.result()
        self._ready.extend([None] if frames is None else entries_of(frames, self.bucket))

    async def _run(self) -> AsyncGenerator[Frames | None, None]:
        await self.start()
        reader = self._reader
        assert reader is not None
        if reader.request.start >= self._reach:
            self.initial_done, self._seen = True, None
            yield None
        source = reader.batches()
        try:
            while True:
                frames = await self._next(source)
                if len(chosen := self._chosen(frames)):
                    yield chosen
                if not self.initial_done and await self._ends_initial():
                    if len(overtaken := self._wanted(await self._patiently(self._overtaken))):
                        yield overtaken
                    self.initial_done, self._seen = True, None
                    yield None
        finally:
            if (pulling := self._pulling) is not None:
                pulling.cancel()
                await asyncio.gather(pulling, return_exceptions=True)
            await source.aclose()

    async def _next(self, source: AsyncGenerator[Frames, None]) -> Frames:
        """The next frames; none, where only the consumer's position may have moved on."""
        if self.initial_done and self._pulling is None:
            return await source.__anext__()
        if self._pulling is None:
            self._pulling = asyncio.ensure_future(source.__anext__())
        if self._bound is None or self.initial_done:
            # The reader tells by empty frames when it has reached its target by heartbeat.
            await asyncio.wait({self._pulling})
        else:
            # What was pending may be superseded: then no message comes, only heartbeats, of which
            # the reader says nothing.
            await asyncio.wait({self._pulling}, timeout=self.options.heartbeat)
        if not self._pulling.done():
            return Frames.join([])
        pulled, self._pulling = self._pulling, None
        return pulled.result()

    def _chosen(self, frames: Frames) -> Frames:
        """Without what the watch does not send, or has sent already."""
        if not len(frames):
            return frames
        self._position = int(ack_tokens(frames.select(slice(-1, None))).stream_seq[0])
        if self._seen is not None:
            self._seen.append(subjects(frames))
            self._seen_rows += len(frames)
            if self._seen_rows > _MOST_SEEN_ROWS:
                # Many revisions of each key: the keys are what matters.
                self._seen = [pa.chunked_array(self._seen).unique()]
                self._seen_rows = 0
        if self._least:
            frames = frames.select(ack_tokens(frames).stream_seq >= self._least)
            if self._position >= self._least:
                self._least = 0
        if self._ahead:
            again = np.isin(ack_tokens(frames).stream_seq, list(self._ahead))
            frames = frames.select(~again)
            if self._position >= max(self._ahead):
                self._ahead.clear()
        return self._wanted(frames)

    def _wanted(self, frames: Frames) -> Frames:
        if not len(frames):
            return frames
        keep = np.ones(len(frames), np.bool_)
        if not self._keeps_reserved:
            reserved = pc.starts_with(subjects(frames), self.bucket.prefix + RESERVED)
            keep &= ~reserved.to_numpy(zero_copy_only=False)
        if self.options.ignore_deletes and (frames.kind == Kind.HMSG).any():
            put = pc.equal(operations(header_blocks(frames)), "PUT")
            keep &= put.to_numpy(zero_copy_only=False)
        return frames if keep.all() else frames.select(keep)

    # -- the end of the initial data ------------------------------------------------------------

    def _through(self) -> int:
        """The sequence up to which all was handed over."""
        assert self._reader is not None
        cursor = self._reader.cursor
        # The cursor may be ahead: of what it kept, the reader yields batch by batch.
        return cursor.seen_through if cursor.position <= self._position else self._position

    async def _ends_initial(self) -> bool:
        """Whether the signal is due now."""
        through = self._through()
        return through >= self._reach and await self._caught_up(through)

    async def _caught_up(self, through: int) -> bool:
        """Whether all that the leader has was handed over, or waiting for that does not help."""
        while self._bound is None or through >= self._bound:
            last = await self._last()
            if last <= through:
                self._seen = None  # nothing was overtaken
                return True
            before, self._bound = self._bound, last
            if before is None:
                self._stretch = last - self._reach
                continue
            if last - before >= self._stretch:
                return True
            self._stretch = last - before
        return False

    async def _last(self) -> int:
        """The sequence of the last message that matches, as the leader has it now."""

        async def ask() -> int:
            jetstream = await self._link.jetstream()
            info = await jetstream.stream_info(self.bucket.stream)
            return await last_matching(jetstream, info, self.bucket, self.options.keys)

        return await self._patiently(ask)

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        return await patiently(ask, self._link.settings.connect_timeout)

    async def _overtaken(self) -> Frames:
        """Of each key that was not sent yet, though the leader has it, the next revision."""
        if self._seen is None:
            return Frames.join([])
        through, bucket = self._through(), self.bucket
        jetstream = await self._link.jetstream()
        filters = [bucket.prefix + key for key in self.options.keys]
        names = await listed_subjects(jetstream, bucket.stream, filters)
        listed = pa.array(sorted(filter(is_literal, names)), pa.string())
        seen = pa.chunked_array(self._seen, pa.string())
        unseen = listed.filter(pc.invert(pc.is_in(listed, value_set=seen.combine_chunks())))

        async def first(name: str) -> StoredMessage | None:
            return await jetstream.message(bucket.stream, seq=through + 1, next_by_subj=name)

        # None: gone again since the list was made.
        found = await together(first, unseen.to_pylist())
        messages = sorted((one for one in found if one is not None), key=lambda one: one.seq)
        self._ahead = {message.seq for message in messages}
        delivered = (as_delivered(one, headers_only=self.options.meta_only) for one in messages)
        return Framer().feed(b"".join(frame_of(bucket.stream, one) for one in delivered))


def _looked_at(refill: asyncio.Future[Any]) -> None:
    # Where nobody reads any more, asyncio would complain of an exception that nobody saw.
    if not refill.cancelled():
        refill.exception()
