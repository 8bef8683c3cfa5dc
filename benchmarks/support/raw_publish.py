"""Publishing over a bare socket: prepared frames, PubAcks that are counted and not parsed.

The baseline of the ratios of ``benchmarks.writing``. :func:`publish` keeps as many messages in
flight as ``BatchPublisher``, and sends the same frames: each has its own reply subject.
:func:`publish_fast` sends a batch of *fast ingest* (ADR-50, nats-server 2.14): the server
acknowledges every :data:`FLOW` messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.support.raw_connection import RawConnection
from nats_stream_source.jetstream.publish import MAX_IN_FLIGHT
from nats_stream_source.jetstream.publish.window import MAX_BYTES
from nats_stream_source.wire.publish.frames import EncodedFrames, MessageColumns, encode

FLOW = 512
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


# -- fast ingest -----------------------------------------------------------------------------------


def create_fast_stream(port: int, config: dict[str, Any]) -> bool:
    """Create a stream that accepts fast ingest; returns False if the server does not support it."""
    with RawConnection(port) as connection:
        try:
            response = connection.request(
                f"$JS.API.STREAM.CREATE.{config['name']}", config | {"allow_batched": True}
            )
        except RuntimeError:
            return False
    return bool(response["config"].get("allow_batched"))


def prepare_fast(columns: Sequence[MessageColumns], batch: str) -> Prepared:
    """The frames of one batch, whose id is ``batch``."""
    total = sum(map(len, columns))
    prepared = Prepared([], [])
    frames: list[bytes] = []
    size = 0
    for messages in columns:
        subjects, payloads = messages.subjects.to_pylist(), messages.payloads.to_pylist()
        blocks = [b""] * len(messages) if messages.headers is None else messages.headers.to_pylist()
        for subject, payload, block in zip(subjects, payloads, blocks, strict=True):
            number = prepared.messages + len(frames) + 1
            # The last message ends the batch, and its response is a PubAck.
            operation = 0 if number == 1 else 2 if number == total else 1
            reply = b"_F.%s.%d.fail.%d.%d.$FI" % (batch.encode(), FLOW, number, operation)
            if block:
                lengths = b"%d %d" % (len(block), len(block) + len(payload))
                frame = b"HPUB %s %s %s\r\n%s%s\r\n" % (subject, reply, lengths, block, payload)
            else:
                frame = b"PUB %s %s %d\r\n%s\r\n" % (subject, reply, len(payload), payload)
            frames.append(frame)
            size += len(frame)
            if len(frames) == _PIECE_MESSAGES or size > _PIECE_BYTES or number == total:
                prepared.pieces.append(memoryview(b"".join(frames)))
                prepared.counts.append(len(frames))
                frames, size = [], 0
    return prepared


def publish_fast(port: int, prepared: Prepared) -> int:
    """Send one batch with at most ``MAX_IN_FLIGHT`` messages in flight; returns the batch's size.

    The server may raise or lower the number of messages for an acknowledgement: the messages in
    flight are those after the sequence of the last one.
    """
    sent = acked = 0
    with RawConnection(port) as connection:
        connection.send(b"SUB _F.> 1\r\n")
        for piece, count in zip(prepared.pieces, prepared.counts, strict=True):
            while sent and sent - acked + count > MAX_IN_FLIGHT:
                acked = max(acked, _last_response(connection)["seq"])
            connection.send(piece)
            sent += count
        while "count" not in (response := _last_response(connection)):
            pass
    return int(response["count"])


def _last_response(connection: RawConnection) -> dict[str, Any]:
    while not (payloads := [payload for _, payload in connection.receive() if payload]):
        pass
    response: dict[str, Any] = json.loads(payloads[-1])
    if "error" in response or response.get("type") in ("gap", "err"):
        raise ConnectionError(f"fast ingest failed: {response}")
    return response
