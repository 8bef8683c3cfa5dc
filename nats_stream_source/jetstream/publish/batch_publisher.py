"""Publishing of many messages as columns: a PubAck for each message, or one for many (fast ingest).

``column_publisher.py`` sends the messages, and sends them again; this module reads the responses.

:class:`BatchPublisher` receives a PubAck for each message. A rejection that is not transient goes
to ``on_rejected``, which raises it by default.

*Fast ingest (ADR-50, nats-server 2.14).* The server acknowledges many messages of a
:class:`FastIngestPublisher` together. Each chunk of the window is one batch
(``wire/publish/fast_ingest.py``), and its last message commits the batch. So each message is
acknowledged when :meth:`flush` returns, and no batch stays open while the caller prepares the next
messages: servers abandon a batch after 10 seconds without a message.

Flow control: the first message of a batch is sent alone. Its response, and each acknowledgement
after it, says how many messages the server acknowledges together. At most
:data:`MAX_OUTSTANDING_ACKS` times as many messages are in flight behind the last acknowledgement.

A batch ends early if the server did not receive a message (route or leader lost), rejected one, or
no longer has the batch (restart, abandoned). The messages after the last acknowledgement are then
sent again in a new batch, *with those of all later chunks*, as a ``BatchPublisher`` does and with
the same limits of time. Acknowledgements of an ended batch count as stored, and do not complete a
message that was sent again. If no acknowledgement arrives for ``request_timeout``, it is requested
again (ping) before the messages are. Before messages are sent again, the publisher ends their batch
at the server, which then rejects those of a lost connection that arrive late. A rejection that is
not transient is an error: the server has dropped the messages after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nats_stream_source import err_codes
from nats_stream_source.errors import (
    AckLostError,
    ApiError,
    FastIngestNotSupportedError,
    NatsSourceError,
    ProtocolError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.publish import MAX_IN_FLIGHT
from nats_stream_source.jetstream.publish.column_publisher import ColumnPublisher
from nats_stream_source.jetstream.publish.pub_ack import (
    PubAck,
    is_transient_rejection,
    no_stream_error,
    publish_error,
    unexpected_stream_error,
)
from nats_stream_source.jetstream.publish.window import MAX_BYTES, Chunk
from nats_stream_source.wire.framing.frames import Frames
from nats_stream_source.wire.headers import is_no_responders
from nats_stream_source.wire.publish import fast_ingest, pub_acks
from nats_stream_source.wire.publish.fast_ingest import END, PING, BatchResponse, ResponseKind
from nats_stream_source.wire.publish.frames import EncodedFrames, MessageColumns, encode

__all__ = ["BatchPublisher", "FastIngestPublisher", "MessageColumns", "Rejection"]

MAX_OUTSTANDING_ACKS = 3
"""ADR-50 allows 1 to 3."""


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
        super().__init__(
            jetstream,
            stream,
            max_in_flight=max_in_flight,
            retry_timeout=retry_timeout,
            no_ack=no_ack,
        )
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
        if is_no_responders(frames.header(i)):
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


class FastIngestPublisher(ColumnPublisher):
    """Publishes columns of messages to one stream with fast ingest; an async context manager.

    The stream must have ``allow_batched``. All headers of JetStream are allowed; a message with an
    expected sequence that is wrong is an error, which leaves out the messages after it.

    Args: see :class:`BatchPublisher`.
    """

    _WILDCARD = ">"
    _ALLOWANCE = 1

    def _encode(self, messages: MessageColumns, first_serial: int, start: int) -> EncodedFrames:
        flow = self._flow(messages)
        return fast_ingest.encode_batch(messages, self._inbox_prefix, first_serial, start, flow)

    def _flow(self, messages: MessageColumns) -> int:
        """Two acknowledgements per window: otherwise a full window could wait for none."""
        window = min(self._window.max_in_flight, MAX_BYTES // max(int(messages.sizes().max()), 1))
        return max(1, min(fast_ingest.MAX_FLOW, window // 2))

    # -- responses ------------------------------------------------------------------------------

    def _process(self, frames: Frames) -> None:
        inbox = self._inbox_prefix.encode()
        for i in range(len(frames)):
            found = fast_ingest.parse_reply(frames.subject(i), inbox)
            if found is None or (place := self._window.locate(found[0])) is None:
                continue
            chunk, start, current = place
            # The end of a batch has a number of its own, after that of the batch's last message.
            index = min(start + max(found[1], 1), len(chunk.frames)) - 1
            if is_no_responders(frames.header(i)):
                if current:
                    self._end_batch(chunk, index, no_stream_error(chunk.messages.subject(index)))
                continue
            try:
                response = fast_ingest.parse_response(frames.payload(i))
            except ValueError as error:
                self._failure = ProtocolError(
                    f"invalid response to a message on {chunk.messages.subject(index)!r}: {error}"
                )
                return
            self._process_response(chunk, start, index, response, current)

    def _process_response(
        self, chunk: Chunk, start: int, index: int, response: BatchResponse, current: bool
    ) -> None:
        """Process a response to message ``index``; message ``start`` is the batch's first one."""
        subject = chunk.messages.subject(index)
        if response.stream not in (None, self._stream):
            self._failure = unexpected_stream_error(self._stream, str(response.stream), subject)
        elif response.kind in (ResponseKind.ACK, ResponseKind.END):
            self._process_ack(chunk, start, response, current)
        elif current and response.kind is ResponseKind.GAP:
            self._end_batch(chunk, max(start + response.missing - 1, start))
        elif current:
            self._process_error(chunk, index, response)

    def _process_ack(
        self, chunk: Chunk, start: int, response: BatchResponse, current: bool
    ) -> None:
        end = start + response.stored
        if end > (chunk.sent if current else len(chunk.frames)):
            self._failure = ProtocolError(
                f"invalid acknowledgement from stream {self._stream!r}: {response.stored} messages "
                f"of a batch are stored, expected at most {chunk.sent - start}, which were sent"
            )
            return
        if current and chunk.ended_at is not None:
            end = min(end, chunk.ended_at)
        part = slice(start, end)
        new = chunk.add_stored(part)
        self.stored += new
        if new:
            self._note_progress()
        # With a connection, the response may be lost that an earlier message was rejected.
        if not current or self._disconnected:
            return
        for one in self._window.chunks:
            one.ends.clear()
        allowed = end + MAX_OUTSTANDING_ACKS * max(response.flow, 1)
        if not chunk.done[part].all() or allowed > (chunk.allowed or 0):
            chunk.done[part] = True
            self._silent = 0.0
        if response.kind is ResponseKind.ACK:
            chunk.allowed = max(chunk.sent, allowed)
        elif end < len(chunk.frames):
            self._end_batch(chunk, end)

    def _process_error(self, chunk: Chunk, index: int, response: BatchResponse) -> None:
        assert response.error is not None
        error = publish_error(chunk.messages.subject(index), response.error)
        if error.err_code == FastIngestNotSupportedError.err_code:
            self._failure = FastIngestNotSupportedError(
                f"could not publish to stream {self._stream!r}: it does not accept fast ingest; "
                f"set allow_batched in its configuration (code {error.code}, err_code "
                f"{error.err_code})"
            )
        elif error.err_code == err_codes.UNKNOWN_BATCH:
            self._end_batch(chunk, index)
        elif error.err_code == err_codes.TOO_MANY_BATCHES or is_transient_rejection(error):
            self._end_batch(chunk, index, error)
        else:
            self._failure = error

    def _end_batch(self, chunk: Chunk, index: int, reason: NatsSourceError | None = None) -> None:
        """The server stores neither message ``index`` nor those after it: send them again."""
        chunk.ended_at = index if chunk.ended_at is None else min(index, chunk.ended_at)
        if self._reason is None:
            self._reason = reason or AckLostError(
                f"could not confirm a message on {chunk.messages.subject(index)!r}: stream "
                f"{self._stream!r} has ended the batch before it; the message may or may not be "
                f"stored"
            )

    def _requests(self) -> bytes:
        return b"".join(
            fast_ingest.control(PING, *self._batch(chunk), chunk.sent - chunk.start)
            for chunk in self._window.chunks
            if chunk.sent > max(chunk.start, chunk.base)
        )

    def _ends(self) -> bytes:
        """The ends of the batches whose messages are sent again.

        Otherwise the server could store messages of a lost connection, which arrive late, after
        those that were sent again. While the stream does not have a leader, the requests are lost
        too: they are repeated until a message that was sent after them is acknowledged.
        """
        for chunk in self._window.chunks:
            if chunk.sent > chunk.start:
                number = chunk.sent - chunk.start + 1
                chunk.ends.append(fast_ingest.control(END, *self._batch(chunk), number))
        return b"".join(end for chunk in self._window.chunks for end in chunk.ends)

    def _batch(self, chunk: Chunk) -> tuple[str, str, int, int]:
        """A subject of the batch, the inbox, the batch and its flow."""
        subject, batch = chunk.messages.subject(chunk.sent - 1), chunk.frames.first_serial
        return subject, self._inbox_prefix, batch + chunk.start, self._flow(chunk.messages)
