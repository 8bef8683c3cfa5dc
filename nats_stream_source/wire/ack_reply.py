"""One reply subject of a delivery, read token by token (ADR-15, "JSAck").

The server writes what it knows of a delivery into the subject that the acknowledgement goes to::

    v1  $JS.ACK.<stream>.<consumer>.<delivered>.<stream_seq>.<consumer_seq>.<time>.<pending>
    v2  $JS.ACK.<domain>.<account hash>.<stream>.<consumer>.<delivered>. ... .<pending>[.<more>]

v1 has 9 tokens; v2 has 11 and may grow at its end, so 10 is an error. This is the reader for one
message at a time; ``wire/acks.py`` takes the numbers of many at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from nats_stream_source.errors import ProtocolError

ACK_PREFIX = "$JS.ACK."

_V1_TOKENS, _V2_TOKENS = 9, 11
_NO_DOMAIN = "_"
_MOST_DIGITS = 20  # of an unsigned 64-bit integer


@dataclass(frozen=True, slots=True)
class AckReply:
    """What the reply subject of a delivery says (ADR-15, "JSAck").

    Attributes:
        domain: the JetStream domain; None where the server has none (``_``) or sent v1.
        account_hash: routes the acknowledgement to the right account; None in v1.
        stream, consumer: who delivered it.
        delivered: how often this message was delivered, this time included.
        stream_seq: sequence in the stream.
        consumer_seq: how many deliveries the consumer had made with this one.
        timestamp_ns: when the stream stored the message: nanoseconds since 1970, UTC.
        pending: how many messages matched and were still to be delivered after this one.
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
        """Read a reply subject.

        Raises:
            ProtocolError: it does not begin with ``$JS.ACK.``, has neither 9 nor 11 or more
                tokens, or a token is not of its type. The text holds the subject.
        """
        tokens = subject.split(".")
        count = len(tokens)
        if not subject.startswith(ACK_PREFIX):
            raise _bad(subject, "no delivery: it does not begin with '$JS.ACK.'")
        if count != _V1_TOKENS and count < _V2_TOKENS:
            raise _bad(subject, f"{count} tokens where 9, or 11 and more, were expected")
        domain: str | None = None
        account_hash: str | None = None
        first = 2
        if count >= _V2_TOKENS:
            domain, account_hash = tokens[2:4]
            first = 4
        names = tokens[2 : first + 2]
        if not all(names):
            raise _bad(subject, "an empty name")
        numbers = tokens[first + 2 : first + 7]
        for token in numbers:
            # int() alone would take "-5", "1_0" and digits of other scripts for numbers.
            if not (token.isascii() and token.isdigit() and len(token) <= _MOST_DIGITS):
                raise _bad(subject, f"{token!r} is not a number")
        return cls(
            None if domain == _NO_DOMAIN else domain,
            account_hash,
            tokens[first],
            tokens[first + 1],
            *map(int, numbers),
        )


def _bad(subject: str, wrong: str) -> ProtocolError:
    return ProtocolError(f"the reply subject {subject!r}: {wrong}")
