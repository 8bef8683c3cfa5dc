"""The reply subject of a JetStream delivery (ADR-15, "JSAck").

The server encodes the state of a delivery in the subject of the acknowledgement::

    v1  $JS.ACK.<stream>.<consumer>.<delivered>.<stream_seq>.<consumer_seq>.<time>.<pending>
    v2  $JS.ACK.<domain>.<account hash>.<stream>.<consumer>.<delivered>. ... .<pending>[.<more>]

v1 has 9 tokens. v2 has 11 and may get more at its end, so 10 tokens are an error.
:class:`AckReply` parses one subject with all its tokens; ``deliveries.py`` parses the numbers of
many subjects at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from nats_stream_source.errors import ProtocolError

ACK_PREFIX = "$JS.ACK."
V1_TOKENS, V2_TOKENS = 9, 11
_NO_DOMAIN = "_"
_MAX_DIGITS = 19  # of a signed 64-bit integer


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
        """Parse a reply subject.

        Raises:
            ProtocolError: it does not start with ``$JS.ACK.``, has neither 9 nor at least 11
                tokens, or a token is not of its type. The message contains the subject.
        """
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
            # int() alone accepts "-5", "1_0" and digits of other scripts.
            digits = token.isascii() and token.isdigit() and len(token) <= _MAX_DIGITS
            if not digits or int(token) >= 1 << 63:
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
