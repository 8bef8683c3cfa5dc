"""Publishing to streams: many messages in flight, each with its PubAck.

A message is stored only once its PubAck confirms it: a program that publishes at full speed without
awaiting the PubAcks loses messages (docs/internals/measurements.md, Servers 10). One subscription,
``<inbox>.*``, receives the PubAcks of all messages of a connection; the last token of the subject
identifies the message. The subscription is a tapped inbox: many PubAcks at once are parsed as
columns (``wire.publish.pub_acks``), a few one by one. At most ``in_flight`` messages wait for their
PubAcks; :meth:`Publisher.send` waits until fewer do.

Every message ends within ``request_timeout`` in one of three ways: with its PubAck, with an error
that the server returned, or with an error that reports that the outcome is unknown. The last one is
the outcome of all messages in flight when the connection is lost (AckLostError): their PubAcks were
sent to the lost connection. While disconnected, the publisher sends nothing, and new messages wait
for the reconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Iterable, Mapping

import nats.errors

from nats_stream_source.connection.connection import Connection
from nats_stream_source.connection.inbox import Inbox
from nats_stream_source.connection.settings import PONG_TIMEOUT
from nats_stream_source.err_codes import TOO_MANY_REQUESTS
from nats_stream_source.errors import (
    AckTimeoutError,
    ApiError,
    ConfigurationError,
    ConnectError,
    NoStreamError,
    ProtocolError,
    PublishError,
)
from nats_stream_source.jetstream.publish.pub_ack import (
    PubAck,
    lost_error,
    no_stream_error,
    too_large_error,
)
from nats_stream_source.wire.framing.frames import Frames
from nats_stream_source.wire.headers import is_no_responders
from nats_stream_source.wire.publish import pub_acks
from nats_stream_source.wire.publish.headers import header_block

__all__ = ["IN_FLIGHT", "PubAck", "Publisher"]

IN_FLIGHT = 1000

_MAX_LOOP_DELAY = 0.1  # seconds; a wait that ends later shows that the event loop was blocked
_RETRY_PAUSE = 0.25  # seconds, as in NATS's own clients
_MAX_REPEATED = 16  # messages in flight that a stream has rejected before (429)
_NO_STREAM_ATTEMPTS = 3

_NO_SUBJECT = re.compile(r"[\s\ud800-\udfff]")  # the rest is left to the server, as by nats-py
_COLUMNS_PAY = 16  # frames; as many cost the same one by one


class MessageInFlight(asyncio.Future[PubAck]):
    """A message in flight, which is the future of its PubAck.

    One object instead of two: a third of the time for a message was the collector's.

    Attributes:
        subject: the message's subject.
        deadline: by :meth:`MessagesInFlight.now`; infinite until the message was written.
        reconnects: the reconnects of the connection when it was sent.
    """

    __slots__ = ("deadline", "reconnects", "subject")

    subject: str
    deadline: float
    reconnects: int


class MessagesInFlight:
    """Messages in flight by serial number, in the order in which they were sent.

    Args:
        limit: the maximum number of messages.
        timeout: seconds from the writing of a message to its deadline.

    Attributes:
        messages: by serial number.
        slots: acquired for each message before it is added.
        blocked_seconds: in which the event loop was blocked and read no PubAck.
    """

    def __init__(self, limit: int, timeout: float) -> None:
        self.limit = limit
        self._timeout = timeout
        self.slots = asyncio.Semaphore(limit)
        self.messages: dict[int, MessageInFlight] = {}
        self._serial = 0
        self._unwritten: list[MessageInFlight] = []
        self.blocked_seconds = 0.0

    def add(self, subject: str, reconnects: int) -> tuple[int, MessageInFlight]:
        """Add a message for which a slot was acquired; its serial number and itself."""
        loop = asyncio.get_running_loop()
        message = MessageInFlight(loop=loop)
        message.subject, message.reconnects, message.deadline = subject, reconnects, math.inf
        self._serial += 1
        self.messages[self._serial] = message
        # nats-py writes the message after the tasks that are ready now. With a hundred thousand of
        # them that takes longer than the timeout.
        if not self._unwritten:
            loop.call_soon(self._set_deadlines)
        self._unwritten.append(message)
        return self._serial, message

    def _set_deadlines(self) -> None:
        deadline = self.now() + self._timeout
        for message in self._unwritten:
            message.deadline = deadline
        self._unwritten.clear()

    def remove(self, serial: int) -> MessageInFlight | None:
        """Remove a message and release its slot; None if it was removed before."""
        message = self.messages.pop(serial, None)
        if message is not None:
            self.slots.release()
        return message

    def complete(self, serial: int, outcome: PubAck | Exception) -> None:
        """Remove a message and give its caller the outcome."""
        message = self.remove(serial)
        if message is None or message.done():
            return  # the caller was cancelled
        if isinstance(outcome, PubAck):
            message.set_result(outcome)
        else:
            message.set_exception(outcome)

    def complete_stored(
        self, serials: Iterable[int], seqs: Iterable[int], stream: str, domain: str | None
    ) -> None:
        """Complete many messages, each with the sequence at which ``stream`` has stored it."""
        messages, release = self.messages, self.slots.release
        for serial, seq in zip(serials, seqs, strict=True):
            if (message := messages.pop(serial, None)) is not None:
                release()
                if not message.done():
                    message.set_result(PubAck(stream, seq, False, domain))

    def now(self) -> float:
        """The clock of the deadlines, in seconds; it stops while the event loop is blocked."""
        return asyncio.get_running_loop().time() - self.blocked_seconds

    def next_deadline(self) -> float | None:
        """The deadline of the oldest message: all have the same timeout; infinite at first."""
        oldest = next(iter(self.messages.values()), None)
        return None if oldest is None else oldest.deadline

    def overdue(self) -> list[int]:
        """The serial numbers of the messages whose deadline has passed."""
        overdue, now = [], self.now()
        for serial, message in self.messages.items():
            if message.deadline > now:
                break
            overdue.append(serial)
        return overdue


class Publisher:
    """Publishes messages over one connection.

    ``connection.service(Publisher)`` returns the connection's publisher and closes it with the
    connection.

    Args:
        in_flight: the maximum number of messages that wait for their PubAcks.
    """

    def __init__(self, connection: Connection, in_flight: int = IN_FLIGHT) -> None:
        self._connection = connection
        self._in_flight = MessagesInFlight(in_flight, connection.settings.request_timeout)
        self._repeated = asyncio.Semaphore(_MAX_REPEATED)
        self._start_lock = asyncio.Lock()
        self._prefix = ""
        self._template: PubAck | None = None  # of the stream that stored the last messages
        self._learned = b""
        self._inbox: Inbox | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._reconnects = 0
        self._offline_since: float | None = None  # noticed by a message that was to be sent

    def __repr__(self) -> str:
        return f"<Publisher {len(self._in_flight.messages)} of {self._in_flight.limit} in flight>"

    async def publish(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
    ) -> PubAck:
        """Publish a message, wait until the stream has stored it, and return its PubAck.

        If no stream receives the subject, the message was not stored, and the publisher retries
        twice: while a stream elects its leader, or a server starts, it is unavailable for a moment.
        While the stream has too many messages to store (429), it retries for ``request_timeout``,
        without the time in which the message waits for others. Few messages are repeated at a time:
        a thousand would exceed again what the stream accepts.

        Raises: as :meth:`send`, and as the future that it returns.
        """
        loop, timeout = asyncio.get_running_loop(), self._connection.settings.request_timeout
        waited, rejected, attempts_left = 0.0, False, _NO_STREAM_ATTEMPTS
        while True:
            async with self._repeated if rejected else contextlib.nullcontext():
                message = await self.send(subject, payload, headers=headers)
                started = loop.time()
                try:
                    return await message
                except NoStreamError:
                    attempts_left -= 1
                    if not attempts_left:
                        raise
                except PublishError as error:
                    rejected = error.err_code == TOO_MANY_REQUESTS
                    waited += loop.time() - started + _RETRY_PAUSE
                    if not rejected or waited >= timeout:
                        raise
            await asyncio.sleep(_RETRY_PAUSE)

    async def send(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
    ) -> asyncio.Future[PubAck]:
        """Publish a message and return the future of its PubAck.

        Messages are sent in the order of the calls. Waits while ``in_flight`` messages are in
        flight, and while disconnected. The caller must await every future: a message whose PubAck
        is not awaited may be lost.

        Args:
            headers: names and values; the constants of ``pub_ack`` name those that the server
                processes.

        Raises:
            ConfigurationError: the subject is invalid, or a header cannot be sent;
                NameTooLongError if the subject is longer than the server accepts.
            MessageTooLargeError: the message exceeds the server's ``max_payload``.
            ConnectError: the connection is closed, or not restored within ``request_timeout``;
                AuthorizationError if the server rejects the credentials.
            PermissionDeniedError: the user may not subscribe to the inbox of the PubAcks.

        The future raises:
            WrongLastSequenceError: an expected last sequence is not the last one.
            NoStreamError: no stream receives the subject.
            MessageTooLargeError, StreamFullError, TtlNotSupportedError, PublishError: the stream
                rejected the message.
            PermissionDeniedError: the user may not publish to the subject.
            AckLostError, AckTimeoutError: the message may or may not be stored.
        """
        connection = self._connection
        client = connection.client
        block = header_block(headers) if headers else b""
        size = len(payload) + len(block)
        if self._failure is not None:
            raise self._failure
        await connection.verify_inbox_permission()
        if self._inbox is None:
            await self._start()
        if size > client.max_payload:
            raise too_large_error(subject, size, client.max_payload)
        if not subject or _NO_SUBJECT.search(subject):
            raise ConfigurationError(
                f"could not publish to {subject!r}: expected a subject without wildcards, "
                f"whitespace and surrogates"
            )
        await self._acquire_slot()
        serial, message = self._in_flight.add(subject, connection.reconnects)
        command, sizes = ("HPUB", f"{len(block)} {size}") if block else ("PUB", f"{size}")
        rest = f"{self._prefix}{serial} {sizes}"
        line = f"{command} {subject} {rest}\r\n".encode()
        try:
            connection.control_line.validate(subject, len(rest) + 1)
            if connection.writer.buffer(b"%b%b%b\r\n" % (line, block, payload)):
                await connection.writer.flush()
        except (nats.errors.Error, OSError) as error:
            self._in_flight.remove(serial)
            raise ConnectError(
                f"could not publish to {subject!r}: sending to {connection.settings.server_list} "
                f"failed: {error or type(error).__name__}"
            ) from error
        except BaseException:
            self._in_flight.remove(serial)
            raise
        return message

    async def _acquire_slot(self) -> None:
        started = asyncio.get_running_loop().time()
        await self._in_flight.slots.acquire()
        try:
            await self._wait_connected(started)
            # The messages that had the slots may have failed with the publisher.
            if self._failure is not None:
                raise self._failure
        except BaseException:  # also after a cancellation the slot is free for other messages
            self._in_flight.slots.release()
            raise

    async def _wait_connected(self, started: float) -> None:
        """Wait for the connection; time in which other messages waited for it counts."""
        connection, now = self._connection, asyncio.get_running_loop().time()
        if connection.online.is_set():
            self._offline_since = None
            return
        if self._offline_since is None:
            self._offline_since = now
        waited = now - max(started, self._offline_since)
        await connection.wait_connected(connection.settings.request_timeout, waited)

    async def close(self) -> None:
        """End the subscription; messages in flight fail with AckLostError."""
        self._failure = ConnectError(
            f"could not publish: the connection to {self._connection.settings.server_list} is "
            f"closed"
        )
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.cancel()
            await asyncio.gather(receiver, return_exceptions=True)
        self._fail(list(self._in_flight.messages), "the connection was closed")
        inbox, self._inbox = self._inbox, None
        if inbox is not None:
            # The connection is closed next, and the server ends the subscription with it.
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._connection.close_inbox(inbox)

    def on_denied(self, subject: str | None, error: Exception) -> None:
        """Fail the messages on a subject that the server denied; all, if it denied the inbox."""
        for serial in list(self._in_flight.messages):
            if subject is None or self._in_flight.messages[serial].subject == subject:
                self._in_flight.complete(serial, error)

    # -- PubAcks --------------------------------------------------------------------------------

    async def _start(self) -> None:
        async with self._start_lock:
            if self._inbox is not None:
                return
            connection = self._connection
            prefix = connection.client.new_inbox()
            self._inbox = await connection.open_inbox(f"{prefix}.*", verify=True)
            self._prefix = f"{prefix}."
            self._reconnects = connection.reconnects
            self._receiver = asyncio.create_task(self._receive_pub_acks(self._inbox))

    async def _receive_pub_acks(self, inbox: Inbox) -> None:
        connection = self._connection
        loop = asyncio.get_running_loop()
        request_timeout = connection.settings.request_timeout
        try:
            while True:
                deadline, remaining = self._in_flight.next_deadline(), request_timeout
                if deadline is not None:
                    remaining = max(min(deadline - self._in_flight.now(), request_timeout), 0.001)
                started = loop.time()
                await inbox.wait(remaining)
                waited = loop.time() - started
                if waited > remaining + _MAX_LOOP_DELAY:
                    # The event loop was blocked and read no PubAck: not counted as waiting time.
                    self._in_flight.blocked_seconds += waited
                self._process_pub_acks(inbox)
                if self._in_flight.overdue():
                    # With the PONG, all PubAcks that the server sent before it have arrived.
                    if connection.online.is_set() and not await connection.alive(PONG_TIMEOUT):
                        connection.reconnect()
                    self._process_pub_acks(inbox)
                online, now = connection.online.is_set(), connection.reconnects
                if not online or now != self._reconnects:
                    self._reconnects = now
                    messages = self._in_flight.messages.items()
                    lost = [one for one, sent in messages if not online or sent.reconnects != now]
                    self._fail(lost, "the connection was lost before the PubAck arrived")
                self._fail_overdue()
        except Exception as error:  # any error: a caller must not wait for its PubAck forever
            self._failure = error
            self._fail(list(self._in_flight.messages), f"receiving PubAcks failed: {error!r}")
            raise

    def _process_pub_acks(self, inbox: Inbox) -> None:
        for frames in inbox.take():
            template = self._template
            if len(frames) < _COLUMNS_PAY or template is None:
                self._process_one_by_one(frames)
                continue
            serials, seqs = pub_acks.parse(frames, self._prefix.encode(), self._learned)
            stored = seqs >= 0
            self._in_flight.complete_stored(
                serials[stored].tolist(), seqs[stored].tolist(), template.stream, template.domain
            )
            if not stored.all():
                self._process_one_by_one(frames.select(~stored))

    def _process_one_by_one(self, frames: Frames) -> None:
        skip = len(self._prefix)
        for subject, _, header, payload in frames.fields():
            token = subject[skip:]
            # Other clients can publish to an inbox: only a known number identifies a message.
            message = self._in_flight.messages.get(int(token)) if token.isdigit() else None
            if message is None:
                continue
            serial = int(token)
            if is_no_responders(header):
                self._in_flight.complete(serial, no_stream_error(message.subject))
                continue
            try:
                ack = PubAck.parse(message.subject, payload)
            except (ApiError, ProtocolError) as rejection:
                self._in_flight.complete(serial, rejection)
                continue
            self._in_flight.complete(serial, ack)
            if not ack.duplicate and (learned := pub_acks.learn(payload)):
                self._template, self._learned = ack, learned

    def _fail(self, serials: list[int], reason: str) -> None:
        control_line = self._connection.control_line
        for serial in serials:
            subject = self._in_flight.messages[serial].subject
            refused = control_line.refused(subject)
            error = control_line.error(subject) if refused else lost_error(subject, reason)
            self._in_flight.complete(serial, error)

    def _fail_overdue(self) -> None:
        settings = self._connection.settings
        for serial in self._in_flight.overdue():
            subject = self._in_flight.messages[serial].subject
            error = AckTimeoutError(
                f"could not confirm a message on {subject!r}: no PubAck from "
                f"{settings.server_list} within {settings.request_timeout:g} s "
                f"('request_timeout'); the message may or may not be stored: a stream with no_ack, "
                f"for example, stores it and sends no PubAck",
                settings=("request_timeout",),
            )
            self._in_flight.complete(serial, error)
