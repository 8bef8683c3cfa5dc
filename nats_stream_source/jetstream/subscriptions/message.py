"""A delivered JetStream message and its acknowledgement (ADR-15, "JSAck", "Ack Handling").

nats-py's message class is not used. It reads a publisher's header named "Status" as a status,
raises an error where the document requires that a second acknowledgement is ignored, and publishes
an acknowledgement also for a consumer with ack policy "none".
"""

from __future__ import annotations

import json

import nats.errors

from nats_stream_source.connection.connection import Connection
from nats_stream_source.errors import AckError, NatsSourceError, RequestTimeoutError
from nats_stream_source.jetstream.subscriptions.ack_route import AckRoute
from nats_stream_source.wire.consumer.ack_subject import AckReply
from nats_stream_source.wire.headers import Headers, parse_headers

_ACK, _NAK, _IN_PROGRESS, _TERM = b"+ACK", b"-NAK", b"+WPI", b"+TERM"
_NO_HEADERS = Headers(None, "", ())


class JsMessage:
    """A message that a consumer delivered.

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
            subject: the subject that the message was published to.
            data: the payload.
            reply: the reply subject.
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
        received it; ``ack_route.py`` describes what is noticed. All four acknowledgements are
        ignored after a terminal one, and with ack policy "none".

        Raises:
            AckError: the acknowledgement could not be published; it may be retried.
        """
        await self._publish_ack(_ACK)

    async def nak(self, delay: float | None = None) -> None:
        """Request redelivery (``-NAK``), at once or after ``delay`` seconds.

        Raises:
            AckError: as for :meth:`ack`.
        """
        if delay:
            await self._publish_ack(
                _NAK + b" " + json.dumps({"delay": round(delay * 1e9)}).encode()
            )
        else:
            await self._publish_ack(_NAK)

    async def term(self) -> None:
        """Stop redelivery of a message that cannot be processed (``+TERM``).

        Raises:
            AckError: as for :meth:`ack`.
        """
        await self._publish_ack(_TERM)

    async def in_progress(self) -> None:
        """Restart the ack wait (``+WPI``). This acknowledgement is not terminal.

        Raises:
            AckError: as for :meth:`ack`.
        """
        await self._publish_ack(_IN_PROGRESS, terminal=False)

    async def ack_sync(self) -> None:
        """As :meth:`ack`, and wait until the server confirms it (a "double ack").

        Raises:
            AckError: not confirmed within ``request_timeout``; it may be retried.
        """
        if self.acked or not self._acks:
            return
        self.acked = True  # before the await, as in _publish_ack
        try:
            route = self._connection.service(AckRoute)
            await route.request(self.reply, self.metadata.stream, _ACK)
        except NatsSourceError as error:
            self.acked = False
            hint = ""
            if isinstance(error, RequestTimeoutError):
                hint = "; retry or increase 'request_timeout'"
            raise AckError(
                f"acknowledgement of {self!r} was not confirmed: {error}{hint}",
                settings=("request_timeout",) if hint else (),
            ) from error
        except BaseException:
            self.acked = False
            raise

    async def _publish_ack(self, payload: bytes, *, terminal: bool = True) -> None:
        if self.acked or not self._acks:
            return
        # Set before the await, so that only one of two tasks publishes.
        self.acked = terminal
        try:
            route = self._connection.service(AckRoute)
            await route.publish(self.reply, self.metadata.stream, payload)
        except BaseException as error:  # includes cancellation: the acknowledgement may be retried
            if terminal:
                self.acked = False
            if isinstance(error, NatsSourceError):
                raise AckError(f"acknowledgement of {self!r} failed: {error}") from error
            if not isinstance(error, (nats.errors.Error, OSError)):
                raise
            raise AckError(
                f"acknowledgement of {self!r} was not published: {error}; retry"
            ) from error
