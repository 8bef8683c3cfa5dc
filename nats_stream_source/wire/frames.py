"""A stream of bytes from a NATS server, cut into whole frames.

A *frame* is what a server sends as one piece (docs.nats.io, "Client protocol")::

    MSG <subject> <sid> [reply] <#bytes>\\r\\n<payload>\\r\\n
    HMSG <subject> <sid> [reply] <#header bytes> <#total bytes>\\r\\n<headers><payload>\\r\\n
    INFO {...}\\r\\n    PING\\r\\n    PONG\\r\\n    +OK\\r\\n    -ERR '...'\\r\\n

Theory of operation. :class:`Framer` is fed with the bytes as they arrive, cut anywhere, and gives
back :class:`Frames`: no objects but positions into the received bytes, one numpy array for each
field, so that columns can be made of many frames at once (``wire/columns.py``). Where the
frames are is found by ``wire/scan.py``.

What is unfinished at the end of a read is kept as a list of parts. They are joined once, when as
many bytes are there as the control line announced (or, before that, the line's LF): a payload of
8 MiB that arrives in 32 KiB reads is copied once and looked at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire import scan


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
    """

    buffer: bytes
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
        )

    def bytes_of(self, i: int) -> bytes:
        """Frame ``i`` as it was received."""
        return self.buffer[self.begin[i] : self.stop[i]]

    def subject(self, i: int) -> bytes:
        """The subject of frame ``i``; empty for a control frame."""
        return self.buffer[self.subject_begin[i] : self.subject_end[i]]

    def reply(self, i: int) -> bytes:
        """The reply subject of frame ``i``; empty where there is none."""
        return self.buffer[self.reply_begin[i] : self.reply_end[i]]

    def header(self, i: int) -> bytes:
        """The header block of frame ``i``, see ``wire/headers.py``; empty where there is none."""
        return self.buffer[self.header_begin[i] : self.payload_begin[i]]

    def payload(self, i: int) -> bytes:
        """The payload of frame ``i``, without its header block."""
        return self.buffer[self.payload_begin[i] : self.payload_end[i]]

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
        table: scan.Table = np.empty((scan.FIELDS, sum(map(len, parts))), np.int64)
        if parts:
            for row, name in zip(table, _FIELDS, strict=True):
                np.concatenate([getattr(part, name) for part in parts], out=row)
        length = table[_STOP] - table[_BEGIN]
        table[_POSITIONS] += np.cumsum(length) - length - table[_BEGIN]
        return _frames(b"".join(pieces), table)


_FIELDS = tuple(field.name for field in fields(Frames))[1:]
_BEGIN, _STOP = _FIELDS.index("begin"), _FIELDS.index("stop")
_POSITIONS = [i for i, name in enumerate(_FIELDS) if name not in ("kind", "sid")]


def _frames(buffer: bytes, table: scan.Table) -> Frames:
    table.setflags(write=False)
    begin, stop, kind, *others = table
    return Frames(buffer, begin, stop, kind.astype(np.uint8), *others)


_NONE = _frames(b"", np.empty((scan.FIELDS, 0), np.int64))


class Framer:
    """Cuts a stream of bytes into frames, and keeps the unfinished tail."""

    __slots__ = ("_failed", "_needed", "_parts", "_pending")

    def __init__(self) -> None:
        self.reset()

    def __repr__(self) -> str:
        return f"<Framer {'failed' if self._failed else f'pending {self._pending}'}>"

    @property
    def pending(self) -> int:
        """Bytes of the unfinished tail."""
        return self._pending

    def reset(self) -> None:
        """Forget the tail, and a failure: what is fed next begins a new connection."""
        self._parts: list[bytes] = []
        self._pending = 0
        self._needed = 0  # length of the frame that the tail begins; 0: its line is not whole
        self._failed = False

    def feed(self, data: bytes) -> Frames:
        """Take the next bytes of the stream, and give the frames that are now whole, in order.

        Raises:
            ProtocolError: the bytes are no frame of the NATS client protocol; and from then on
                until :meth:`reset`, since where the next frame begins is not known any more.
        """
        if self._failed:
            raise ProtocolError("bytes after a frame that could not be read: reconnect")
        if self._parts:
            self._parts.append(data)
            self._pending += len(data)
            if self._needed:
                if self._pending < self._needed:
                    return _NONE
            elif self._pending < scan.MAX_LINE and b"\n" not in data:
                return _NONE
            data = b"".join(self._parts)
        try:
            table, position, self._needed = scan.cut(data)
        except ProtocolError:
            self.reset()
            self._failed = True
            raise
        self._pending = len(data) - position
        self._parts = [data[position:]] if self._pending else []
        return _frames(data, table) if table.size else _NONE
