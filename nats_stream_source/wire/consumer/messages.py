"""Single messages of a consumer (ADR-15): a delivery's reply subject, statuses, gaps between them.

The server encodes the state of a delivery in the subject of the acknowledgement ("JSAck")::

    v1  $JS.ACK.<stream>.<consumer>.<delivered>.<stream_seq>.<consumer_seq>.<time>.<pending>
    v2  $JS.ACK.<domain>.<account hash>.<stream>.<consumer>.<delivered>. ... .<pending>[.<more>]

v1 has 9 tokens. v2 has 11 and may get more at its end, so 10 tokens are an error.
:class:`AckReply` parses one subject; ``deliveries.py`` has the numbers of many.

The server sends status messages between messages or instead of messages. The status is in the first
line of the header block of a message whose reply subject is not a ``$JS.ACK`` subject. A header
field that a publisher named "Status" is data::

    100 Idle Heartbeat         Nats-Last-Consumer, Nats-Last-Stream[, Nats-Consumer-Stalled]
    100 FlowControl Request    requires a reply on the reply subject
    404, 408                   a pull request ended; 409 and others: an error

A consumer numbers its deliveries 1, 2, 3 and so on, redeliveries included. A message with another
number than the next one shows that messages were lost in transit. So does a heartbeat whose
``Nats-Last-Consumer`` differs from the last received number. A replicated consumer may send a
heartbeat before the message that it counts, so a heartbeat counts only when the next one repeats
its number and no message was received in between (:class:`GapDetector`). The ordered consumer has
stricter rules: ``cursor.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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

ACK_PREFIX = "$JS.ACK."
V1_TOKENS, V2_TOKENS = 9, 11
_NO_DOMAIN = "_"

CONTROL = 100
NO_MESSAGES = 404
REQUEST_TIMEOUT = 408
CONFLICT = 409


@dataclass(frozen=True, slots=True)
class AckReply:
    """The tokens of the reply subject of one delivery (ADR-15, "JSAck").

    Attributes:
        domain: the JetStream domain; None for a server without a domain (``_``) and in v1.
        account_hash: routes the acknowledgement to the right account; None in v1.
        stream, consumer: the consumer that delivered the message, and its stream.
        delivered: number of deliveries of this message, this one included.
        stream_seq: sequence in the stream.
        consumer_seq: number of deliveries of the consumer, this one included.
        timestamp_ns: time at which the stream stored the message: nanoseconds since 1970, UTC.
        pending: number of matching messages that were not delivered yet after this one.
    """

    domain: str | None
    account_hash: str | None
    stream: str
    consumer: str
    delivered: int
    stream_seq: int
    consumer_seq: int
    timestamp_ns: int
    pending: int

    @classmethod
    def parse(cls, subject: str) -> AckReply:
        """Parse a reply subject; the ProtocolError for an invalid one contains it."""
        tokens = subject.split(".")
        count = len(tokens)
        if not subject.startswith(ACK_PREFIX):
            raise _subject_error(subject, "it does not start with '$JS.ACK.'")
        if count != V1_TOKENS and count < V2_TOKENS:
            raise _subject_error(subject, f"{count} tokens, expected 9 or at least 11")
        domain: str | None = None
        account_hash: str | None = None
        first = 2
        if count >= V2_TOKENS:
            domain, account_hash = tokens[2:4]
            first = 4
        names = tokens[2 : first + 2]
        if not all(names):
            raise _subject_error(subject, "a name is empty")
        numbers = tokens[first + 2 : first + 7]
        for token in numbers:
            if not is_number(token):
                raise _subject_error(subject, f"token {token!r} is not an integer")
        return cls(
            None if domain == _NO_DOMAIN else domain,
            account_hash,
            tokens[first],
            tokens[first + 1],
            *map(int, numbers),
        )


def _subject_error(subject: str, problem: str) -> ProtocolError:
    return ProtocolError(f"invalid reply subject {subject!r}: {problem}")


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
    def parse(cls, block: bytes, reply: str = "") -> ConsumerStatus | None:
        """Parse the header block of a message that is not a delivery; None without a status.

        Raises:
            ProtocolError: the block is incomplete, or contains a sequence that is not an integer.
        """
        headers = parse_headers(block) if block else None
        if headers is None or headers.status is None:
            return None
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
    if not is_number(text):
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


class Gap(NamedTuple):
    """The consumer sequence that was expected, and the one received, or announced, instead."""

    expected: int
    received: int


class GapDetector:
    """Tracks the consumer sequences of one consumer.

    Attributes:
        consumer_seq: the last received one; None before the first message of a consumer that
            existed before.
    """

    def __init__(self, consumer_seq: int | None) -> None:
        """``consumer_seq`` is 0 for a new consumer, None for one that existed before."""
        self.consumer_seq = consumer_seq
        self._announced: int | None = None

    def message(self, consumer_seq: int) -> Gap | None:
        """Receive a message; return the gap before it or None. Detection resumes there."""
        before, self.consumer_seq, self._announced = self.consumer_seq, consumer_seq, None
        if before is None or consumer_seq == before + 1:
            return None
        return Gap(before + 1, consumer_seq)

    def heartbeat(self, last_consumer: int) -> Gap | None:
        """Receive a heartbeat; return the gap that it shows or None. Detection resumes there."""
        last = self.consumer_seq
        if last is None:
            self.consumer_seq = last_consumer
        elif last_consumer == last:
            self._announced = None
        elif last_consumer != self._announced:
            self._announced = last_consumer
        else:
            self.consumer_seq, self._announced = last_consumer, None
            return Gap(last + 1, last_consumer + 1)
        return None


def is_number(text: str) -> bool:
    """Whether a text is a 63-bit integer; int() accepts "-5", "1_0" and digits of other scripts."""
    return text.isascii() and text.isdigit() and len(text) < 20 and int(text) < 1 << 63
