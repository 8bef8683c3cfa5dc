"""Split the byte stream of a NATS server into whole frames.

A *frame* is one protocol message of a server (docs.nats.io, "Client protocol")::

    MSG <subject> <sid> [reply] <#bytes>\\r\\n<payload>\\r\\n
    HMSG <subject> <sid> [reply] <#header bytes> <#total bytes>\\r\\n<headers><payload>\\r\\n
    INFO {...}\\r\\n    PING\\r\\n    PONG\\r\\n    +OK\\r\\n    -ERR '...'\\r\\n

Theory of operation. :class:`Framer` receives the bytes in any pieces and returns :class:`Frames`:
a table of positions into the received bytes instead of objects. So columns can be built from many
frames at once (``wire/columns.py``). ``scanner.py`` finds the frames.

The bytes are received directly into a *block* of memory (:meth:`Framer.room`), one read after the
other. So a frame that two reads divide is contiguous in memory and is not copied. Frames share
their block, which exists as long as they do. When a block is full, the framer allocates a new one
and copies only the unfinished tail into it. Blocks are small at low rates and grow to
``LARGEST_BLOCK`` under load, or more for a larger frame. The tail is parsed again only after all
bytes that its control line announced have been received (or, before that, after an LF). A payload
of 8 MiB that arrives in 32 KiB reads is copied once and parsed once.

The compiled scanner appends the frames of each read to the table of their block. So the frames of
several reads, or a selection of adjacent ones, are a view of that table (:meth:`Frames.chain`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire.framing import scanner
from nats_stream_source.wire.framing.parse import ACK, MAX_LINE, POSITIONS, Field, Table
from nats_stream_source.wire.framing.scanner import BufferPool

Buffer: TypeAlias = bytes | memoryview
"""Received bytes. A memoryview may extend beyond its frames, into bytes not received yet."""

Some = TypeVar("Some", bound="Frames")
"""Frames, or deliveries (``wire/consumer/deliveries.py``): a selection is of the same class."""

FrameFields: TypeAlias = tuple[bytes, bytes, bytes, bytes]
"""Subject, reply subject, header block and payload of a frame; empty for fields it lacks."""

SMALLEST_BLOCK, LARGEST_BLOCK = 64 << 10, 4 << 20
LARGEST_READ = 2 << 20
_MAX_PREALLOCATED = 64 << 20  # bytes of a frame for which memory is allocated in advance
_MIN_ROOM_SHARE = 8  # a read gets at least 1 / _MIN_ROOM_SHARE of a block
_LF = re.compile(b"\n")


class Row:
    """A row of the table as an attribute: int64, one element per frame."""

    def __init__(self, field: Field) -> None:
        self._field = field

    def __get__(self, frames: Frames, _owner: type[Frames]) -> NDArray[np.int64]:
        row: NDArray[np.int64] = frames.table[self._field]
        return row


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Frames:
    """Whole frames of one buffer, in order: a table of positions into ``buffer``, int64.

    Frame ``i`` is ``buffer[begin[i]:stop[i]]``, its final CRLF included. Its header block is
    ``buffer[header_begin[i]:payload_begin[i]]``, empty for MSG; its payload
    ``buffer[payload_begin[i]:payload_end[i]]``. Without a reply subject,
    ``reply_begin == reply_end``. Control frames have the sid -1, and all other fields are empty.

    ``acks`` are the numbers of the reply subjects that were parsed with the frames: delivered,
    stream_seq, consumer_seq, time and pending, 5 rows with one column per frame; -1 for frames
    whose numbers were not parsed. ``consumer.deliveries`` parses the rest.

    Attributes:
        table: one column per frame, one row per field; see ``parse.Field``.
        adjacent: whether each frame is known to start where the one before it stops.
        in_sequence: whether the frames are known to be consecutive deliveries of one consumer, with
            parsed numbers; see ``scanner.in_sequence``. What it implies is not verified again.
    """

    buffer: Buffer
    table: Table
    adjacent: bool = False
    in_sequence: bool = False

    begin = Row(Field.BEGIN)
    stop = Row(Field.STOP)
    kind = Row(Field.KIND)
    sid = Row(Field.SID)
    subject_begin = Row(Field.SUBJECT_BEGIN)
    subject_end = Row(Field.SUBJECT_END)
    reply_begin = Row(Field.REPLY_BEGIN)
    reply_end = Row(Field.REPLY_END)
    header_begin = Row(Field.HEADER_BEGIN)
    payload_begin = Row(Field.PAYLOAD_BEGIN)
    payload_end = Row(Field.PAYLOAD_END)

    @property
    def acks(self) -> Table:
        """The parsed numbers of the reply subjects."""
        return self.table[ACK]

    def __len__(self) -> int:
        return int(self.table.shape[1])

    @property
    def nbytes(self) -> int:
        """Total bytes of the frames, without other bytes of their buffer."""
        if self.adjacent:
            return int(self.stop[-1] - self.begin[0]) if len(self) else 0
        return int((self.stop - self.begin).sum())

    def select(self: Some, index: NDArray[Any] | slice) -> Some:
        """Return some frames, by a bool mask, integer indices or a slice. Shares the buffer."""
        if isinstance(index, slice):
            successive = index.step in (None, 1)
            adjacent, in_sequence = self.adjacent and successive, self.in_sequence and successive
            table = self.table[:, index]
            return type(self)(self.buffer, read_only(table), adjacent, in_sequence)
        if index.dtype == np.bool_:
            index = np.flatnonzero(index)
        # Not indexing, which would return the rows in pieces.
        return type(self)(self.buffer, read_only(self.table.take(index, axis=1)))

    def bytes_of(self, i: int) -> bytes:
        """Return frame ``i`` as it was received."""
        return bytes(self.buffer[self.begin[i] : self.stop[i]])

    def subject(self, i: int) -> bytes:
        """Return the subject of frame ``i``; empty for a control frame."""
        return bytes(self.buffer[self.subject_begin[i] : self.subject_end[i]])

    def reply(self, i: int) -> bytes:
        """Return the reply subject of frame ``i``; empty for a frame without one."""
        return bytes(self.buffer[self.reply_begin[i] : self.reply_end[i]])

    def header(self, i: int) -> bytes:
        """Return the header block of frame ``i`` (``wire/headers.py``); empty for MSG."""
        return bytes(self.buffer[self.header_begin[i] : self.payload_begin[i]])

    def payload(self, i: int) -> bytes:
        """Return the payload of frame ``i``, without its header block."""
        return bytes(self.buffer[self.payload_begin[i] : self.payload_end[i]])

    def fields(self) -> Iterator[FrameFields]:
        """Yield the fields of each frame."""
        buffer = self.buffer
        # Lists, because indexing arrays one element at a time costs more than the rest of the loop.
        for a, b, c, d, e, f, g in zip(
            *self.table[Field.SUBJECT_BEGIN : Field.DELIVERED].tolist(), strict=True
        ):
            yield bytes(buffer[a:b]), bytes(buffer[c:d]), bytes(buffer[e:f]), bytes(buffer[f:g])

    @classmethod
    def join(cls: type[Some], parts: Sequence[Some]) -> Some:
        """Concatenate frames into one new buffer.

        The new buffer contains only the bytes of the frames, so that a few frames do not keep all
        bytes in memory that were received with them.
        """
        pieces: list[memoryview] = []
        for part in parts:
            if not len(part):
                continue
            view = memoryview(part.buffer)
            # Adjacent frames are copied as one piece.
            begins, stops = [int(part.begin[0])], [int(part.stop[-1])]
            if not part.adjacent:
                edges = np.flatnonzero(part.begin[1:] != part.stop[:-1])
                begins += part.begin[edges + 1].tolist()
                stops = part.stop[edges].tolist() + stops
            pieces += [view[b:s] for b, s in zip(begins, stops, strict=True)]
        table = np.concatenate([_NO_FRAMES.table, *(part.table for part in parts)], axis=1)
        length = table[Field.STOP] - table[Field.BEGIN]
        table[POSITIONS] += np.cumsum(length) - length - table[Field.BEGIN]
        return cls(b"".join(pieces), read_only(table), adjacent=True)

    @classmethod
    def chain(cls: type[Some], parts: Sequence[Some]) -> Some:
        """Concatenate frames as :meth:`join` does, but share the buffer if all parts share one."""
        if len(parts) == 1:
            return parts[0]
        if any(part.buffer is not parts[0].buffer for part in parts) or not parts:
            return cls.join(parts)
        tables = [part.table for part in parts]
        table = _adjacent(tables)
        if table is None:
            table = np.concatenate(tables, axis=1)
        filled = [part for part in parts if len(part)]
        adjacent = all(part.adjacent for part in filled) and all(
            one.stop[-1] == other.begin[0] for one, other in itertools.pairwise(filled)
        )
        in_sequence = all(part.in_sequence for part in filled) and all(
            one.sid[-1] == other.sid[0]
            and one.table[Field.STREAM_SEQ, -1] < other.table[Field.STREAM_SEQ, 0]
            and one.table[Field.CONSUMER_SEQ, -1] + 1 == other.table[Field.CONSUMER_SEQ, 0]
            for one, other in itertools.pairwise(filled)
        )
        return cls(parts[0].buffer, read_only(table), adjacent, in_sequence)


def read_only(table: Table) -> Table:
    """Make a table read-only; returns it."""
    table.flags.writeable = False
    return table


def _adjacent(tables: Sequence[Table]) -> Table | None:
    """Return the columns of several tables as a view, if one follows the other in one array."""
    whole = tables[0].base
    if not isinstance(whole, np.ndarray) or whole.ndim != 2:
        return None
    first = end = _column(tables[0], whole)
    for table in tables:
        if table.base is not whole or _column(table, whole) != end:
            return None
        end += table.shape[1]
    adjacent: Table = whole[:, first:end]
    return adjacent


def _column(table: Table, whole: Table) -> int:
    """The column of ``whole`` at which ``table``, a view of it, starts."""
    offset: int = table.ctypes.data - whole.ctypes.data
    return offset // table.itemsize


_NO_FRAMES = Frames(b"", read_only(np.empty((len(Field), 0), np.int64)), adjacent=True)


class Framer:
    """Splits a stream of bytes into frames and keeps the unfinished tail.

    Pass bytes to :meth:`feed`, or, without a copy, receive them into :meth:`room`, report their
    number to :meth:`received` and call :meth:`frames`.
    """

    __slots__ = (
        *("_begin", "_block", "_blocks", "_columns", "_end", "_failed", "_needed", "_searched"),
        *("_size", "_tables"),
    )

    def __init__(self) -> None:
        self._size = SMALLEST_BLOCK
        self._blocks, self._tables = BufferPool(), BufferPool()
        self.reset()

    @property
    def pending(self) -> int:
        """Received bytes that were not returned as frames yet."""
        return self._end - self._begin

    def reset(self) -> None:
        """Drop the tail and a failure: the next bytes are the first of a new connection."""
        self._block = memoryview(b"")
        self._columns = scanner.Columns()
        self._begin = self._end = 0
        self._searched = 0  # an incomplete control line has no LF between _begin and here
        self._needed = 0  # length of the first frame of the tail; 0: its control line is incomplete
        self._failed = False

    def room(self, least: int = 1) -> memoryview:
        """Return memory for the next bytes of the stream, valid until the next call of any method.

        Args:
            least: its minimum size in bytes; usually it is much larger.
        """
        # A control line can announce 2 GB that never arrive: beyond the usual limit of servers,
        # allocate only as much again as was received.
        announced = min(self._needed - self.pending, max(_MAX_PREALLOCATED, self.pending))
        least = max(least, announced, self._size // _MIN_ROOM_SHARE)
        if len(self._block) - self._end < least:
            pending = self.pending
            size = max(self._size, pending + least)
            pooled = size == LARGEST_BLOCK
            block = (self._blocks.block(size) if pooled else np.empty(size, np.uint8)).data
            block[:pending] = self._block[self._begin : self._end]
            self._searched -= self._begin
            self._block, self._begin, self._end = block, 0, pending
            # The columns of the last block's frames are an estimate for those of this one.
            self._columns = scanner.Columns(
                int(self._columns.count * scanner.MARGIN), self._tables if pooled else None
            )
        return self._block[self._end : self._end + max(least, LARGEST_READ)]

    def received(self, count: int) -> None:
        """Report that ``count`` bytes were received into :meth:`room`."""
        self._end += count
        if self._end == len(self._block):
            # More bytes were available than the block could hold.
            self._size = min(2 * self._size, LARGEST_BLOCK)

    def frames(self) -> Frames:
        """Return the frames that have become complete since the last call, in order.

        Raises:
            ProtocolError: the bytes are not a frame of the NATS client protocol. All further calls
                until :meth:`reset` raise it too, since the start of the next frame is unknown.
        """
        if self._failed:
            raise ProtocolError(
                "could not read frames: an earlier frame of this connection was invalid; reconnect"
            )
        if not self._may_have_frame():
            return _NO_FRAMES
        block = self._block
        try:
            table, self._begin, self._needed = scanner.find_frames(
                block, self._begin, self._end, self._columns
            )
        except ProtocolError:
            self.reset()
            self._failed = True
            raise
        self._searched = self._end
        if not table.size:
            return _NO_FRAMES
        return Frames(block, read_only(table), True, scanner.in_sequence(table))

    def _may_have_frame(self) -> bool:
        if self._needed or self.pending >= MAX_LINE:
            return self.pending >= self._needed
        searched, self._searched = max(self._begin, self._searched), self._end
        return _LF.search(self._block, searched, self._end) is not None

    def feed(self, data: bytes) -> Frames:
        """Receive the next bytes; return the frames that are now complete, in order."""
        if not self._failed:
            self.room(len(data))[: len(data)] = data
            self.received(len(data))
        return self.frames()
