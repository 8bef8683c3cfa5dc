"""Status messages of consumers (ADR-15, "Automatic Status Management"): what the server tells us
between, or instead of, messages.

A status stands in the first line of the header block of a message whose reply subject is no
``$JS.ACK``; a header field that a publisher named "Status" is data::

    100 Idle Heartbeat         Nats-Last-Consumer, Nats-Last-Stream[, Nats-Consumer-Stalled]
    100 FlowControl Request    to be answered on the reply subject
    404, 408                   a pull request ended; 409 and others: an error
"""

from __future__ import annotations

from dataclasses import dataclass

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
NO_RESPONDERS = 503

_MOST_DIGITS = 20  # an unsigned 64-bit integer has no more


@dataclass(frozen=True, slots=True)
class Status:
    """A status message.

    Attributes:
        code, description: of the status line, like 409 and ``Consumer Deleted``.
        reply: where a flow-control request is to be answered; None elsewhere.
        stalled: ``Nats-Consumer-Stalled``: the flow-control subject that the server waits for.
        last_consumer, last_stream: a heartbeat's ``Nats-Last-Consumer`` and ``Nats-Last-Stream``:
            the last delivered consumer sequence and the last stream sequence looked at.
    """

    code: int
    description: str
    reply: str | None = None
    stalled: str | None = None
    last_consumer: int | None = None
    last_stream: int | None = None

    @property
    def ends_request(self) -> bool:
        """Whether it only says that a pull request has come to its end: no error.

        404, 408, and the 409 by which a server tells that a request got its whole batch though it
        would have taken more bytes.
        """
        return self.code in (NO_MESSAGES, REQUEST_TIMEOUT) or (
            self.code == CONFLICT and self.description == "Batch Completed"
        )

    @classmethod
    def parse(cls, block: bytes, reply: str = "") -> Status:
        """Read the header block of a message that is no delivery.

        Raises:
            ProtocolError: there is no header block or no status in it, it is cut short, or a
                sequence in it is not a number.
        """
        if not block:
            raise ProtocolError(
                f"a message that is neither a delivery nor a status: reply {reply!r}, no headers"
            )
        return cls.of(parse_headers(block), reply)

    @classmethod
    def of(cls, headers: Headers, reply: str = "") -> Status:
        """From parsed headers; ProtocolError as :meth:`parse`."""
        if headers.status is None:
            raise ProtocolError(f"a message that is neither a delivery nor a status: {reply!r}")
        return cls(
            headers.status,
            headers.description,
            reply or None,
            headers.get("Nats-Consumer-Stalled"),
            _number(headers, "Nats-Last-Consumer"),
            _number(headers, "Nats-Last-Stream"),
        )


def _number(headers: Headers, name: str) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise ProtocolError(f"the header {name} is not a number: {text[:40]!r}")
    return int(text)


_CONFLICTS: dict[str, type[ConflictStatusError]] = {
    "Consumer Deleted": ConsumerDeletedError,
    "Leadership Change": LeadershipChangedError,
    "Server Shutdown": LeadershipChangedError,
}


def status_error(status: Status, where: str) -> StatusError:
    """The error that a status is raised as (ADR-15, "Miscellaneous Error Statuses").

    Args:
        status: one that is not handled out of the user's sight.
        where: the consumer, for the text.
    """
    text = f"{where}: status {status.code} {status.description}".rstrip()
    if status.code == CONFLICT:
        kind: type[StatusError] = _CONFLICTS.get(status.description, ConflictStatusError)
    elif status.code == NO_RESPONDERS:
        kind = NoRespondersStatusError
        text += ": nobody listens there, as when the consumer or stream is gone"
    else:
        kind = UnknownStatusError
    return kind(text, status.code, status.description)
