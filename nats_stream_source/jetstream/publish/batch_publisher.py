"""Publishing of many messages as columns, each with its PubAck.

``column_publisher.py`` sends the messages, and sends them again; this module reads the PubAcks. A
rejection that is not transient goes to ``on_rejected``, which raises it by default.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nats_stream_source.connection.connection import Connection
from nats_stream_source.errors import ApiError, ProtocolError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.publish import MAX_IN_FLIGHT
from nats_stream_source.jetstream.publish.acknowledgements import Acknowledgements
from nats_stream_source.jetstream.publish.column_publisher import ColumnPublisher
from nats_stream_source.jetstream.publish.pub_ack import (
    PubAck,
    no_stream_error,
    unexpected_stream_error,
)
from nats_stream_source.jetstream.publish.rejection import (
    Rejection,
    is_transient_rejection,
    raise_rejection,
)
from nats_stream_source.jetstream.publish.window import Chunk
from nats_stream_source.wire.framing.frames import Frames
from nats_stream_source.wire.headers import is_no_responders
from nats_stream_source.wire.publish import pub_acks
from nats_stream_source.wire.publish.frames import EncodedFrames, MessageColumns, encode
from nats_stream_source.wire.table import FrameKind

__all__ = ["BatchPublisher", "MessageColumns", "Rejection"]


class BatchPublisher(ColumnPublisher):
    """Publishes columns of messages to one stream; an async context manager.

    Args:
        jetstream: the account's JetStream; its connection is used.
        stream: the stream that must store the messages.
        max_in_flight: the maximum number of messages in the window.
        retry_timeout: seconds without progress after which the publisher fails. Default: the
            connection's ``connect_timeout``.
        no_ack: whether the stream stores messages without PubAcks, which is refused. None: the
            stream is requested.
        on_rejected: called with each message that the stream rejected; it may raise.
    """

    def __init__(
        self,
        jetstream: JetStream,
        stream: str,
        *,
        max_in_flight: int = MAX_IN_FLIGHT,
        retry_timeout: float | None = None,
        no_ack: bool | None = None,
        on_rejected: Callable[[Rejection], None] = raise_rejection,
    ) -> None:
        acks = _PubAcks(jetstream.connection, stream, max_in_flight, on_rejected)
        super().__init__(jetstream, acks, retry_timeout, no_ack)


class _PubAcks(Acknowledgements):
    """One PubAck for each message."""

    wildcard = "*"

    def __init__(
        self,
        connection: Connection,
        stream: str,
        max_in_flight: int,
        on_rejected: Callable[[Rejection], None],
    ) -> None:
        super().__init__(connection, stream, max_in_flight)
        self._on_rejected = on_rejected
        self._learned = b""

    def encode(self, messages: MessageColumns, first_serial: int, start: int) -> EncodedFrames:
        return encode(messages, self.inbox_prefix, first_serial)

    def process(self, frames: Frames) -> None:
        acks = pub_acks.parse(frames, self.inbox_prefix.encode(), self._learned)
        for chunk in self.window.chunks:
            index, mine, current = chunk.find(acks.serial)
            if (stored := mine & (acks.seq >= 0)).any():
                self._add_stored(chunk, index[stored])
            if (done := stored & current).any():
                self._finish(chunk, index[done])
            for i in np.flatnonzero(current & ~stored).tolist():
                self._process_one(chunk, int(index[i]), frames, i)

    def _add_stored(self, chunk: Chunk, index: NDArray[np.int64]) -> int:
        if new := chunk.add_stored(index):
            self.note_progress()
        self.stored += new
        return new

    def _finish(self, chunk: Chunk, index: NDArray[np.int64]) -> None:
        chunk.finish(index)
        self.silent = 0.0

    def _process_one(self, chunk: Chunk, index: int, frames: Frames, i: int) -> None:
        """Process a response that is not a PubAck of the learned form."""
        if chunk.done[index]:
            return
        subject = chunk.messages.subject(index)
        if frames.kind[i] == FrameKind.HMSG and is_no_responders(frames.header(i)):
            self.go_back = no_stream_error(subject)
            return
        payload = frames.payload(i)
        try:
            ack = PubAck.parse(subject, payload)
        except ApiError as error:
            if is_transient_rejection(error):
                self.go_back = error
            else:
                self._reject(chunk, index, error)
            return
        except ProtocolError as error:
            self.failure = error
            return
        if ack.stream != self.stream:
            self.failure = unexpected_stream_error(self.stream, ack.stream, subject)
            return
        new = self._add_stored(chunk, np.array([index]))
        if ack.duplicate:
            self.duplicates += new
        elif not self._learned:
            self._learned = pub_acks.learn(payload)
        self._finish(chunk, np.array([index]))

    def _reject(self, chunk: Chunk, index: int, error: ApiError) -> None:
        acknowledged = bool(chunk.stored[index])
        self.stored -= acknowledged
        chunk.stored[index], chunk.rejected[index] = False, True
        self._finish(chunk, np.array([index]))
        message = chunk.messages.slice(index, index + 1)
        self._on_rejected(Rejection(chunk.first_row + index, message, error, acknowledged))
