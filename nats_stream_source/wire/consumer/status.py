"""Status messages of consumers (ADR-15, "Automatic Status Management").

The server sends them between messages or instead of messages. The status is in the first line of
the header block of a message whose reply subject is not a ``$JS.ACK`` subject. A header field that
a publisher named "Status" is data::

    100 Idle Heartbeat         Nats-Last-Consumer, Nats-Last-Stream[, Nats-Consumer-Stalled]
    100 FlowControl Request    requires a reply on the reply subject
    404, 408                   a pull request ended; 409 and others: an error
"""

from __future__ import annotations

from dataclasses import dataclass

from nats_stream_source.err_codes import UNAVAILABLE
from nats_stream_source.errors import (
    ConflictStatusError,
    ConsumerDeletedError,
    LeadershipChangedError,
    NoRespondersStatusError,
    ProtocolError,
    StatusError,
    UnknownStatusError,
)
from nats_stream_source.wire.headers import Headers, parse_headers

CONTROL = 100
NO_MESSAGES = 404
REQUEST_TIMEOUT = 408
CONFLICT = 409

_MAX_DIGITS = 20  # of an unsigned 64-bit integer


@dataclass(frozen=True, slots=True)
class ConsumerStatus:
    """A status message.

    Attributes:
        code, description: of the status line, such as 409 and ``Consumer Deleted``.
        reply: the subject for the reply to a flow-control request; None for others.
        stalled: ``Nats-Consumer-Stalled``: the flow-control subject that the server waits for.
        last_consumer, last_stream: a heartbeat's ``Nats-Last-Consumer`` and ``Nats-Last-Stream``:
            the last delivered consumer sequence and the last scanned stream sequence.
    """

    code: int
    description: str
    reply: str | None = None
    stalled: str | None = None
    last_consumer: int | None = None
    last_stream: int | None = None

    @property
    def ends_request(self) -> bool:
        """Whether the status ends a pull request without an error.

        These are 404, 408, and the 409 that the server sends when a request has received its whole
        batch before its byte limit.
        """
        return self.code in (NO_MESSAGES, REQUEST_TIMEOUT) or (
            self.code == CONFLICT and self.description == "Batch Completed"
        )

    @classmethod
    def parse(cls, block: bytes, reply: str = "") -> ConsumerStatus:
        """Parse the header block of a message that is not a delivery.

        Raises:
            ProtocolError: the block is empty or incomplete, lacks a status, or contains a sequence
                that is not an integer.
        """
        if not block:
            raise ProtocolError(
                f"invalid message: neither a delivery nor a status, reply {reply!r}, no headers"
            )
        return cls.from_headers(parse_headers(block), reply)

    @classmethod
    def from_headers(cls, headers: Headers, reply: str = "") -> ConsumerStatus:
        """Return the status of parsed headers; raises ProtocolError as :meth:`parse`."""
        if headers.status is None:
            raise ProtocolError(
                f"invalid message: neither a delivery nor a status, reply {reply!r}"
            )
        return cls(
            headers.status,
            headers.description,
            reply or None,
            headers.get("Nats-Consumer-Stalled"),
            _sequence(headers, "Nats-Last-Consumer"),
            _sequence(headers, "Nats-Last-Stream"),
        )


def _sequence(headers: Headers, name: str) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise ProtocolError(
            f"invalid status message: header {name} is {text[:40]!r}, expected an integer"
        )
    return int(text)


_CONFLICTS: dict[str, type[ConflictStatusError]] = {
    "Consumer Deleted": ConsumerDeletedError,
    "Leadership Change": LeadershipChangedError,
    "Server Shutdown": LeadershipChangedError,
}


def status_error(status: ConsumerStatus, where: str) -> StatusError:
    """Return the exception for a status (ADR-15, "Miscellaneous Error Statuses").

    Args:
        status: a status that the subscription does not handle itself.
        where: the consumer, for the message.
    """
    text = f"{where}: status {status.code} {status.description}".rstrip()
    if status.code == CONFLICT:
        kind: type[StatusError] = _CONFLICTS.get(status.description, ConflictStatusError)
    elif status.code == UNAVAILABLE:
        kind = NoRespondersStatusError
        text += ": no responders, as for a deleted consumer or stream"
    else:
        kind = UnknownStatusError
    return kind(text, status.code, status.description)
