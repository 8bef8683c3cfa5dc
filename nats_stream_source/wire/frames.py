"""A stream of bytes from a NATS server, cut into whole frames.

A *frame* is what a server sends as one piece (docs.nats.io, "Client protocol")::

    MSG <subject> <sid> [reply] <#bytes>\\r\\n<payload>\\r\\n
    HMSG <subject> <sid> [reply] <#header bytes> <#total bytes>\\r\\n<headers><payload>\\r\\n
    INFO {...}\\r\\n    PING\\r\\n    PONG\\r\\n    +OK\\r\\n    -ERR '...'\\r\\n

Theory of operation. :class:`Framer` takes the bytes as they arrive, cut anywhere, and gives back
:class:`Frames`: no objects but positions into the received bytes, one numpy array for each field,
so that columns can be made of many frames at once (``wire/columns.py``). Where the frames are is
found by ``wire/scan.py``.

The bytes are received straight into a *block* of memory (:meth:`Framer.room`), one read behind the
other, so that a frame that two reads cut is whole in place and nothing is copied. Frames share
their block, and it lives as long as they do. When it is full, the framer takes a new one and
copies only the unfinished tail into it. Blocks are small while little arrives, and as large as
``LARGEST_BLOCK`` under load, or larger for a larger frame. The tail is looked at again only when as
many bytes are there as its control line announced (or, before that, when an LF came): a payload of
8 MiB that arrives in 32 KiB reads is copied once and looked at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire import scan

Buffer: TypeAlias = bytes | memoryview
"""Received bytes. A memoryview may go on beyond the frames in it, into bytes not received yet."""

SMALLEST_BLOCK, LARGEST_BLOCK = 64 << 10, 4 << 20
LARGEST_READ = 1 << 20
_BELIEVED = 64 << 20  # bytes of a frame for which room is made at once
_LEAST_ROOM = 8  # a read gets at least one part in so many of a block
_LF = re.compile(b"\n")


class Kind(IntEnum):
    """What a frame is: a message without or with a header block, or anything else."""

    CONTROL = 0
    MSG = 1
    HMSG = 2


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Frames:
    """Whole frames of one buffer, in order: arrays of one length, with positions into ``buffer``.

    Frame ``i`` is ``buffer[begin[i]:stop[i]]``, its final CRLF included. Its header block is
    ``buffer[header_begin[i]:payload_begin[i]]``, empty for MSG; its payload
    ``buffer[payload_begin[i]:payload_end[i]]``. Where there is no reply subject,
    ``reply_begin == reply_end``. Control frames have the sid -1 and all other fields empty.

    ``acks`` are the numbers in the reply subjects that were read on the way: delivered, stream_seq,
    consumer_seq, time and pending, 5 rows, one column for each frame; -1 where they were not read.
    None if none were. :func:`~nats_stream_source.wire.acks.with_acks` reads the rest.
    """

    buffer: Buffer
    begin: NDArray[np.int64]
    stop: NDArray[np.int64]
    kind: NDArray[np.uint8]
    sid: NDArray[np.int64]
    subject_begin: NDArray[np.int64]
    subject_end: NDArray[np.int64]
    reply_begin: NDArray[np.int64]
    reply_end: NDArray[np.int64]
    header_begin: NDArray[np.int64]
    payload_begin: NDArray[np.int64]
    payload_end: NDArray[np.int64]
    acks: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return self.begin.size

    def __repr__(self) -> str:
        counts = np.bincount(self.kind, minlength=len(Kind)).tolist()
        kinds = ", ".join(f"{n} {kind.name}" for kind, n in zip(Kind, counts, strict=True) if n)
        return f"<Frames {kinds or 'none'}, {self.nbytes} bytes>"

    @property
    def nbytes(self) -> int:
        """Total bytes of the frames themselves, whatever the size of the buffer they lie in."""
        return int((self.stop - self.begin).sum())

    def select(self, index: NDArray[Any] | slice) -> Frames:
        """Some of the frames: by a bool mask, integer indices or a slice. Shares the buffer."""
        return Frames(
            self.buffer,
            self.begin[index],
            self.stop[index],
            self.kind[index],
            self.sid[index],
            self.subject_begin[index],
            self.subject_end[index],
            self.reply_begin[index],
            self.reply_end[index],
            self.header_begin[index],
            self.payload_begin[index],
            self.payload_end[index],
            None if self.acks is None else self.acks[:, index],
        )

    def bytes_of(self, i: int) -> bytes:
        """Frame ``i`` as it was received."""
        return bytes(self.buffer[self.begin[i] : self.stop[i]])

    def subject(self, i: int) -> bytes:
        """The subject of frame ``i``; empty for a control frame."""
        return bytes(self.buffer[self.subject_begin[i] : self.subject_end[i]])

    def reply(self, i: int) -> bytes:
        """The reply subject of frame ``i``; empty where there is none."""
        return bytes(self.buffer[self.reply_begin[i] : self.reply_end[i]])

    def header(self, i: int) -> bytes:
        """The header block of frame ``i``, see ``wire/headers.py``; empty where there is none."""
        return bytes(self.buffer[self.header_begin[i] : self.payload_begin[i]])

    def payload(self, i: int) -> bytes:
        """The payload of frame ``i``, without its header block."""
        return bytes(self.buffer[self.payload_begin[i] : self.payload_end[i]])

    @staticmethod
    def join(parts: Sequence[Frames]) -> Frames:
        """The frames of several selections, one after the other, in one new buffer.

        The buffer holds the frames' own bytes and nothing else: that is how a few frames are kept
        without keeping all that was received with them.
        """
        pieces: list[memoryview] = []
        for part in parts:
            if not len(part):
                continue
            view = memoryview(part.buffer)
            # Frames that adjoin are copied as one piece.
            edges = np.flatnonzero(part.begin[1:] != part.stop[:-1])
            begins = [int(part.begin[0]), *part.begin[edges + 1].tolist()]
            stops = [*part.stop[edges].tolist(), int(part.stop[-1])]
            pieces += [view[b:s] for b, s in zip(begins, stops, strict=True)]
        table = _tables(parts)
        length = table[_STOP] - table[_BEGIN]
        table[_POSITIONS] += np.cumsum(length) - length - table[_BEGIN]
        return _frames(b"".join(pieces), table)

    @staticmethod
    def chain(parts: Sequence[Frames]) -> Frames:
        """As :meth:`join`, but where all parts lie in one buffer, they go on sharing it."""
        if len(parts) == 1:
            return parts[0]
        if any(part.buffer is not parts[0].buffer for part in parts) or not parts:
            return Frames.join(parts)
        return _frames(parts[0].buffer, _tables(parts))


_FIELDS = tuple(field.name for field in fields(Frames))[1:-1]
_BEGIN, _STOP = _FIELDS.index("begin"), _FIELDS.index("stop")
_POSITIONS = [i for i, name in enumerate(_FIELDS) if name not in ("kind", "sid")]


def _frames(buffer: Buffer, table: scan.Table) -> Frames:
    table.setflags(write=False)
    acks = table[scan.FIELDS :]
    known = bool(acks.size) and int(acks[0].max()) >= 0
    return Frames(
        buffer,
        table[0],
        table[1],
        table[2].astype(np.uint8),
        table[3],
        table[4],
        table[5],
        table[6],
        table[7],
        table[8],
        table[9],
        table[10],
        acks if known else None,
    )


def _tables(parts: Sequence[Frames]) -> scan.Table:
    table: scan.Table = np.empty((scan.FIELDS + scan.ACKS, sum(map(len, parts))), np.int64)
    if parts:
        for row, name in zip(table, _FIELDS, strict=False):
            np.concatenate([getattr(part, name) for part in parts], out=row)
    begin = 0
    for part in parts:
        end = begin + len(part)
        table[scan.FIELDS :, begin:end] = -1 if part.acks is None else part.acks
        begin = end
    return table


_NONE = _frames(b"", np.empty((scan.FIELDS + scan.ACKS, 0), np.int64))


class Framer:
    """Cuts a stream of bytes into frames, and keeps the unfinished tail.

    Bytes come in either by :meth:`feed`, or without a copy: received into :meth:`room`, reported
    by :meth:`received`, and cut by :meth:`frames`.
    """

    __slots__ = ("_begin", "_block", "_end", "_failed", "_needed", "_searched", "_size")

    def __init__(self) -> None:
        self._size = SMALLEST_BLOCK
        self.reset()

    def __repr__(self) -> str:
        return f"<Framer {'failed' if self._failed else f'pending {self.pending}'}>"

    @property
    def pending(self) -> int:
        """Bytes that are no frame yet: the unfinished tail, and what was not cut yet."""
        return self._end - self._begin

    def reset(self) -> None:
        """Forget the tail, and a failure: what comes next begins a new connection."""
        self._block = memoryview(b"")
        self._begin = self._end = 0
        self._searched = 0  # no LF between _begin and here, when the tail's line is not whole
        self._needed = 0  # length of the frame that the tail begins; 0: its line is not whole
        self._failed = False

    def room(self, least: int = 1) -> memoryview:
        """Memory for the next bytes of the stream, valid until the next call of any method.

        Args:
            least: how many bytes it must hold; it is mostly much larger.
        """
        # A line can announce 2 GB that never come: beyond what servers allow, room is made for as
        # much again as has come.
        announced = min(self._needed - self.pending, max(_BELIEVED, self.pending))
        least = max(least, announced, self._size // _LEAST_ROOM)
        if len(self._block) - self._end < least:
            pending = self.pending
            block = np.empty(max(self._size, pending + least), np.uint8).data
            block[:pending] = self._block[self._begin : self._end]
            self._searched -= self._begin
            self._block, self._begin, self._end = block, 0, pending
        return self._block[self._end : self._end + max(least, LARGEST_READ)]

    def received(self, count: int) -> None:
        """``count`` bytes were put into :meth:`room`."""
        self._end += count
        if self._end == len(self._block):
            # More was there than there was room for.
            self._size = min(2 * self._size, LARGEST_BLOCK)

    def frames(self) -> Frames:
        """The frames that are now whole and were not given yet, in order.

        Raises:
            ProtocolError: the bytes are no frame of the NATS client protocol; and from then on
                until :meth:`reset`, since where the next frame begins is not known any more.
        """
        if self._failed:
            raise ProtocolError("bytes after a frame that could not be read: reconnect")
        if not self._worth_a_look():
            return _NONE
        block = self._block
        try:
            table, self._begin, self._needed = scan.cut(block, self._begin, self._end)
        except ProtocolError:
            self.reset()
            self._failed = True
            raise
        self._searched = self._end
        return _frames(block, table) if table.size else _NONE

    def _worth_a_look(self) -> bool:
        if self._needed or self.pending >= scan.MAX_LINE:
            return self.pending >= self._needed
        searched, self._searched = max(self._begin, self._searched), self._end
        return _LF.search(self._block, searched, self._end) is not None

    def feed(self, data: bytes) -> Frames:
        """Take the next bytes of the stream, and give the frames that are now whole, in order.

        Raises:
            ProtocolError: as :meth:`frames`.
        """
        if not self._failed:
            self.room(len(data))[: len(data)] = data
            self.received(len(data))
        return self.frames()
