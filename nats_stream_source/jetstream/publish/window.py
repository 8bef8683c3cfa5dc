"""The window of a batch publisher: the messages that were encoded and do not have their PubAcks.

A window is a sequence of chunks; each is one batch of encoded frames. In each chunk, the messages
before ``base`` are done, those before ``sent`` were sent. Going back sets ``sent`` to ``base``. So
``base`` moves in the first chunk only: the messages of later chunks are behind one that is not
done.

Each time the window goes back begins a new *sending*, with other serials. A PubAck of an earlier
sending shows that a message is stored, but not that it is stored *again*, after the messages before
it. So only PubAcks of the current sending make a message done; otherwise the messages that were
sent again could be lost after the window was complete, and the last message of a subject would not
be the last one that was published.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nats_stream_source.wire.publish.frames import EncodedFrames, MessageColumns

MAX_BYTES = 8 << 20  # of the messages in flight
_PIECE_BYTES = 128 << 10  # of one write to the socket
_SERIALS = 10**12  # of each sending

Encode = Callable[[MessageColumns, int, int], EncodedFrames]
"""Encodes messages. The second argument is the serial of the first one, the third one is the index
of the first message to send: those before it are done."""


@dataclass(slots=True, eq=False)
class Chunk:
    """Messages that were encoded together.

    Attributes:
        first_row: the number of the first message among all messages of the publisher.
        base: messages before it, and those of all chunks before, are done.
        start: the first message that the current sending sends.
        sent: messages before it have been sent.
        allowed: messages before it may be sent; None: all.
        ended_at: the message at which the server has ended the current sending; None if it has not.
        done: which messages have their PubAcks of the current sending, or were rejected.
        stored: which messages have a PubAck of any sending.
        rejected: which messages were rejected.
        ends: the frames that end the batches of earlier sendings (fast ingest).
    """

    messages: MessageColumns
    frames: EncodedFrames
    first_row: int
    allowed: int | None = None
    base: int = 0
    start: int = 0
    sent: int = 0
    ended_at: int | None = None
    done: NDArray[np.bool_] = field(init=False)
    stored: NDArray[np.bool_] = field(init=False)
    rejected: NDArray[np.bool_] = field(init=False)
    ends: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.done, self.stored, self.rejected = np.zeros((3, len(self.frames)), np.bool_)

    @property
    def complete(self) -> bool:
        """Whether all messages are done."""
        return self.base == len(self.frames)

    def find(
        self, serial: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
        """The messages with these serials.

        Returns:
            the index in this chunk; whether the message is one of this chunk, without which the
            index is undefined; whether the serial is one of the current sending.
        """
        index = serial % _SERIALS - self.first_row
        mine = (serial >= 0) & (index >= 0) & (index < len(self.frames))
        return index, mine, mine & (serial // _SERIALS == self.frames.first_serial // _SERIALS)

    def add_stored(self, index: NDArray[np.int64] | slice) -> int:
        """Note that messages are stored; returns how many of them were not known to be."""
        part = index
        if not isinstance(part, slice):
            part = slice(int(part.min()), int(part.max()) + 1)
        before = np.count_nonzero(self.stored[part])
        self.stored[index] = True
        return int(np.count_nonzero(self.stored[part]) - before)

    def advance(self) -> bool:
        """Move ``base`` behind the messages that are done; returns whether it moves."""
        before = self.base
        rest = self.done[before : self.sent]
        missing = int(rest.argmin()) if rest.size else 0
        self.base += rest.size if rest.size and rest[missing] else missing
        return self.base > before

    def go_back(self, frames: EncodedFrames, allowance: int | None) -> None:
        """Begin the sending with the serials of ``frames``, at ``base``."""
        self.frames, self.start, self.sent = frames, self.base, self.base
        self.allowed = None if allowance is None else self.base + allowance
        self.ended_at = None
        self.done[self.base :] = self.rejected[self.base :]


class Window:
    """The chunks with messages that are not done.

    Args:
        max_in_flight: the maximum number of messages from the first one that is not done to the
            last one that was sent. Their bytes are at most :data:`MAX_BYTES`, or one message.
        encode: encodes messages.
        allowance: the number of messages of a chunk that may be sent before ``Chunk.allowed`` is
            raised; None for all.
    """

    def __init__(self, max_in_flight: int, encode: Encode, allowance: int | None = None) -> None:
        self.max_in_flight = max_in_flight
        self._encode = encode
        self._allowance = allowance
        self._rows = 0
        self._sending = 0
        self.chunks: deque[Chunk] = deque()

    @property
    def in_flight(self) -> int:
        """Number of messages from the first one that is not done to the last one sent."""
        return sum(chunk.sent - chunk.base for chunk in self.chunks)

    def pieces(self) -> Iterator[memoryview]:
        """The frames that may be sent now, in pieces; each is marked as sent when it is taken."""
        rows = self.in_flight
        size = sum(chunk.frames.nbytes(chunk.base, chunk.sent) for chunk in self.chunks)
        for chunk in self.chunks:
            frames = chunk.frames
            while chunk.sent < len(frames):
                room = min(MAX_BYTES - size, _PIECE_BYTES)
                border = (int(frames.ends[chunk.sent - 1]) if chunk.sent else 0) + room
                stop = int(np.searchsorted(frames.ends, border, side="right"))
                # A message that is larger than a piece, or than the window, is sent alone.
                if not rows or room == _PIECE_BYTES:
                    stop = max(stop, chunk.sent + 1)
                stop = min(stop, chunk.sent + self.max_in_flight - rows, len(frames))
                if chunk.allowed is not None:
                    stop = min(stop, chunk.allowed)
                if stop <= chunk.sent:
                    return
                start, chunk.sent = chunk.sent, stop
                rows += stop - start
                size += frames.nbytes(start, stop)
                yield frames.bytes_of(start, stop)

    def append(self, messages: MessageColumns) -> Chunk:
        """Encode messages, and add them at the end."""
        frames = self._encode(messages, self._sending * _SERIALS + self._rows, 0)
        chunk = Chunk(messages, frames, self._rows, self._allowance)
        self._rows += len(messages)
        self.chunks.append(chunk)
        return chunk

    def advance(self) -> bool:
        """Remove the messages at the front that are done; returns whether there were any."""
        moved = False
        while self.chunks:
            moved |= self.chunks[0].advance()
            if not self.chunks[0].complete:
                break
            self.chunks.popleft()
        return moved

    def go_back(self) -> None:
        """Send again, from the first message that is not done."""
        self._sending += 1
        for chunk in self.chunks:
            first_serial = self._sending * _SERIALS + chunk.first_row
            frames = self._encode(chunk.messages, first_serial, chunk.base)
            chunk.go_back(frames, self._allowance)

    def locate(self, serial: int) -> tuple[Chunk, int, bool] | None:
        """The chunk and index of a message, and whether the serial is one of the current sending.

        Returns None for a serial of a message that is done, or of none.
        """
        for chunk in self.chunks:
            index, mine, current = chunk.find(np.array([serial]))
            if mine[0]:
                return chunk, int(index[0]), bool(current[0])
        return None

    def first_subject(self) -> str:
        """The subject of the first message that is not done; empty if all are done."""
        for chunk in self.chunks:
            if not chunk.complete:
                return chunk.messages.subject(chunk.base)
        return ""

    def has_in_flight(self, subject: str) -> bool:
        """Whether a message on ``subject`` is in flight."""
        return any(
            chunk.messages.subject(index) == subject
            for chunk in self.chunks
            for index in range(chunk.base, chunk.sent)
        )
