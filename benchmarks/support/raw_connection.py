"""The NATS protocol over a bare socket: fills a stream fast and reads it without parsing.

:func:`drain` is the baseline of the ratios of reading: a push consumer whose bytes are received
into one buffer and counted. :func:`publish` is that of writing: it sends the frames that
``BatchPublisher`` sends, with as many messages in flight, and counts the PubAcks without parsing
them.
"""

from __future__ import annotations

import json
import socket
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.publish import MAX_IN_FLIGHT
from nats_stream_source.jetstream.publish.window import MAX_BYTES
from nats_stream_source.wire.framing.frames import Framer
from nats_stream_source.wire.framing.parse import FrameKind
from nats_stream_source.wire.publish.frames import MessageColumns, encode

_CHUNK = 1024  # messages that are encoded at once
_CONNECT = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True}
_BUFFER = 1 << 20
_INBOX = "_INBOX.0123456789abcdefghijkl"
_PIECE_MESSAGES, _PIECE_BYTES = 512, 128 << 10
_END = b"}\r\n"  # of a PubAck

Message = tuple[str, bytes | None, bytes]
"""A subject, a header block, a payload."""

Piece = tuple[bytes | memoryview, int]
"""Frames for one call of ``send``, and their number of messages."""


class RawConnection:
    """A socket after CONNECT."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.settimeout(30)
        self.framer = Framer()
        self.send(b"CONNECT %s\r\n" % json.dumps(_CONNECT).encode())
        self.flush()

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes | memoryview) -> None:
        """Send all of ``data``."""
        self.socket.sendall(data)

    def flush(self) -> None:
        """Wait until all that was sent has reached the server."""
        self.send(b"PING\r\n")
        while not any(frame == b"PONG\r\n" for frame, _ in self.receive()):
            pass

    def receive(self) -> list[tuple[bytes, bytes]]:
        """Receive once; returns the complete frames and their payloads."""
        data = self.socket.recv(_BUFFER)
        if not data:
            raise ConnectionError("the server closed the connection")
        frames = self.framer.feed(data)
        found = [(frames.bytes_of(i), frames.payload(i)) for i in range(len(frames))]
        for frame, _ in found:
            if frame.startswith(b"-ERR"):
                raise ConnectionError(frame.decode())
        return found

    def request(self, subject: str, body: dict[str, Any]) -> dict[str, Any]:
        """One JetStream API request."""
        payload = json.dumps(body).encode()
        self.send(b"SUB _R 9\r\n")
        self.send(b"PUB %s _R %d\r\n%s\r\n" % (subject.encode(), len(payload), payload))
        responses: list[bytes] = []
        while not responses:
            responses = [payload for frame, payload in self.receive() if frame[:4] != b"PING"]
        self.send(b"UNSUB 9\r\n")
        response: dict[str, Any] = json.loads(responses[0])
        if "error" in response:
            raise RuntimeError(f"{subject}: {response['error']}")
        return response


def fill(port: int, messages: Iterable[Message]) -> int:
    """Publish in order with thousands of messages in flight; returns the number of PubAcks."""
    rest = iter(messages)
    chunks = iter(lambda: list(zip(*islice(rest, _CHUNK), strict=True)), [])
    columns = ((pa.array(s), pa.array(p), pa.array(h, pa.binary())) for s, h, p in chunks)
    return publish(port, (piece for one in columns for piece in prepare([MessageColumns(*one)])))


@contextmanager
def server_for_slow_clients() -> Iterator[NatsServer]:
    """A server that a client may fall behind: a bare socket ignores flow control."""
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        config = Path(scratch, "server.conf")
        # With the default of 64 MB the server would disconnect it.
        config.write_text("max_pending: 1GB\n")
        with NatsServer(config=config) as server:
            yield server


def drain(port: int, stream: str, rows: int, expected: int | None = None) -> int:
    """Receive ``rows`` messages of a stream from a push consumer; returns their size in bytes.

    Args:
        expected: the size from an earlier call: bytes are counted without parsing until it is
            reached. None parses the messages to determine it.
    """
    config = {
        "deliver_subject": "_D",
        "ack_policy": "none",
        "max_deliver": 1,
        "mem_storage": True,
        "num_replicas": 1,
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": 1,
    }
    # A name as long as the reader's, so that deliveries have the same size.
    name = "spark-0123456789abcdef-1"
    with RawConnection(port) as connection:
        body = json.dumps({"stream_name": stream, "config": config | {"name": name}}).encode()
        subject = f"$JS.API.CONSUMER.CREATE.{stream}.{name}".encode()
        # The response has no subscriber, so only deliveries are received.
        connection.send(b"SUB _D 1\r\nPUB %s _N %d\r\n%s\r\n" % (subject, len(body), body))
        received = _parsed(connection, rows) if expected is None else _counted(connection, expected)
    with RawConnection(port) as connection:
        connection.request(f"$JS.API.CONSUMER.DELETE.{stream}.{name}", {})
    return received


def _counted(connection: RawConnection, expected: int) -> int:
    buffer = bytearray(_BUFFER)
    received = 0
    while received < expected:
        if not (count := connection.socket.recv_into(buffer)):
            raise ConnectionError("the server closed the connection")
        received += count
    return received


def _parsed(connection: RawConnection, rows: int) -> int:
    count = size = 0
    while count < rows:
        if not (data := connection.socket.recv(_BUFFER)):
            raise ConnectionError("the server closed the connection")
        frames = connection.framer.feed(data)
        messages = frames.select(frames.kind != FrameKind.CONTROL)
        count += len(messages)
        size += messages.nbytes
    return size


def prepare(columns: Sequence[MessageColumns]) -> list[Piece]:
    """The frames of messages, as ``BatchPublisher`` sends them."""
    prepared: list[Piece] = []
    first = 0
    for messages in columns:
        frames = encode(messages, f"{_INBOX}.", first)
        first += len(frames)
        start = 0
        while start < len(frames):
            border = frames.nbytes(0, start) + _PIECE_BYTES
            stop = int(np.searchsorted(frames.ends, border, side="right"))
            stop = min(max(stop, start + 1), start + _PIECE_MESSAGES)
            prepared.append((frames.bytes_of(start, stop), stop - start))
            start = stop
    return prepared


def publish(port: int, pieces: Iterable[Piece]) -> int:
    """Send all frames; returns the number of PubAcks, which are counted by their last bytes."""
    sent = acked = size = 0
    tail = b""
    with RawConnection(port) as connection:
        connection.send(f"SUB {_INBOX}.* 1\r\n".encode())

        def receive() -> None:
            nonlocal acked, size, tail
            data = connection.socket.recv(_BUFFER)
            if not data or b'"error"' in data or b"-ERR" in data:
                raise ConnectionError(data[:300].decode(errors="replace") or "connection closed")
            data = tail + data
            tail = data[1 - len(_END) :]
            acked += data.count(_END)
            while sizes and sizes[0][0] <= acked:
                size -= sizes.popleft()[1]

        sizes: deque[tuple[int, int]] = deque()
        for piece, count in pieces:
            while sent - acked + count > MAX_IN_FLIGHT or (
                size + len(piece) > MAX_BYTES and acked < sent
            ):
                receive()
            connection.send(piece)
            sent += count
            size += len(piece)
            sizes.append((sent, len(piece)))
        while acked < sent:
            receive()
    return acked
