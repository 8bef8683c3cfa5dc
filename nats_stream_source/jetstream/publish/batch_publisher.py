"""Publishing of many messages as columns, each with its PubAck.

``column_publisher.py`` sends the messages, and sends them again; this module reads the PubAcks. A
rejection that is not transient goes to ``on_rejected``, which raises it by default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nats_stream_source.errors import ApiError, ProtocolError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.publish import MAX_IN_FLIGHT
from nats_stream_source.jetstream.publish.column_publisher import ColumnPublisher
from nats_stream_source.jetstream.publish.pub_ack import (
    PubAck,
    is_transient_rejection,
    no_stream_error,
    unexpected_stream_error,
)
from nats_stream_source.jetstream.publish.window import Chunk
from nats_stream_source.wire.framing.frames import Frames
from nats_stream_source.wire.headers import is_no_responders
from nats_stream_source.wire.publish import pub_acks
from nats_stream_source.wire.publish.frames import EncodedFrames, MessageColumns, encode
from nats_stream_source.wire.table import FrameKind

__all__ = ["BatchPublisher", "MessageColumns", "Rejection"]


@dataclass(frozen=True, slots=True)
class Rejection:
    """A message that the stream rejected.

    Attributes:
        row: its number, from 0, among all messages of the publisher.
        message: the message, as columns of one element.
        error: the reason.
        acknowledged: whether it had a PubAck before, and was sent again because an earlier message
            did not have one.
    """

    row: int
    message: MessageColumns
    error: ApiError
    acknowledged: bool = False

    @property
    def subject(self) -> str:
        """The message's subject."""
        return self.message.subject(0)


def _raise(rejection: Rejection) -> None:
    raise rejection.error


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

    _WILDCARD = "*"

    def __init__(
        self,
        jetstream: JetStream,
        stream: str,
        *,
        max_in_flight: int = MAX_IN_FLIGHT,
        retry_timeout: float | None = None,
        no_ack: bool | None = None,
        on_rejected: Callable[[Rejection], None] = _raise,
    ) -> None:
        super().__init__(jetstream, stream, max_in_flight, retry_timeout, no_ack)
        self._on_rejected = on_rejected
        self._learned = b""

    def _encode(self, messages: MessageColumns, first_serial: int, start: int) -> EncodedFrames:
        return encode(messages, self._inbox_prefix, first_serial)

    def _process(self, frames: Frames) -> None:
        serials, seqs = pub_acks.parse(frames, self._inbox_prefix.encode(), self._learned)
        for chunk in self._window.chunks:
            index, mine, current = chunk.find(serials)
            if (stored := mine & (seqs >= 0)).any():
                self._add_stored(chunk, index[stored])
            if (done := stored & current).any():
                self._finish(chunk, index[done])
            for i in np.flatnonzero(current & ~stored).tolist():
                self._process_one(chunk, int(index[i]), frames, i)

    def _add_stored(self, chunk: Chunk, index: NDArray[np.int64]) -> int:
        if new := chunk.add_stored(index):
            self._note_progress()
        self.stored += new
        return new

    def _finish(self, chunk: Chunk, index: NDArray[np.int64]) -> None:
        chunk.done[index] = True
        self._silent = 0.0

    def _process_one(self, chunk: Chunk, index: int, frames: Frames, i: int) -> None:
        """Process a response that is not a PubAck of the learned form."""
        if chunk.done[index]:
            return
        subject = chunk.messages.subject(index)
        if frames.kind[i] == FrameKind.HMSG and is_no_responders(frames.header(i)):
            self._reason = no_stream_error(subject)
            return
        payload = frames.payload(i)
        try:
            ack = PubAck.parse(subject, payload)
        except ApiError as error:
            if is_transient_rejection(error):
                self._reason = error
            else:
                self._reject(chunk, index, error)
            return
        except ProtocolError as error:
            self._failure = error
            return
        if ack.stream != self._stream:
            self._failure = unexpected_stream_error(self._stream, ack.stream, subject)
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
