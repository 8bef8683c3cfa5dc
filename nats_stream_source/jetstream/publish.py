"""Publishing to streams: many messages under way, each with its PubAck.

A message is stored when its PubAck says so, and not before: publishing at full speed without
awaiting them loses messages (DESIGN 3.10). One subscription, ``<inbox>.*``, takes the PubAcks of
all messages of a connection; the last token says which message one belongs to. It is a tapped
inbox, so a PubAck costs a slice of the received bytes and a small JSON object. At most
``in_flight`` messages wait for theirs at once; who wants to publish more waits for room.

Every message ends in one of three ways, within ``request_timeout``: its PubAck, the server's
refusal, or an error that says that nobody knows. The last is what a lost connection means for all
messages under way (AckLostError): their PubAcks went to a connection that is no more. While there
is no connection nothing is sent; what is to be published waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

import nats.errors
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from nats_stream_source.errors import (
    AckLostError,
    AckTimeoutError,
    ApiError,
    ConfigurationError,
    ConnectError,
    MessageTooLargeError,
    NatsSourceError,
    NoStreamError,
    ProtocolError,
)
from nats_stream_source.jetstream.bridge import Inbox
from nats_stream_source.jetstream.connection import Connection
from nats_stream_source.jetstream.pub_ack import ROLLUP, PubAck
from nats_stream_source.wire.frames import Frames, Kind

__all__ = ["IN_FLIGHT", "ROLLUP", "PubAck", "Publisher"]

IN_FLIGHT = 1000

_PONG_DEADLINE = 2.0  # seconds
_HELD_UP = 0.1  # seconds that a wait may be late
_NO_STREAM_PAUSE = 0.25  # seconds; what NATS's own clients wait

_NO_RESPONDERS = b"NATS/1.0 503"
_HEADER_NAME = re.compile(r"[!-9;-~]+")


@dataclass(slots=True)
class _Message:
    """A message under way."""

    subject: str
    future: asyncio.Future[PubAck]
    deadline: float
    reconnects: int


class Publisher:
    """Publishes over one connection. Use ``connection.companion(Publisher)``, which it closes."""

    def __init__(self, connection: Connection, in_flight: int = IN_FLIGHT) -> None:
        self._connection = connection
        self._in_flight = in_flight
        self._room = asyncio.Semaphore(in_flight)
        self._starting = asyncio.Lock()
        self._under_way: dict[int, _Message] = {}
        self._serial = 0
        self._prefix = ""
        self._inbox: Inbox | None = None
        self._collector: asyncio.Task[None] | None = None
        self._broken: Exception | None = None
        self._reconnects = 0
        self._held_up = 0.0

    def __repr__(self) -> str:
        return f"<Publisher {len(self._under_way)} of {self._in_flight} in flight>"

    async def publish(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
    ) -> PubAck:
        """Publish a message and wait until the server has stored it; its PubAck.

        Where no stream takes the subject, nothing was stored, and it is tried again twice: a
        stream that is elected a leader, or a server that starts, is there a moment later.

        Raises: as :meth:`send`, and as the future that it returns.
        """
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(NoStreamError),
            stop=stop_after_attempt(3),
            wait=wait_fixed(_NO_STREAM_PAUSE),
            reraise=True,
        ):
            with attempt:
                return await (await self.send(subject, payload, headers=headers))
        raise AssertionError("unreachable: the last failure is raised again")

    async def send(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
    ) -> asyncio.Future[PubAck]:
        """Publish a message; the future of its PubAck. Messages are sent in the order of the calls.

        Waits while ``in_flight`` messages are under way, or while there is no connection. Of every
        future the outcome must be looked at: a message whose PubAck nobody awaits may be lost.

        Args:
            headers: names and values; see the constants of this module for those that the server
                acts on.

        Raises:
            ConfigurationError: a header that cannot be sent.
            MessageTooLargeError: more than the server's ``max_payload``.
            ConnectError: closed, or no connection within ``request_timeout``; AuthorizationError
                where that is for the credentials.
            PermissionDeniedError: answers cannot be received.

        The future raises:
            WrongLastSequenceError: an expected last sequence is not the last one.
            NoStreamError: no stream takes the subject.
            MessageTooLargeError, StreamFullError, TtlNotSupportedError, PublishError: refused.
            PermissionDeniedError: the user may not publish to the subject.
            AckLostError, AckTimeoutError: the message may be stored or not.
        """
        connection = self._connection
        client = connection.client
        size = len(payload) + (_header_size(headers) if headers else 0)
        if self._broken is not None:
            raise self._broken
        connection.check_inboxes()
        if self._inbox is None:
            await self._start()
        if size > client.max_payload:
            raise MessageTooLargeError(
                f"a message of {size} bytes on {subject!r} exceeds the server's max_payload of "
                f"{client.max_payload}"
            )
        await self._room.acquire()
        try:
            await self._until_online()
        except BaseException:  # cancelled, too: the room is needed by others
            self._room.release()
            raise
        loop = asyncio.get_running_loop()
        deadline = self._now() + connection.settings.request_timeout
        message = _Message(subject, loop.create_future(), deadline, connection.reconnects)
        self._serial += 1
        serial = self._serial
        self._under_way[serial] = message
        try:
            # dict(): nats-py's type; it does not change it.
            fields = dict(headers) if headers else None
            await client.publish(subject, payload, f"{self._prefix}{serial}", fields)
        except nats.errors.BadSubjectError as error:
            self._forget(serial)
            raise ConfigurationError(f"{subject!r} is no subject to publish to") from error
        except (nats.errors.Error, OSError) as error:
            self._forget(serial)
            raise ConnectError(
                f"a message on {subject!r} could not be sent to {connection.settings.places}: "
                f"{error or type(error).__name__}"
            ) from error
        except BaseException:
            self._forget(serial)
            raise
        return message.future

    async def close(self) -> None:
        """End the subscription. What is under way fails with AckLostError."""
        self._broken = ConnectError(
            f"the connection to {self._connection.settings.places} is closed"
        )
        collector, self._collector = self._collector, None
        if collector is not None:
            collector.cancel()
            await asyncio.gather(collector, return_exceptions=True)
        self._fail(list(self._under_way), "the connection was closed")
        inbox, self._inbox = self._inbox, None
        if inbox is not None:
            # The server forgets the subscription with the connection, which is closed next.
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._connection.release(inbox)

    def denied(self, subject: str | None, error: Exception) -> None:
        """The server denied a subject, or with None the inbox: nothing else will answer."""
        for serial, message in list(self._under_way.items()):
            if subject is None:
                self._settle(serial, error=error)
            # nats-py has made the server's text lower case.
            elif message.subject.lower() == subject:
                self._settle(serial, error=self._connection.denial(message.subject))

    # -- answers --------------------------------------------------------------------------------

    async def _start(self) -> None:
        async with self._starting:
            if self._inbox is not None:
                return
            connection = self._connection
            prefix = connection.client.new_inbox()
            self._inbox = await connection.inbox(f"{prefix}.*")
            self._prefix = f"{prefix}."
            self._reconnects = connection.reconnects
            self._collector = asyncio.create_task(self._collect(self._inbox))

    async def _collect(self, inbox: Inbox) -> None:
        connection = self._connection
        loop = asyncio.get_running_loop()
        longest = connection.settings.request_timeout
        try:
            while True:
                # All deadlines are equally far away, so the oldest message's is the next one.
                oldest = next(iter(self._under_way.values()), None)
                left = max(oldest.deadline - self._now(), 0.001) if oldest else longest
                began = loop.time()
                await inbox.wait(left)
                waited = loop.time() - began
                if waited > left + _HELD_UP:
                    # The event loop stood still: nothing was sent or read, so it counts for no one.
                    self._held_up += waited
                self._answers(inbox)
                if self._overdue():
                    # What the server sent before the PONG has arrived with it.
                    if connection.online.is_set() and not await connection.alive(_PONG_DEADLINE):
                        connection.renew()
                    self._answers(inbox)
                if not connection.online.is_set() or connection.reconnects != self._reconnects:
                    self._reconnects = connection.reconnects
                    self._lose()
                self._expire()
        except Exception as error:  # whatever it is: who waits for a PubAck must not wait for ever
            self._broken = error
            self._fail(list(self._under_way), f"no PubAcks can be read: {error!r}")
            raise

    def _answers(self, inbox: Inbox) -> None:
        for frames in inbox.take():
            self._answers_in(frames)

    def _answers_in(self, frames: Frames) -> None:
        buffer = frames.buffer
        skip = len(self._prefix)
        for kind, subject, stop, header, begin, end in zip(
            frames.kind.tolist(),
            frames.subject_begin.tolist(),
            frames.subject_end.tolist(),
            frames.header_begin.tolist(),
            frames.payload_begin.tolist(),
            frames.payload_end.tolist(),
            strict=True,
        ):
            token = bytes(buffer[subject + skip : stop])
            # An inbox can be written to by others: what is no number was not asked for.
            message = self._under_way.get(int(token)) if token.isdigit() else None
            if message is None:
                continue
            serial = int(token)
            if kind == Kind.HMSG and bytes(buffer[header:begin]).startswith(_NO_RESPONDERS):
                error: NatsSourceError = NoStreamError(
                    f"no stream takes messages on {message.subject!r}: it does not exist, or the "
                    f"options 'domain' and 'apiPrefix' do not lead to it (code 503)"
                )
                self._settle(serial, error=error)
                continue
            try:
                self._settle(serial, PubAck.parse(message.subject, bytes(buffer[begin:end])))
            except (ApiError, ProtocolError) as refusal:
                self._settle(serial, error=refusal)

    def _settle(
        self, serial: int, ack: PubAck | None = None, error: Exception | None = None
    ) -> None:
        future = self._under_way[serial].future
        self._forget(serial)
        if future.done():
            return  # whoever waited has gone away
        if error is not None:
            future.set_exception(error)
        elif ack is not None:
            future.set_result(ack)

    def _forget(self, serial: int) -> None:
        if self._under_way.pop(serial, None) is not None:
            self._room.release()

    def _lose(self) -> None:
        """The connection was lost: what was sent over it gets no PubAck any more."""
        online, now = self._connection.online.is_set(), self._connection.reconnects
        gone = [s for s, m in self._under_way.items() if not online or m.reconnects != now]
        self._fail(gone, "the connection was lost before its PubAck came")

    def _fail(self, serials: list[int], reason: str) -> None:
        for serial in serials:
            subject = self._under_way[serial].subject
            text = f"a message on {subject!r}: {reason}; it may be stored or not"
            self._settle(serial, error=AckLostError(text))

    def _now(self) -> float:
        """Seconds, those left out in which the event loop stood still."""
        return asyncio.get_running_loop().time() - self._held_up

    def _overdue(self) -> list[int]:
        found, now = [], self._now()
        for serial, message in self._under_way.items():
            if message.deadline > now:
                break
            found.append(serial)
        return found

    def _expire(self) -> None:
        settings = self._connection.settings
        for serial in self._overdue():
            error = AckTimeoutError(
                f"{settings.places} sent no PubAck for a message on "
                f"{self._under_way[serial].subject!r} within {settings.request_timeout:g} s "
                f"(option 'requestTimeout'); it may be stored or not"
            )
            self._settle(serial, error=error)

    async def _until_online(self) -> None:
        connection = self._connection
        if not connection.online.is_set():
            await connection.until_connected(connection.settings.request_timeout)


def _header_size(headers: Mapping[str, str]) -> int:
    """Bytes of the header block; ConfigurationError where a header cannot be sent unchanged."""
    size = len("NATS/1.0\r\n\r\n")
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise ConfigurationError(f"{name!r} is no header's name: visible ASCII without ':'")
        if "\r" in value or "\n" in value or value != value.strip():
            raise ConfigurationError(
                f"the header {name!r}: a value has no line breaks and no spaces around it"
            )
        size += len(name) + len(value.encode()) + len(": \r\n")
    return size
