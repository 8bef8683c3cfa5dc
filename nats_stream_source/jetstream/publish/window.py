"""The window of a batch publisher: the messages that were encoded and do not have their PubAcks.

A window is a sequence of chunks; each is one batch of encoded frames. In each chunk, the messages
before ``base`` are done, those before ``sent`` were sent. Going back sets ``sent`` to ``base``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nats_stream_source.wire.publish.frames import EncodedFrames, MessageColumns

MAX_BYTES = 8 << 20  # of the messages in flight
_PIECE_BYTES = 128 << 10  # of one write to the socket


@dataclass(slots=True, eq=False)
class Chunk:
    """Messages that were encoded together.

    Attributes:
        base: messages before it are done.
        sent: messages before it have been sent.
        done: which messages have their PubAcks, or were rejected.
    """

    messages: MessageColumns
    frames: EncodedFrames
    base: int = 0
    sent: int = 0
    done: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.done = np.zeros(len(self.frames), np.bool_)

    def __repr__(self) -> str:
        return f"<Chunk {self.base} done, {self.sent} sent of {len(self.frames)}>"

    @property
    def complete(self) -> bool:
        """Whether all messages are done."""
        return self.base == len(self.frames)

    def mark(self, index: NDArray[np.int64]) -> int:
        """Mark messages as done; returns how many of them were not done before."""
        new = int(np.count_nonzero(~self.done[np.unique(index)]))
        self.done[index] = True
        rest = self.done[self.base : self.sent]
        missing = int(rest.argmin()) if rest.size else 0
        self.base += rest.size if rest.size and rest[missing] else missing
        return new


class Window:
    """The chunks with messages that are not done.

    Args:
        max_in_flight: the maximum number of messages from the first one that is not done to the
            last one that was sent. Their bytes are at most :data:`MAX_BYTES`, or one message.
    """

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self.chunks: deque[Chunk] = deque()

    def __repr__(self) -> str:
        return f"<Window {self.in_flight} of {self._max_in_flight} in flight>"

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
                stop = min(stop, chunk.sent + self._max_in_flight - rows, len(frames))
                if stop <= chunk.sent:
                    return
                start, chunk.sent = chunk.sent, stop
                rows += stop - start
                size += frames.nbytes(start, stop)
                yield frames.bytes_of(start, stop)

    def drop_complete(self) -> None:
        """Remove the chunks at the front whose messages are all done."""
        while self.chunks and self.chunks[0].complete:
            self.chunks.popleft()

    def go_back(self) -> None:
        """Send again, from the first message that is not done."""
        for chunk in self.chunks:
            chunk.sent = chunk.base

    def first_subject(self) -> str:
        """The subject of the first message that is not done; empty if all are done."""
        for chunk in self.chunks:
            if not chunk.complete:
                return chunk.messages.subject(chunk.base)
        return ""

    def subject_in_flight(self, lowered: str) -> str | None:
        """The subject in flight that is ``lowered`` in lower case; None if there is none."""
        for chunk in self.chunks:
            for index in range(chunk.base, chunk.sent):
                if (subject := chunk.messages.subject(index)).lower() == lowered:
                    return subject
        return None
