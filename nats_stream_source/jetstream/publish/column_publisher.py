"""Publishing of many messages as columns: the loop that sends, and sends again.

Theory of operation. :meth:`ColumnPublisher.send` encodes a batch of messages at once
(``wire/publish/frames.py``) and sends the frames in large pieces. A *window* limits the messages
and bytes between the first message without a PubAck and the last message sent. Responses are parsed
as columns and mark the messages of the window. So a message costs neither an object nor a task
switch.

A message without a PubAck is sent again, *with all messages after it*, so that the last message of
a subject is stored last: after a reconnect, after ``request_timeout`` without any PubAck, and after
a response that is transient (no leader). Messages may be stored twice then. Those with a
``Nats-Msg-Id`` are not, within the duplicate window, and stay before one that was lost. If no
further message is stored for ``retry_timeout`` seconds, the publisher fails with the last reason.
Time counts only while the event loop runs: between two calls, PubAcks wait in the socket.

A subclass encodes the messages and reads the responses of its stream (``batch_publisher.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import nats.errors
import numpy as np
from numpy.typing import NDArray

from nats_stream_source.connection.inbox import Inbox
from nats_stream_source.connection.permissions import denied_error
from nats_stream_source.connection.settings import PONG_TIMEOUT
from nats_stream_source.errors import AckLostError, AckTimeoutError, NatsSourceError, NoStreamError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.publish import MAX_IN_FLIGHT
from nats_stream_source.jetstream.publish.pub_ack import lost_error, no_ack_error, too_large_error
from nats_stream_source.jetstream.publish.window import Window
from nats_stream_source.jetstream.retry import Backoff, is_transient
from nats_stream_source.logs import field_logger
from nats_stream_source.wire.framing.frames import Frames
from nats_stream_source.wire.publish.frames import EncodedFrames, MessageColumns

if TYPE_CHECKING:
    from typing_extensions import Self

log = field_logger(__name__)

_CHUNK_BYTES = 16 << 20  # of messages that are encoded at once
_MAX_RESPONSE_WAIT = 0.5  # seconds; how often a lost connection is noticed at the latest
_BACKOFF = Backoff(0.05, 1.0)


class ColumnPublisher(ABC):
    """Publishes columns of messages to one stream; an async context manager.

    Args: see :class:`BatchPublisher`.

    Attributes:
        stored: number of messages that were acknowledged, duplicates included.
        duplicates: number of those that the stream already had; 0 where servers do not report them.
    """

    stored: int = 0
    duplicates: int = 0

    _WILDCARD: ClassVar[str]
    """The last tokens of the responses' subjects, which follow the inbox prefix."""

    _ALLOWANCE: ClassVar[int | None] = None
    """As for :class:`Window`."""

    def __init__(
        self,
        jetstream: JetStream,
        stream: str,
        *,
        max_in_flight: int = MAX_IN_FLIGHT,
        retry_timeout: float | None = None,
        no_ack: bool | None = None,
    ) -> None:
        connection = jetstream.connection
        self._jetstream = jetstream
        self._connection = connection
        self._stream = stream
        timeout = connection.settings.connect_timeout
        self._retry_timeout = timeout if retry_timeout is None else retry_timeout
        self._no_ack = no_ack
        self._inbox: Inbox | None = None
        self._inbox_prefix = f"{connection.client.new_inbox()}."
        self._window = Window(max_in_flight, self._encode_valid, self._ALLOWANCE)
        # The reconnects of the connection when the window went back for the last time.
        self._reconnects = connection.reconnects
        self._failure: NatsSourceError | None = None  # ends the publisher
        self._reason: NatsSourceError | None = None  # to go back to the first message not done
        self._waited = 0.0  # seconds without progress
        self._silent = 0.0  # seconds without a response since the messages were sent
        self._retries = 0  # how often messages were sent again without progress

    async def __aenter__(self) -> Self:
        """Subscribe to the PubAcks.

        Raises:
            ConfigurationError: the stream has ``no_ack``.
        """
        connection = self._connection
        if self._no_ack is None:
            with contextlib.suppress(NatsSourceError):  # send() reports it, if it persists
                self._no_ack = (await self._jetstream.stream_info(self._stream)).no_ack
        if self._no_ack:
            raise no_ack_error(f"stream {self._stream!r}")
        await connection.verify_inbox_permission()
        connection.denial_listeners.append(self._on_denied)
        try:
            subject = self._inbox_prefix + self._WILDCARD
            self._inbox = await connection.open_inbox(subject, verify=True)
        except BaseException:
            connection.denial_listeners.remove(self._on_denied)
            raise
        self._reconnects = connection.reconnects
        return self

    async def __aexit__(self, *exception: object) -> None:
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
            NameTooLongError: a subject is longer than the server accepts.
            ConnectError: the connection is closed, or not restored within ``retry_timeout``;
                AuthorizationError if the server rejects the credentials.
            PermissionDeniedError: the user may not publish to a subject.
            StreamNotFoundError: the stream does not exist any more.
            NoStreamError: no stream receives a subject.
            UnexpectedStreamError: another stream has stored a message.
            AckLostError, AckTimeoutError: no PubAck within ``retry_timeout``.
            Exception: what ``on_rejected`` of a :class:`BatchPublisher` raises.
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

    async def flush(self) -> None:
        """Wait until each message has its PubAck, or was rejected.

        Raises: as :meth:`send`.
        """
        await self._run(lambda: not self._window.chunks)

    # -- of the stream --------------------------------------------------------------------------

    @abstractmethod
    def _encode(self, messages: MessageColumns, first_serial: int, start: int) -> EncodedFrames:
        """Encode messages for the window, with the subjects of their responses."""

    @abstractmethod
    def _process(self, frames: Frames) -> None:
        """Process responses: mark the messages that they acknowledge."""

    def _requests(self) -> bytes:
        """Frames that request the last response again; empty where the server lacks it."""
        return b""

    def _ends(self) -> bytes:
        """Frames that precede the messages that are sent again; called before the window's."""
        return b""

    # -- the window -----------------------------------------------------------------------------

    def _encode_valid(
        self, messages: MessageColumns, first_serial: int, start: int
    ) -> EncodedFrames:
        self._validate_sizes(messages)  # again: another server may have another limit
        frames = self._encode(messages, first_serial, start)
        lines = frames.line_lengths(messages)
        longest = int(lines.argmax())
        subject = messages.subject(longest)
        rest = int(lines[longest]) - len(subject.encode())
        self._connection.control_line.validate(subject, rest)
        return frames

    def _validate_sizes(self, messages: MessageColumns) -> NDArray[np.int64]:
        """The size of each message; MessageTooLargeError if one exceeds ``max_payload``."""
        sizes = messages.sizes()
        limit = self._connection.client.max_payload
        if int(sizes.max()) <= limit:
            return sizes
        first = int((sizes > limit).argmax())
        raise too_large_error(messages.subject(first), int(sizes[first]), limit)

    async def _run(self, until: Callable[[], bool]) -> None:
        assert self._inbox is not None, "the publisher must be entered first"
        request_timeout = self._connection.settings.request_timeout
        while True:
            if self._failure is not None:
                raise self._failure
            if self._disconnected:
                self._reason = self._lost_error()
            if self._reason is not None:
                await self._recover(self._reason)
            try:
                for frames in self._window.pieces():
                    await self._connection.writer.write(frames)
            except OSError:
                self._reason = self._lost_error()
                continue
            if until():
                # PubAcks that have arrived already; the rest is read by the next call.
                self._receive()
                if until():
                    return
            await self._wait(self._inbox, min(request_timeout, _MAX_RESPONSE_WAIT))
            if self._silent > request_timeout and self._reason is None:
                await self._verify_connection(self._inbox)

    async def _wait(self, inbox: Inbox, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        await inbox.wait(seconds)
        self._add_time(loop.time() - started)
        self._receive()

    def _receive(self) -> None:
        assert self._inbox is not None
        for frames in self._inbox.take():
            self._process(frames)
        if self._window.advance():
            self._note_progress()

    async def _verify_connection(self, inbox: Inbox) -> None:
        """No response within ``request_timeout``: the connection is dead, or they were lost."""
        connection = self._connection
        request_timeout = connection.settings.request_timeout
        if connection.online.is_set() and (requests := self._requests()):
            with contextlib.suppress(OSError):  # a broken connection is noticed by the caller
                await connection.writer.write(memoryview(requests))
                await self._wait(inbox, min(PONG_TIMEOUT, request_timeout))
            if not self._silent or self._reason is not None:
                return
        if connection.online.is_set() and not await connection.alive(PONG_TIMEOUT):
            connection.reconnect()
            return
        self._receive()
        if self._silent > request_timeout:
            self._reason = self._timeout_error()

    async def _recover(self, reason: NatsSourceError) -> None:
        """Wait for the connection, then go back to the first message without a PubAck."""
        connection = self._connection
        loop = asyncio.get_running_loop()
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
        ends = self._ends()
        self._window.go_back()
        self._reconnects = connection.reconnects
        self._reason, self._silent = None, 0.0
        if ends:
            with contextlib.suppress(OSError):  # a broken connection is noticed by the caller
                await connection.writer.write(memoryview(ends))

    async def _verify_stream(self, waited: float) -> None:
        """A stream that was deleted is an error at once, one without a leader is not."""
        try:
            await self._jetstream.stream_info(self._stream)
        except NatsSourceError as error:
            # The last reason names the cause better than "no responders".
            if not is_transient(error) or self._waited + waited > self._retry_timeout:
                raise

    @property
    def _disconnected(self) -> bool:
        """Whether the connection of the messages in flight is lost."""
        connection = self._connection
        return not connection.online.is_set() or connection.reconnects != self._reconnects

    def _add_time(self, seconds: float) -> None:
        """Count seconds in which a response could arrive."""
        self._waited += seconds
        self._silent += seconds

    def _note_progress(self) -> None:
        """Restart the limits of time: another message is stored."""
        self._waited, self._silent, self._retries = 0.0, 0.0, 0

    def _on_denied(self, subject: str | None, error: Exception) -> None:
        if self._failure is not None or not isinstance(error, NatsSourceError):
            return
        if subject is None:
            self._failure = error
        elif self._window.has_in_flight(subject):
            self._failure = denied_error(subject)

    def _lost_error(self) -> AckLostError:
        subject = self._window.first_subject()
        return lost_error(subject, "the connection was lost before the PubAck arrived")

    def _timeout_error(self) -> AckTimeoutError:
        settings = self._connection.settings
        return AckTimeoutError(
            f"could not confirm a message on {self._window.first_subject()!r}: no PubAck from "
            f"{settings.server_list} within {settings.request_timeout:g} s ('request_timeout'), "
            f"which responds to PING; the message may or may not be stored; check the server's "
            f"log, since a server whose disk is full does not send PubAcks",
            settings=("request_timeout",),
        )
