"""Publishing of many messages as columns: the loop that sends, and sends again.

Theory of operation. :meth:`ColumnPublisher.send` encodes a batch of messages at once
(``wire/publish/frames.py``) and sends the frames in large pieces. A *window* limits the messages
and bytes between the first message without a PubAck and the last message sent. Responses are parsed
as columns and mark the messages of the window. So a message costs neither an object nor a task
switch.

A message without a PubAck is sent again, *with all messages after it*, so that messages on one
subject are stored in their order: after a reconnect, after ``request_timeout`` without any PubAck,
and after a response that is transient (no leader). Messages may be stored twice then, unless they
have a ``Nats-Msg-Id`` and the stream's duplicate window has not passed. If no further message is
stored for ``retry_timeout`` seconds, the publisher fails with the last reason. Time counts only
while the event loop runs: between two calls, PubAcks wait in the socket.

The loop holds the :class:`Acknowledgements` of its stream: a PubAck for each message
(``batch_publisher.py``), or one for many (``fast_ingest_publisher.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import nats.errors
import numpy as np

from nats_stream_source.connection.inbox import Inbox
from nats_stream_source.connection.liveness import PONG_TIMEOUT
from nats_stream_source.connection.permissions import denied_error
from nats_stream_source.errors import (
    AckLostError,
    AckTimeoutError,
    NatsSourceError,
    NoStreamError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.publish.acknowledgements import Acknowledgements
from nats_stream_source.jetstream.publish.pub_ack import lost_error, no_ack_error
from nats_stream_source.jetstream.retry import Backoff, is_transient
from nats_stream_source.logs import field_logger
from nats_stream_source.wire.publish.frames import MessageColumns

if TYPE_CHECKING:
    from typing_extensions import Self

log = field_logger(__name__)

_CHUNK_BYTES = 16 << 20  # of messages that are encoded at once
_MAX_RESPONSE_WAIT = 0.5  # seconds; how often a lost connection is noticed at the latest
_BACKOFF = Backoff(0.05, 1.0)


class ColumnPublisher:
    """Publishes columns of messages to one stream; an async context manager.

    Args:
        jetstream: the account's JetStream; its connection is used.
        acks: the responses of the stream.
        retry_timeout: seconds without progress after which the publisher fails. Default: the
            connection's ``connect_timeout``.
        no_ack: whether the stream stores messages without PubAcks, which is refused. None: the
            stream is requested.
    """

    def __init__(
        self,
        jetstream: JetStream,
        acks: Acknowledgements,
        retry_timeout: float | None,
        no_ack: bool | None,
    ) -> None:
        self._jetstream = jetstream
        self._connection = jetstream.connection
        self._acks = acks
        settings = self._connection.settings
        self._retry_timeout = settings.connect_timeout if retry_timeout is None else retry_timeout
        self._no_ack = no_ack
        self._inbox: Inbox | None = None

    @property
    def stored(self) -> int:
        """Number of messages that were acknowledged, duplicates included."""
        return self._acks.stored

    @property
    def duplicates(self) -> int:
        """Number of those that the stream already had; 0 where servers do not report them."""
        return self._acks.duplicates

    async def __aenter__(self) -> Self:
        """Subscribe to the PubAcks.

        Raises:
            ConfigurationError: the stream has ``no_ack``.
        """
        connection = self._connection
        if self._no_ack is None:
            with contextlib.suppress(NatsSourceError):  # send() reports it, if it persists
                self._no_ack = (await self._jetstream.stream_info(self._acks.stream)).no_ack
        if self._no_ack:
            raise no_ack_error(f"stream {self._acks.stream!r}")
        await connection.verify_inbox_permission()
        connection.denial_listeners.append(self._on_denied)
        try:
            acks = self._acks
            subject = acks.inbox_prefix + acks.wildcard
            self._inbox = await connection.open_inbox(subject, verify=True)
        except BaseException:
            connection.denial_listeners.remove(self._on_denied)
            raise
        self._acks.reconnects = connection.reconnects
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
        ends = np.cumsum(self._acks.validate_sizes(messages))
        start = 0
        while start < len(messages):
            border = (int(ends[start - 1]) if start else 0) + _CHUNK_BYTES
            stop = max(int(np.searchsorted(ends, border, side="right")), start + 1)
            await self._send_chunk(messages.slice(start, stop))
            start = stop

    async def _send_chunk(self, messages: MessageColumns) -> None:
        chunk = self._acks.window.append(messages)
        await self._run(lambda: chunk.sent == len(chunk.frames))

    async def flush(self) -> None:
        """Wait until each message has its PubAck, or was rejected.

        Raises: as :meth:`send`.
        """
        await self._run(lambda: not self._acks.window.chunks)

    # -- the window -----------------------------------------------------------------------------

    async def _run(self, until: Callable[[], bool]) -> None:
        assert self._inbox is not None, "the publisher must be entered first"
        acks, loop = self._acks, asyncio.get_running_loop()
        request_timeout = self._connection.settings.request_timeout
        while True:
            if acks.failure is not None:
                raise acks.failure
            if acks.disconnected:
                acks.go_back = self._lost_error()
            if acks.go_back is not None:
                await self._recover(acks.go_back)
            try:
                await self._send_available()
            except OSError:
                acks.go_back = self._lost_error()
                continue
            if until():
                # PubAcks that have arrived already; the rest is read by the next call.
                self._receive()
                if until():
                    return
            started = loop.time()
            await self._inbox.wait(min(request_timeout, _MAX_RESPONSE_WAIT))
            acks.add_time(loop.time() - started)
            self._receive()
            if acks.silent > request_timeout and acks.go_back is None:
                await self._verify_connection()

    async def _send_available(self) -> None:
        for frames in self._acks.window.pieces():
            await self._connection.writer.write(frames)

    async def _verify_connection(self) -> None:
        """No response within ``request_timeout``: the connection is dead, or they were lost."""
        connection, acks = self._connection, self._acks
        if connection.online.is_set() and (requests := self._acks.requests()):
            await self._request_acks(requests)
            if not acks.silent or acks.go_back is not None:
                return
        if connection.online.is_set() and not await connection.alive(PONG_TIMEOUT):
            connection.reconnect()
            return
        self._receive()
        if acks.silent > connection.settings.request_timeout:
            acks.go_back = self._timeout_error()

    async def _request_acks(self, requests: bytes) -> None:
        assert self._inbox is not None
        loop = asyncio.get_running_loop()
        started = loop.time()
        with contextlib.suppress(OSError):  # a broken connection is noticed by the caller
            await self._connection.writer.write(memoryview(requests))
            timeout = min(PONG_TIMEOUT, self._connection.settings.request_timeout)
            await self._inbox.wait(timeout)
        self._acks.add_time(loop.time() - started)
        self._receive()

    async def _recover(self, reason: NatsSourceError) -> None:
        """Wait for the connection, then go back to the first message without a PubAck."""
        connection, acks = self._connection, self._acks
        loop = asyncio.get_running_loop()
        if acks.waited > self._retry_timeout:
            raise reason
        started = loop.time()
        pause = _BACKOFF.pause(acks.retries)
        await asyncio.sleep(pause)
        acks.retries += 1
        await connection.wait_connected(max(self._retry_timeout - acks.waited, pause))
        if isinstance(reason, NoStreamError):
            await self._verify_stream(loop.time() - started)
        self._receive()
        acks.add_time(loop.time() - started)
        log.warning(
            "sending messages again",
            stream=acks.stream,
            messages=acks.window.in_flight,
            attempt=acks.retries,
            reason=reason,
        )
        ends = self._acks.ends()
        acks.window.go_back()
        acks.reconnects = connection.reconnects
        acks.go_back, acks.silent = None, 0.0
        if ends:
            with contextlib.suppress(OSError):  # a broken connection is noticed by the caller
                await connection.writer.write(memoryview(ends))

    async def _verify_stream(self, waited: float) -> None:
        """A stream that was deleted is an error at once, one without a leader is not."""
        try:
            await self._jetstream.stream_info(self._acks.stream)
        except NatsSourceError as error:
            # The last reason names the cause better than "no responders".
            if not is_transient(error) or self._acks.waited + waited > self._retry_timeout:
                raise

    def _receive(self) -> None:
        assert self._inbox is not None
        for frames in self._inbox.take():
            self._acks.process(frames)
        if self._acks.window.advance():
            self._acks.note_progress()

    def _on_denied(self, subject: str | None, error: Exception) -> None:
        if self._acks.failure is not None or not isinstance(error, NatsSourceError):
            return
        if subject is None:
            self._acks.failure = error
            return
        if self._acks.window.has_in_flight(subject):
            self._acks.failure = denied_error(subject)

    def _lost_error(self) -> AckLostError:
        subject = self._acks.window.first_subject()
        return lost_error(subject, "the connection was lost before the PubAck arrived")

    def _timeout_error(self) -> AckTimeoutError:
        settings = self._connection.settings
        return AckTimeoutError(
            f"could not confirm a message on {self._acks.window.first_subject()!r}: no PubAck from "
            f"{settings.server_list} within {settings.request_timeout:g} s ('request_timeout'), "
            f"which responds to PING; the message may or may not be stored; check the server's "
            f"log, since a server whose disk is full does not send PubAcks",
            settings=("request_timeout",),
        )
