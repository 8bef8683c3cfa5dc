"""One delivered JetStream message, and its acknowledgement (ADR-15, "JSAck", "Ack Handling").

nats-py's message is not used here: it takes a publisher's header called "Status" for a status,
raises where the document says that a second acknowledgement is ignored, and publishes one also
where the consumer has ack policy "none".
"""

from __future__ import annotations

import json

import nats.errors

from nats_stream_source.errors import AckError, NatsSourceError
from nats_stream_source.jetstream.connection import Connection
from nats_stream_source.wire.ack_reply import AckReply
from nats_stream_source.wire.headers import Headers, parse_headers

_ACK, _NAK, _IN_PROGRESS, _TERM = b"+ACK", b"-NAK", b"+WPI", b"+TERM"
_NO_HEADERS = Headers(None, "", ())


class JsMessage:
    """A message that a consumer delivered.

    Attributes:
        subject: what it was published to.
        data: the payload.
        reply: the reply subject, to which acknowledgements go, as the server sent it.
        metadata: what the reply subject says: sequences, time, pending.
        acked: whether a terminal acknowledgement was published: all later ones are ignored.
    """

    __slots__ = ("_acks", "_block", "_connection", "acked", "data", "metadata", "reply", "subject")

    def __init__(
        self,
        connection: Connection,
        subject: str,
        data: bytes,
        reply: str,
        block: bytes = b"",
        *,
        acks: bool = True,
    ) -> None:
        """``block`` is the header block, ``acks`` False where the ack policy is "none"."""
        self.subject = subject
        self.data = data
        self.reply = reply
        self.metadata = AckReply.parse(reply)
        self.acked = False
        self._connection = connection
        self._block = block
        self._acks = acks

    def __repr__(self) -> str:
        return (
            f"<JsMessage {self.subject} stream_seq={self.metadata.stream_seq} "
            f"delivered={self.metadata.delivered} {len(self.data)} bytes>"
        )

    @property
    def headers(self) -> Headers:
        """The header fields, as the publisher wrote them.

        Raises:
            ProtocolError: the publisher sent bytes that are no header block.
        """
        return parse_headers(self._block) if self._block else _NO_HEADERS

    async def ack(self) -> None:
        """It is done: deliver it no more. Returns when published, not when the server has it.

        As all four: ignored after a terminal acknowledgement, and where the ack policy is "none".

        Raises:
            AckError: it could not be published. It may be tried again.
        """
        await self._publish(_ACK)

    async def nak(self, delay: float | None = None) -> None:
        """It failed: deliver it again, at once or after ``delay`` seconds; AckError as above."""
        if delay:
            await self._publish(_NAK + b" " + json.dumps({"delay": round(delay * 1e9)}).encode())
        else:
            await self._publish(_NAK)

    async def term(self) -> None:
        """It cannot be done: deliver it no more; AckError as above."""
        await self._publish(_TERM)

    async def in_progress(self) -> None:
        """It takes longer: begin the ack wait anew. Not terminal; AckError as above."""
        await self._publish(_IN_PROGRESS, terminal=False)

    async def ack_sync(self) -> None:
        """As :meth:`ack`, and wait until the server says that it has it (a "double ack").

        Raises:
            AckError: not confirmed within ``request_timeout``. It may be tried again.
        """
        if self.acked or not self._acks:
            return
        self.acked = True  # before the await, as below
        try:
            await self._connection.request(self.reply, _ACK)
        except NatsSourceError as error:
            self.acked = False
            raise AckError(f"{self!r}: the acknowledgement was not confirmed: {error}") from error
        except BaseException:
            self.acked = False
            raise

    async def _publish(self, payload: bytes, *, terminal: bool = True) -> None:
        if self.acked or not self._acks:
            return
        # Before the await, so that of two tasks only one publishes.
        self.acked = terminal
        try:
            await self._connection.client.publish(self.reply, payload)
        except BaseException as error:  # also cancelled: it may be tried again
            if terminal:
                self.acked = False
            if not isinstance(error, (nats.errors.Error, OSError)):
                raise
            raise AckError(f"{self!r}: the acknowledgement was not published: {error}") from error
