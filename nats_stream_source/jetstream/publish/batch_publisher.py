"""Publishing of many messages as columns, each with its PubAck.

Theory of operation. :meth:`BatchPublisher.send` encodes a batch of messages at once
(``wire/publish/frames.py``) and sends the frames in large pieces. A *window* limits the messages
and bytes between the first message without a PubAck and the last message sent. PubAcks are parsed
as columns and mark the messages of the window. So a message costs neither an object nor a task
switch.

A message without a PubAck is sent again, *with all messages after it*, so that messages on one
subject are stored in their order: after a reconnect, after ``request_timeout`` without any PubAck,
and after a response that is transient (no leader). Messages may be stored twice then, unless they
have a ``Nats-Msg-Id`` and the stream's duplicate window has not passed. If no further message is
stored for ``retry_timeout`` seconds, the publisher fails with the last reason. Time counts only
while the event loop runs: between two calls, PubAcks wait in the socket.

Any other rejection goes to ``on_rejected``, which raises it by default.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType

import nats.errors
import numpy as np
from numpy.typing import NDArray

from nats_stream_source.aio.retry import Backoff, is_transient
from nats_stream_source.connection.connection import Connection
from nats_stream_source.connection.inbox import Inbox
from nats_stream_source.connection.permissions import denied_error
from nats_stream_source.errors import (
    AckLostError,
    AckTimeoutError,
    ApiError,
    MessageTooLargeError,
    NatsSourceError,
    NoStreamError,
    ProtocolError,
    UnexpectedStreamError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.publish.pub_ack import PubAck, no_stream_error
from nats_stream_source.jetstream.publish.rejection import (
    Rejection,
    is_transient_rejection,
    raise_rejection,
)
from nats_stream_source.jetstream.publish.window import Chunk, Window
from nats_stream_source.logs import field_logger
from nats_stream_source.wire.framing.frames import Frames
from nats_stream_source.wire.headers import is_no_responders
from nats_stream_source.wire.publish import pub_acks
from nats_stream_source.wire.publish.frames import EncodedFrames, MessageColumns, encode
from nats_stream_source.wire.table import FrameKind

__all__ = ["MAX_IN_FLIGHT", "BatchPublisher", "MessageColumns", "Rejection"]

log = field_logger(__name__)

MAX_IN_FLIGHT = 4096
_CHUNK_BYTES = 16 << 20  # of messages that are encoded at once
PONG_TIMEOUT = 2.0  # seconds
_MAX_RESPONSE_WAIT = 0.5  # seconds; how often a lost connection is noticed at the latest
_BACKOFF = Backoff(0.05, 1.0)


class BatchPublisher:
    """Publishes columns of messages to one stream; an async context manager.

    Args:
        jetstream: the account's JetStream; its connection is used.
        stream: the stream that must store the messages.
        max_in_flight: the maximum number of messages in the window.
        retry_timeout: seconds without progress after which the publisher fails. Default: the
            connection's ``connect_timeout``.
        on_rejected: called with each message that the stream rejected; it may raise.

    Attributes:
        stored: number of messages that have their PubAcks, duplicates included.
        duplicates: number of those that the stream already had.
    """

    _inbox_wildcard = "*"

    def __init__(
        self,
        jetstream: JetStream,
        stream: str,
        *,
        max_in_flight: int = MAX_IN_FLIGHT,
        retry_timeout: float | None = None,
        on_rejected: Callable[[Rejection], None] = raise_rejection,
    ) -> None:
        self._jetstream = jetstream
        self._connection: Connection = jetstream.connection
        self._stream = stream
        settings = self._connection.settings
        self._retry_timeout = settings.connect_timeout if retry_timeout is None else retry_timeout
        self._on_rejected = on_rejected
        self.stored = 0
        self.duplicates = 0
        self._window = Window(max_in_flight, self._encode)
        self._inbox: Inbox | None = None
        self._prefix = ""
        self._learned = b""
        self._reconnects = self._connection.reconnects
        self._failure: NatsSourceError | None = None
        self._go_back: NatsSourceError | None = None  # the reason to send again
        self._waited = 0.0  # seconds without progress
        self._silent = 0.0  # seconds without a PubAck since the messages were sent
        self._retries = 0  # without progress

    def __repr__(self) -> str:
        return f"<BatchPublisher to {self._stream!r}, {self.stored} stored, {self._window}>"

    async def __aenter__(self) -> BatchPublisher:
        connection = self._connection
        connection.verify_inbox_permission()
        prefix = connection.client.new_inbox()
        connection.denial_listeners.append(self._on_denied)
        try:
            self._inbox = await connection.open_inbox(f"{prefix}.{self._inbox_wildcard}")
        except BaseException:
            connection.denial_listeners.remove(self._on_denied)
            raise
        self._prefix = f"{prefix}."
        self._reconnects = connection.reconnects
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the subscription of the PubAcks; messages without one may or may not be stored."""
        self._connection.denial_listeners.remove(self._on_denied)
        inbox, self._inbox = self._inbox, None
        if inbox is not None:
            # A broken connection has ended the subscription already.
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._connection.close_inbox(inbox)

    async def send(self, messages: MessageColumns) -> None:
        """Send ``messages``, in order; returns when all were sent, before their PubAcks arrive.

        Raises:
            MessageTooLargeError: a message exceeds the server's ``max_payload``; none was sent.
            ConnectError: the connection is closed, or not restored within ``retry_timeout``;
                AuthorizationError if the server rejects the credentials.
            PermissionDeniedError: the user may not publish to a subject.
            StreamNotFoundError: the stream does not exist any more.
            NoStreamError: no stream receives a subject.
            UnexpectedStreamError: another stream has stored a message.
            AckLostError, AckTimeoutError: no PubAck within ``retry_timeout``.
            Exception: what ``on_rejected`` raises.
        """
        if not len(messages):
            return
        ends = np.cumsum(self._validate_sizes(messages))
        start = 0
        while start < len(messages):
            border = (int(ends[start - 1]) if start else 0) + _CHUNK_BYTES
            stop = max(int(np.searchsorted(ends, border, side="right")), start + 1)
            await self._send_chunk(messages.slice(start, stop))
            start = stop

    async def _send_chunk(self, messages: MessageColumns) -> None:
        chunk = self._window.append(messages)
        await self._run(lambda: chunk.sent == len(chunk.frames))

    def _encode(self, messages: MessageColumns, first_serial: int, start: int) -> EncodedFrames:
        return encode(messages, self._prefix, first_serial)

    async def flush(self) -> None:
        """Wait until each message has its PubAck, or was rejected.

        Raises: as :meth:`send`.
        """
        await self._run(lambda: not self._window.chunks)

    def _validate_sizes(self, messages: MessageColumns) -> NDArray[np.int64]:
        sizes = messages.sizes()
        limit = self._connection.client.max_payload
        if int(sizes.max()) <= limit:
            return sizes
        first = int((sizes > limit).argmax())
        raise MessageTooLargeError(
            f"could not publish to {messages.subject(first)!r}: the message has {sizes[first]} "
            f"bytes, more than the server's max_payload of {limit}"
        )

    # -- the window -----------------------------------------------------------------------------

    async def _run(self, until: Callable[[], bool]) -> None:
        assert self._inbox is not None, "BatchPublisher must be entered first"
        loop = asyncio.get_running_loop()
        request_timeout = self._connection.settings.request_timeout
        while True:
            if self._failure is not None:
                raise self._failure
            if self._is_disconnected():
                self._go_back = self._lost_error()
            if self._go_back is not None:
                await self._recover(self._go_back)
            try:
                await self._send_available()
            except OSError:
                self._go_back = self._lost_error()
                continue
            if until():
                # PubAcks that have arrived already; the rest is read by the next call.
                self._receive()
                if until():
                    return
            started = loop.time()
            await self._inbox.wait(min(request_timeout, _MAX_RESPONSE_WAIT))
            self._add_time(loop.time() - started)
            self._receive()
            if self._silent > request_timeout and self._go_back is None:
                await self._verify_connection()

    def _add_time(self, seconds: float) -> None:
        self._waited += seconds
        self._silent += seconds

    async def _send_available(self) -> None:
        for frames in self._window.pieces():
            await self._connection.writer.write(frames)

    def _is_disconnected(self) -> bool:
        connection = self._connection
        return not connection.online.is_set() or connection.reconnects != self._reconnects

    async def _verify_connection(self) -> None:
        """No PubAck within ``request_timeout``: the connection is dead, or PubAcks were lost."""
        connection = self._connection
        if connection.online.is_set() and not await connection.alive(PONG_TIMEOUT):
            connection.reconnect()
            return
        self._receive()
        if self._silent > connection.settings.request_timeout:
            self._go_back = self._timeout_error()

    async def _recover(self, reason: NatsSourceError) -> None:
        """Wait for the connection, then go back to the first message without a PubAck."""
        connection, loop = self._connection, asyncio.get_running_loop()
        if self._waited > self._retry_timeout:
            raise reason
        started = loop.time()
        pause = _BACKOFF.pause(self._retries)
        await asyncio.sleep(pause)
        self._retries += 1
        await connection.wait_connected(max(self._retry_timeout - self._waited, pause))
        if isinstance(reason, NoStreamError):
            await self._verify_stream(loop.time() - started)
        self._receive()
        self._add_time(loop.time() - started)
        log.warning(
            "sending messages again",
            stream=self._stream,
            messages=self._window.in_flight,
            attempt=self._retries,
            reason=reason,
        )
        self._window.go_back()
        self._reconnects = connection.reconnects
        self._go_back, self._silent = None, 0.0

    async def _verify_stream(self, waited: float) -> None:
        """A stream that was deleted is an error at once, one without a leader is not."""
        try:
            await self._jetstream.stream_info(self._stream)
        except NatsSourceError as error:
            # The last reason names the cause better than "no responders".
            if not is_transient(error) or self._waited + waited > self._retry_timeout:
                raise

    # -- PubAcks --------------------------------------------------------------------------------

    def _receive(self) -> None:
        assert self._inbox is not None
        for frames in self._inbox.take():
            self._process(frames)
        if self._window.advance():
            self._note_progress()

    def _process(self, frames: Frames) -> None:
        acks = pub_acks.parse(frames, self._prefix.encode(), self._learned)
        for chunk in self._window.chunks:
            index, mine, current = chunk.find(acks.serial)
            if (stored := mine & (acks.seq >= 0)).any():
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
        chunk.finish(index)
        self._silent = 0.0

    def _note_progress(self) -> None:
        self._waited, self._silent, self._retries = 0.0, 0.0, 0

    def _process_one(self, chunk: Chunk, index: int, frames: Frames, i: int) -> None:
        """Process a response that is not a PubAck of the learned form."""
        if chunk.done[index]:
            return
        subject = chunk.messages.subject(index)
        if frames.kind[i] == FrameKind.HMSG and is_no_responders(frames.header(i)):
            self._go_back = no_stream_error(subject)
            return
        payload = frames.payload(i)
        try:
            ack = PubAck.parse(subject, payload)
        except ApiError as error:
            if is_transient_rejection(error):
                self._go_back = error
            else:
                self._reject(chunk, index, error)
            return
        except ProtocolError as error:
            self._failure = error
            return
        if ack.stream != self._stream:
            self._failure = UnexpectedStreamError(
                f"could not publish to stream {self._stream!r}: stream {ack.stream!r} has stored "
                f"the message on {subject!r}; publish to a subject of {self._stream!r}"
            )
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

    # -- errors ---------------------------------------------------------------------------------

    def _on_denied(self, subject: str | None, error: Exception) -> None:
        if self._failure is not None or not isinstance(error, NatsSourceError):
            return
        if subject is None:
            self._failure = error
            return
        # nats-py converts the server's error to lower case.
        if (own := self._window.subject_in_flight(subject)) is not None:
            self._failure = denied_error(own)

    def _lost_error(self) -> AckLostError:
        subject = self._window.first_subject()
        return AckLostError(
            f"could not confirm a message on {subject!r}: the connection was lost before the "
            f"PubAck arrived; the message may or may not be stored"
        )

    def _timeout_error(self) -> AckTimeoutError:
        settings = self._connection.settings
        return AckTimeoutError(
            f"could not confirm a message on {self._window.first_subject()!r}: no PubAck from "
            f"{settings.server_list} within {settings.request_timeout:g} s ('request_timeout'), "
            f"which responds to PING; the message may or may not be stored; check the server's "
            f"log, since a server whose disk is full does not send PubAcks",
            settings=("request_timeout",),
        )
