"""What an ordered reader receives: frames in, rows and flow-control replies out. Pure, no clock.

An :class:`Intake` belongs to one range. It separates deliveries from status messages, passes their
numbers to the cursor (``cursor.py``, which has the table of all transitions), selects the rows that
the range has, holds back initial values behind a missing one (:class:`HeldRows`), and
collects batches of bounded size (:class:`Batcher`).

Its inputs are frames (:meth:`Intake.feed`) and what the reader does or observes: a consumer was
created or lost, nothing was received for a moment, a reply has arrived. The reader has the timers,
the connection and the consumers.

:meth:`Intake.feed` is a generator: the reader publishes each :class:`Reply` before it takes the
next event. So the server has its reply before the rest of the frames is processed. Batches follow
at the end: while the reader's caller processes one, no reply to a received request is due.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from nats_stream_source.wire.columns import within
from nats_stream_source.wire.consumer.cursor import Cursor, Rebuild
from nats_stream_source.wire.consumer.deliveries import Deliveries, other_frames
from nats_stream_source.wire.consumer.messages import CONTROL, ConsumerStatus
from nats_stream_source.wire.framing.frames import Frames

_MAX_HELD_BYTES = 64 << 20  # of the initial values behind a missing one
_LARGE_ENOUGH = 256 << 10  # bytes of a batch that may end at a buffer border
_SPARSE = 4  # a buffer is released if its frames fill less than 1 / _SPARSE of it


Reply: TypeAlias = str
"""The subject to which the reader publishes an empty message (flow control)."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """A message on ``subject`` that is neither a delivery nor a status was ignored."""

    subject: str


Event: TypeAlias = Deliveries | Reply | Ignored
"""A batch of rows, or what the reader does beside."""

Select: TypeAlias = Callable[[Deliveries], Deliveries]
"""Returns the rows of a range, where the consumer delivers more."""


class Intake:
    """The frames of one range ``(start, end]``, over all its consumers.

    Args:
        start, end, initial_through: as :class:`Cursor`.
        prefix: messages whose subjects do not start with it are left out.
        batch_rows, batch_bytes: the maximum size of a batch.
        eager: return rows at once, not only full batches. An empty batch is the first one, and
            reports the progress that only a heartbeat shows.

    Attributes:
        cursor: the progress of the range, and the reasons of the rebuilds.
        last_row: :func:`last_row` of the messages that were kept.
        left_out: the number of messages that lacked ``prefix``.
        stalled: whether the server waits for a reply to flow control, by its last heartbeat.
        loss: what the last lost consumer showed, for the log.
    """

    def __init__(
        self,
        start: int,
        end: int,
        *,
        initial_through: int = 0,
        prefix: str = "",
        batch_rows: int = 8192,
        batch_bytes: int = 8 << 20,
        eager: bool = False,
    ) -> None:
        self.cursor = Cursor(start, end, initial_through)
        self.last_row: tuple[int, int] | None = None
        self.left_out = 0
        self.stalled = False
        self.loss = ""
        self._initial_values = initial_through > 0
        self._prefix = prefix
        self._eager = eager
        self._reported = -1  # sequence up to which an eager reader has reported progress
        self._select: Select | None = None
        self._batcher = Batcher(batch_rows, batch_bytes)
        self._held = HeldRows()

    @property
    def drained(self) -> bool:
        """Whether all received rows up to ``cursor.seen_through`` were returned."""
        return not len(self._batcher) and not self._held.reach(self.cursor.seen_through)

    # -- inputs ---------------------------------------------------------------------------------

    def created(self, select: Select | None = None) -> None:
        """A consumer was created; ``select`` returns the rows of what it delivers."""
        self.cursor.created()
        self.stalled = False
        self.loss = ""
        self._select = select

    def lost(self, reason: Rebuild, detail: str = "") -> None:
        """The consumer cannot be used any more, or could not be created."""
        self.loss = detail
        self.cursor.lost(reason)

    def idle(self) -> Reply | None:
        """Nothing was received for a moment; returns a reply that was deferred."""
        return self.cursor.idle().reply

    def confirmed(self, reply: str) -> None:
        """The server has the reply that was published to ``reply``."""
        self.cursor.confirmed(reply)

    def feed(self, received: Iterable[Frames]) -> Iterator[Event]:
        """Receive frames of the current consumer; yield events, the batches at the end.

        Raises:
            ProtocolError: a reply subject or a status is invalid.
        """
        for frames in received:
            begin = 0
            for status in other_frames(frames):
                self._deliver(frames.select(slice(begin, status)))
                yield from self._status(frames, status)
                begin = status + 1
            self._deliver(frames.select(slice(begin, len(frames))) if begin else frames)
        yield from self._batches()

    def rest(self) -> Iterator[Deliveries]:
        """The rows that did not fill a batch, at the end of the range."""
        while (batch := self._batcher.pop()) is not None:
            yield batch

    # -- deliveries -----------------------------------------------------------------------------

    def _batches(self) -> Iterator[Deliveries]:
        pop = self._batcher.pop if self._eager else self._batcher.pop_full
        while (batch := pop()) is not None:
            self._reported = self.cursor.seen_through
            yield batch
        if self._eager and self.cursor.seen_through > self._reported:
            self._reported = self.cursor.seen_through
            yield Deliveries.join([])

    def _deliver(self, frames: Frames) -> None:
        if not len(frames):
            return
        rows = Deliveries.of(frames)
        boundaries: list[int] = []
        if self._initial_values and not rows.in_sequence:
            ends = (np.diff(rows.stream_seq) <= 0) | (np.diff(rows.consumer_seq) != 1)
            boundaries = (np.flatnonzero(ends) + 1).tolist()
        for begin, end in itertools.pairwise((0, *boundaries, len(rows))):
            step = self.cursor.deliver(
                rows.consumer_seq[begin:end],
                rows.stream_seq[begin:end],
                in_sequence=rows.in_sequence,
            )
            if step.stop > step.first:
                self._keep(rows.select(slice(begin + step.first, begin + step.stop)), step.rows)

    def _keep(self, rows: Deliveries, kept: NDArray[np.bool_] | None) -> None:
        """Pass kept rows on; hold back initial values behind a missing one."""
        self.last_row = last_row(rows)
        if kept is not None and not kept.all():
            rows = rows.select(kept)
        rows = self._selected(rows)
        position = self.cursor.position
        if len(self._held) or (len(rows) and rows.stream_seq[-1] > position):
            added = len(rows)
            self._held.add(rows)
            rows = self._held.release(position)
            if added and self._held.size > _MAX_HELD_BYTES and self.cursor.reads_initial_values:
                self.lost(Rebuild.GAP, "too many rows follow a missing row")
        if len(rows):
            self._batcher.add(rows)

    def _selected(self, rows: Deliveries) -> Deliveries:
        # Before rows are held back: the next consumer may have another filter.
        if self._select is not None:
            return self._select(rows)
        kept = within(rows, self._prefix)
        self.left_out += len(rows) - len(kept)
        return kept

    # -- status messages ------------------------------------------------------------------------

    def _status(self, frames: Frames, index: int) -> Iterator[Reply | Ignored]:
        """Receive a frame that is not a delivery: a status message of the consumer (ADR-15)."""
        subject = frames.reply(index).decode("utf-8", "surrogateescape")
        status = ConsumerStatus.parse(frames.header(index), subject)
        if status is None:
            yield Ignored(frames.subject(index).decode("utf-8", "replace"))
            return
        if status.code != CONTROL:
            self.lost(Rebuild.CONSUMER_GONE, f"{status.code} {status.description}".strip())
            return
        if status.reply is not None:
            reply = self.cursor.flow_control(status.reply).reply
        elif status.last_consumer is None or status.last_stream is None:
            self.lost(Rebuild.GAP, "a heartbeat without its sequences")
            return
        else:
            self.stalled = status.stalled is not None
            action = self.cursor.heartbeat(status.last_consumer, status.last_stream, status.stalled)
            reply = action.reply
        if reply is not None:
            yield reply


def last_row(rows: Deliveries) -> tuple[int, int] | None:
    """Stream sequence and timestamp, in nanoseconds, of the last of ``rows``; None without one."""
    return (int(rows.stream_seq[-1]), int(rows.time[-1])) if len(rows) else None


class Batcher:
    """Collects deliveries and returns them in order, one batch of bounded size at a time.

    Deliveries arrive in runs of any length. A batch is full at ``max_rows`` rows or ``max_bytes``
    bytes of frames and numbers, whichever comes first. A single larger frame is a batch of its own.

    A batch that lies in one buffer is not copied, so a batch that is large enough is also full
    where another buffer starts. A few frames in a large buffer are copied out of it, so that the
    memory in use is never much larger than the frames themselves.
    """

    def __init__(self, max_rows: int, max_bytes: int) -> None:
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._runs: deque[Deliveries] = deque()
        self._rows = 0
        self._bytes = 0

    def __len__(self) -> int:
        return self._rows

    def add(self, rows: Deliveries) -> None:
        """Append deliveries."""
        if self._runs and self._runs[-1].buffer is not rows.buffer:
            self._release_sparse_buffer()
        self._runs.append(rows)
        self._rows += len(rows)
        self._bytes += rows.size

    def pop_full(self) -> Deliveries | None:
        """Remove and return the next full batch; None if the frames do not fill one."""
        if self._rows >= self._max_rows or self._bytes >= self._max_bytes:
            return self._next_batch()
        if self._runs and self._runs[0].buffer is not self._runs[-1].buffer:
            first = self._runs[0].buffer
            complete = sum(run.nbytes for run in self._runs if run.buffer is first)
            return self._next_batch() if complete >= _LARGE_ENOUGH else None
        return None

    def pop(self) -> Deliveries | None:
        """Remove and return the next batch, full or not; None if no frames remain."""
        return self._next_batch() if self._rows else None

    def _release_sparse_buffer(self) -> None:
        """Copy the frames out of the last buffer, which is complete, if they fill little of it."""
        runs: list[Deliveries] = []
        while self._runs and (not runs or self._runs[-1].buffer is runs[0].buffer):
            runs.insert(0, self._runs.pop())
        size = sum(run.nbytes for run in runs)
        if size < min(_LARGE_ENOUGH, len(runs[0].buffer) / _SPARSE):
            runs = [Deliveries.join(runs)]
        self._runs.extend(runs)

    def _next_batch(self) -> Deliveries:
        batch: list[Deliveries] = []
        rows = size = nbytes = 0
        while self._runs and rows < self._max_rows and size < self._max_bytes:
            if nbytes >= _LARGE_ENOUGH and self._runs[0].buffer is not batch[-1].buffer:
                break
            run = self._runs.popleft()
            fitting = run.fitting(self._max_bytes - size)
            fitting = max(min(fitting, self._max_rows - rows), 0 if rows else 1)
            if fitting < len(run):
                self._runs.appendleft(run.select(slice(fitting, len(run))))
                run = run.select(slice(0, fitting))
            if not fitting:
                break
            batch.append(run)
            rows += fitting
            size += run.size
            nbytes += run.nbytes
        self._rows -= rows
        self._bytes -= size
        return Deliveries.chain(batch)


class HeldRows:
    """Rows that wait for a missing row before them, in the order of arrival.

    Attributes:
        size: bytes of the rows and of their numbers.
    """

    def __init__(self) -> None:
        self.size = 0
        self._runs: list[Deliveries] = []

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def add(self, rows: Deliveries) -> None:
        """Hold ``rows``; none of their sequences is held already."""
        if len(rows):
            # Joined, so that a few rows do not keep the whole received block in memory.
            self._runs.append(Deliveries.join([rows]))
            self.size += rows.size

    def reach(self, seq: int) -> bool:
        """Whether a row at ``seq`` or before it is held."""
        return any(int(run.stream_seq[0]) <= seq for run in self._runs)

    def release(self, through: int) -> Deliveries:
        """Remove and return the rows up to the sequence ``through``, in rising order."""
        if not self.reach(through):
            return Deliveries.join([])
        rows = Deliveries.join(self._runs)
        order = np.argsort(rows.stream_seq, kind="stable")
        count = int(np.searchsorted(rows.stream_seq[order], through, side="right"))
        self._runs, self.size = [], 0
        self.add(rows.select(order[count:]))
        return Deliveries.join([rows.select(order[:count])])
