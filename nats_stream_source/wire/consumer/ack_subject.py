"""The reply subjects of JetStream deliveries (ADR-15, "JSAck").

The server encodes the state of a delivery in the subject of the acknowledgement::

    v1  $JS.ACK.<stream>.<consumer>.<delivered>.<stream_seq>.<consumer_seq>.<time>.<pending>
    v2  $JS.ACK.<domain>.<account hash>.<stream>.<consumer>.<delivered>. ... .<pending>[.<more>]

v1 has 9 tokens. v2 has 11 and may get more at its end, so 10 tokens are an error.
:class:`AckReply` parses one subject with all its tokens, :func:`ack_tokens` the numbers of many
subjects at once.

The compiled scanner parses the numbers with the frames, and they are in ``Frames.acks``. Other
replies are split at their dots, all at once: :func:`with_acks`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire.arrow_slices import in_order, slices
from nats_stream_source.wire.ascii_integers import bytes_at, is_int64
from nats_stream_source.wire.framing.frames import Frames
from nats_stream_source.wire.table import ACK

Integers = NDArray[np.int64]

ACK_PREFIX = "$JS.ACK."
_ACK_PREFIX = ACK_PREFIX.encode()
_ACK_PREFIX_VALUE = np.frombuffer(_ACK_PREFIX, np.int64)[0]
_V1_TOKENS, _V2_TOKENS = 9, 11
_NUMBERS = ACK.stop - ACK.start
_NO_DOMAIN = "_"
_MAX_TOKEN = "18446744073709551615"  # the largest unsigned 64-bit integer


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AckTokens:
    """The numbers in the reply subjects of deliveries (ADR-15, "JSAck"): int64, one per frame."""

    stream_seq: Integers
    """Sequence in the stream; in a KV bucket the revision."""
    consumer_seq: Integers
    """Number of deliveries of the consumer, this one included."""
    timestamp_ns: Integers
    """Time at which the stream stored the message: nanoseconds since 1970, UTC."""
    pending: Integers
    """Number of matching messages that were not delivered yet after this one."""
    delivered: Integers
    """Number of deliveries of this message, this one included."""

    def __len__(self) -> int:
        return self.stream_seq.size

    def __repr__(self) -> str:
        if not len(self):
            return "<AckTokens none>"
        return (
            f"<AckTokens {len(self)}, stream_seq {self.stream_seq[0]}..{self.stream_seq[-1]}, "
            f"consumer_seq {self.consumer_seq[0]}..{self.consumer_seq[-1]}>"
        )


def is_delivery(frames: Frames) -> NDArray[np.bool_]:
    """Return which frames are deliveries of a consumer: their reply starts with ``$JS.ACK.``.

    Other frames are status messages (heartbeat, flow control), responses, control lines or messages
    of other publishers.
    """
    result: NDArray[np.bool_] = frames.acks[0] >= 0
    if not result.all():
        others = np.flatnonzero(~result)
        begin, end = frames.reply_begin[others], frames.reply_end[others]
        others, begin = others[end - begin >= 8], begin[end - begin >= 8]
        # Eight bytes are compared as one integer.
        result[others] = bytes_at(frames.buffer, begin, 8).view(np.int64) == _ACK_PREFIX_VALUE
    return result


def other_frames(frames: Frames) -> list[int]:
    """Return the indices of the frames that are not deliveries; see :func:`is_delivery`."""
    if _are_parsed(frames):
        return []
    return [int(index) for index in np.flatnonzero(~is_delivery(frames))]


def ack_tokens(frames: Frames) -> AckTokens:
    """Parse the numbers in the reply subjects of deliveries (see :func:`is_delivery`).

    Raises:
        ProtocolError: a reply has neither 9 nor at least 11 tokens, or one of the five is not an
            integer. The message contains the reply.
    """
    delivered, stream_seq, consumer_seq, timestamp_ns, pending = with_acks(frames).acks
    return AckTokens(stream_seq, consumer_seq, timestamp_ns, pending, delivered)


def with_acks(frames: Frames) -> Frames:
    """Return the frames with the numbers of their reply subjects in ``acks``.

    Raises:
        ProtocolError: as :func:`ack_tokens`.
    """
    if _are_parsed(frames):
        return frames
    unparsed = np.flatnonzero(frames.acks[0] < 0)
    numbers = _split(frames.select(unparsed))
    return frames.replace_acks(unparsed, numbers)


def _are_parsed(frames: Frames) -> bool:
    """Return whether the numbers of all reply subjects were parsed."""
    return frames.in_sequence or not len(frames) or bool(frames.acks[0].min() >= 0)


def _split(frames: Frames) -> Integers:
    frames = in_order(frames)
    replies = slices(frames.buffer, frames.reply_begin, frames.reply_end, pa.string())
    # Deferred import: it takes 20 ms at the start of a query, and parsed frames do not need it.
    import pyarrow.compute as pc

    split = pc.split_pattern(replies, ".")
    offsets = split.offsets.to_numpy()
    count = offsets[1:] - offsets[:-1]
    good = (count == _V1_TOKENS) | (count >= _V2_TOKENS)
    if not (good & is_delivery(frames)).all():
        raise _frames_error(frames)
    first = offsets[:-1] + np.where(count == _V1_TOKENS, 4, 6)
    tokens = split.values.take(pa.array((first + np.arange(_NUMBERS)[:, None]).ravel()))
    # The cast alone accepts "-5" and "0x5".
    if pc.ascii_is_decimal(tokens).false_count:
        raise _frames_error(frames)
    try:
        numbers: Integers = tokens.cast(pa.int64()).to_numpy().reshape(_NUMBERS, len(frames))
    except pa.ArrowInvalid:
        raise _frames_error(frames) from None
    return numbers


def _frames_error(frames: Frames) -> ProtocolError:
    """Return the error for the first invalid reply; checks the replies one by one."""
    for i in range(len(frames)):
        reply = frames.reply(i)
        tokens = reply.split(b".")
        count = len(tokens)
        if not reply.startswith(_ACK_PREFIX):
            problem = "it does not start with '$JS.ACK.'"
        elif count != _V1_TOKENS and count < _V2_TOKENS:
            problem = f"{count} tokens, expected 9 or at least 11"
        else:
            first = 4 if count == _V1_TOKENS else 6
            invalid = [t for t in tokens[first : first + _NUMBERS] if not is_int64(t)]
            if not invalid:
                continue
            problem = f"token {invalid[0]!r} is not an integer"
        return ProtocolError(f"invalid reply subject {reply!r}: {problem}")
    raise AssertionError("every reply is valid")


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
        if count != _V1_TOKENS and count < _V2_TOKENS:
            raise _subject_error(subject, f"{count} tokens, expected 9 or at least 11")
        domain: str | None = None
        account_hash: str | None = None
        first = 2
        if count >= _V2_TOKENS:
            domain, account_hash = tokens[2:4]
            first = 4
        names = tokens[2 : first + 2]
        if not all(names):
            raise _subject_error(subject, "a name is empty")
        numbers = tokens[first + 2 : first + 7]
        for token in numbers:
            # int() alone accepts "-5", "1_0" and digits of other scripts.
            if not (token.isascii() and token.isdigit()) or _exceeds_uint64(token):
                raise _subject_error(subject, f"token {token!r} is not an integer")
        return cls(
            None if domain == _NO_DOMAIN else domain,
            account_hash,
            tokens[first],
            tokens[first + 1],
            *(int(token.lstrip("0") or 0) for token in numbers),
        )


def _exceeds_uint64(digits: str) -> bool:
    # As text: Python limits the number of digits that it converts.
    significant = digits.lstrip("0")
    return (len(significant), significant) > (len(_MAX_TOKEN), _MAX_TOKEN)


def _subject_error(subject: str, problem: str) -> ProtocolError:
    return ProtocolError(f"invalid reply subject {subject!r}: {problem}")
