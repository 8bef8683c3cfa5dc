"""A delivered JetStream message and its acknowledgement (ADR-15, "JSAck", "Ack Handling").

nats-py's message class is not used. It reads a publisher's header named "Status" as a status,
raises an error where the document requires that a second acknowledgement is ignored, and publishes
an acknowledgement also for a consumer with ack policy "none".

An acknowledgement is a message without a response, so one that leads nowhere looks like one that
arrived, and the message is delivered again after the consumer's ack wait. :class:`AckRoute` notices
two causes:

- the user may not publish to ``$JS.ACK``: the server reports the violation, apart from the
  acknowledgement. It is logged, and every later acknowledgement is an error;
- an account import lacks ``$JS.ACK``: over an import, the first acknowledgement of each stream is
  sent as a request. Without the import it has no responders, which is an error at once.
"""

from __future__ import annotations

import json

import nats.errors

from nats_stream_source.connection.connection import Connection
from nats_stream_source.errors import (
    AckError,
    JetStreamNotEnabledError,
    NatsSourceError,
    PermissionDeniedError,
    RequestTimeoutError,
)
from nats_stream_source.jetstream.subjects import is_account_import
from nats_stream_source.logs import field_logger
from nats_stream_source.wire.consumer.messages import AckReply
from nats_stream_source.wire.framing.frames import FrameFields
from nats_stream_source.wire.headers import Headers, parse_headers

log = field_logger(__name__)

_ACK, _NAK, _IN_PROGRESS, _TERM = b"+ACK", b"-NAK", b"+WPI", b"+TERM"
_NO_HEADERS = Headers(None, "", ())
_PREFIX = "$JS.ACK."


class AckRoute:
    """The way of acknowledgements of one connection: a service of the connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._imported = is_account_import(connection.settings.api_prefix)
        self._verified: set[str] = set()
        self._denied = False

    def on_denied(self, subject: str | None, error: Exception) -> None:
        """The server denied an acknowledgement, if ``subject`` is that of one."""
        if subject is not None and subject.startswith(_PREFIX) and not self._denied:
            self._denied = True
            log.warning("acknowledgements are denied", subject=_PREFIX + ">", error=error)

    async def close(self) -> None:
        """Nothing to close."""

    async def send(self, reply: str, stream: str, payload: bytes, *, confirm: bool) -> None:
        """Publish an acknowledgement; with ``confirm``, wait until the server confirms it."""
        if self._denied:
            raise PermissionDeniedError(
                f"the server denied the subject '{_PREFIX}>'; add it to the user's permissions"
            )
        unverified = self._imported and stream not in self._verified
        if not (confirm or unverified):
            await self._connection.publish(reply, payload)
            return
        try:
            await self._connection.request(reply, payload)
        except JetStreamNotEnabledError as error:
            if not self._imported:
                raise
            raise JetStreamNotEnabledError(
                f"'{_PREFIX}{stream}.>' has no responders: the account does not import it; export "
                f"and import '{_PREFIX}{stream}.>' as a service"
            ) from error
        except RequestTimeoutError:
            if not unverified:
                raise
            # An import may pass acknowledgements and no confirmations.
            log.warning("acknowledgement was not confirmed over the import", stream=stream)
        self._verified.add(stream)


class JsMessage:
    """A message that a consumer delivered.

    An acknowledgement that could not be published, or was not confirmed within ``request_timeout``,
    raises AckError and may be retried. All of them are ignored after a terminal one, and with ack
    policy "none".

    Attributes:
        subject: the subject that the message was published to.
        data: the payload.
        reply: the reply subject as the server sent it; acknowledgements are published to it.
        acked: whether a terminal acknowledgement was published; later ones are ignored.
    """

    __slots__ = (
        "_acks",
        "_connection",
        "_header_block",
        "_metadata",
        "acked",
        "data",
        "reply",
        "subject",
    )

    def __init__(
        self,
        connection: Connection,
        subject: str,
        data: bytes,
        reply: str,
        block: bytes = b"",
        *,
        acks: bool = True,
        metadata: AckReply | None = None,
    ) -> None:
        """Create a message.

        Args:
            connection: the connection that acknowledgements are published on.
            block: the raw header block.
            acks: False for ack policy "none".
            metadata: the parsed reply subject; None to parse it at its first use, which is as
                costly as the rest of the message.
        """
        self.subject = subject
        self.data = data
        self.reply = reply
        self._metadata = metadata
        self.acked = False
        self._connection = connection
        self._header_block = block
        self._acks = acks

    def __repr__(self) -> str:
        return (
            f"<JsMessage {self.subject} stream_seq={self.metadata.stream_seq} "
            f"delivered={self.metadata.delivered} {len(self.data)} bytes>"
        )

    @property
    def metadata(self) -> AckReply:
        """The fields of the reply subject: sequences, timestamp, pending count."""
        if self._metadata is None:
            self._metadata = AckReply.parse(self.reply)
        return self._metadata

    @property
    def headers(self) -> Headers:
        """The header fields as the publisher wrote them.

        Raises:
            ProtocolError: the header block is malformed.
        """
        return parse_headers(self._header_block) if self._header_block else _NO_HEADERS

    async def ack(self) -> None:
        """Acknowledge the message (``+ACK``): it is not delivered again.

        Returns when the acknowledgement is published, which does not confirm that the server
        received it.
        """
        await self._acknowledge(_ACK)

    async def nak(self, delay: float | None = None) -> None:
        """Request redelivery (``-NAK``), at once or after ``delay`` seconds."""
        options = json.dumps({"delay": round(delay * 1e9)}).encode() if delay else b""
        await self._acknowledge(_NAK + b" " + options if options else _NAK)

    async def term(self) -> None:
        """Stop redelivery of a message that cannot be processed (``+TERM``)."""
        await self._acknowledge(_TERM)

    async def in_progress(self) -> None:
        """Restart the ack wait (``+WPI``). This acknowledgement is not terminal."""
        await self._acknowledge(_IN_PROGRESS, terminal=False)

    async def ack_sync(self) -> None:
        """As :meth:`ack`, and wait until the server confirms it (a "double ack")."""
        await self._acknowledge(_ACK, confirm=True)

    async def _acknowledge(
        self, payload: bytes, *, terminal: bool = True, confirm: bool = False
    ) -> None:
        if self.acked or not self._acks:
            return
        # Set before the await, so that only one of two tasks publishes.
        self.acked = terminal
        try:
            route = self._connection.service(AckRoute)
            await route.send(self.reply, self.metadata.stream, payload, confirm=confirm)
        except BaseException as error:  # includes cancellation: the acknowledgement may be retried
            if terminal:
                self.acked = False
            if not isinstance(error, (NatsSourceError, nats.errors.Error, OSError)):
                raise
            late = isinstance(error, RequestTimeoutError)
            raise AckError(
                f"acknowledgement of {self!r} failed: {error}; retry"
                + " or increase 'request_timeout'" * late,
                settings=("request_timeout",) if late else (),
            ) from error


def message_of(connection: Connection, frame: FrameFields, *, acks: bool) -> JsMessage:
    """The message of a delivered frame."""
    subject, reply, block, payload = frame
    return JsMessage(
        connection,
        subject.decode("utf-8", "surrogateescape"),
        payload,
        reply.decode("utf-8", "surrogateescape"),
        block,
        acks=acks,
    )
