"""Publishing over a bare socket: prepared frames, PubAcks that are counted and not parsed.

The baseline of the ratios of ``benchmarks.writing``. :func:`publish` keeps as many messages in
flight as ``BatchPublisher``, and sends the same frames: each has its own reply subject.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.support.raw_connection import RawConnection
from nats_stream_source.jetstream.publish import MAX_IN_FLIGHT
from nats_stream_source.jetstream.publish.window import MAX_BYTES
from nats_stream_source.wire.publish.frames import EncodedFrames, MessageColumns, encode

_INBOX = "_INBOX.0123456789abcdefghijkl"
_PIECE_MESSAGES, _PIECE_BYTES = 512, 128 << 10
_BUFFER = 1 << 20


@dataclass(frozen=True, slots=True)
class Prepared:
    """Frames in pieces, each for one call of ``send``, and their numbers of messages."""

    pieces: list[memoryview]
    counts: list[int]

    @property
    def messages(self) -> int:
        """The number of all messages."""
        return sum(self.counts)


def prepare(columns: Sequence[MessageColumns]) -> Prepared:
    """The frames of messages, as ``BatchPublisher`` sends them."""
    prepared = Prepared([], [])
    for messages in columns:
        frames = encode(messages, f"{_INBOX}.", prepared.messages)
        for start, stop in _pieces(frames):
            prepared.pieces.append(frames.bytes_of(start, stop))
            prepared.counts.append(stop - start)
    return prepared


def _pieces(frames: EncodedFrames) -> Iterator[tuple[int, int]]:
    start = 0
    while start < len(frames):
        border = frames.nbytes(0, start) + _PIECE_BYTES
        stop = int(np.searchsorted(frames.ends, border, side="right"))
        stop = min(max(stop, start + 1), start + _PIECE_MESSAGES)
        yield start, stop
        start = stop


def publish(port: int, prepared: Prepared) -> int:
    """Send all frames; returns the number of PubAcks."""
    sent = acked = size = 0
    with RawConnection(port) as connection:
        connection.send(f"SUB {_INBOX}.* 1\r\n".encode())
        acks = _Acks(connection, b"}\r\n")
        sizes = []
        first = 0
        for piece, count in zip(prepared.pieces, prepared.counts, strict=True):
            while sent - acked + count > MAX_IN_FLIGHT or (
                size + len(piece) > MAX_BYTES and acked < sent
            ):
                acked += acks.receive()
                while first < len(sizes) and sizes[first][0] <= acked:
                    size -= sizes[first][1]
                    first += 1
            connection.send(piece)
            sent += count
            size += len(piece)
            sizes.append((sent, len(piece)))
        while acked < sent:
            acked += acks.receive()
    return acked


class _Acks:
    """Counts the responses by their last bytes."""

    def __init__(self, connection: RawConnection, end: bytes) -> None:
        self._connection = connection
        self._end = end
        self._tail = b""

    def receive(self) -> int:
        """Receive once; returns the number of responses whose last byte has arrived."""
        data = self._connection.socket.recv(_BUFFER)
        if not data or b'"error"' in data or b"-ERR" in data:
            raise ConnectionError(data[:300].decode(errors="replace") or "connection closed")
        data = self._tail + data
        keep = len(self._end) - 1
        self._tail = data[-keep:]
        return data.count(self._end)
