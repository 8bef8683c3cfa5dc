"""From frames to Arrow columns: subjects, payloads, header blocks, and the ack tokens.

Theory of operation. The borders of one field, ``begin[0], end[0], begin[1], end[1], ...``, never
fall, so they are the offsets of an Arrow binary array that lies over the received bytes
themselves. Its even elements are the field, its odd ones the bytes between; ``take`` of the even
ones copies the field of all frames into an array of its own, and no Python object is made for a
message.

The numbers of a delivery stand in its reply subject (ADR-15, "JSAck")::

    v1  $JS.ACK.<stream>.<consumer>.<delivered>.<stream_seq>.<consumer_seq>.<time>.<pending>
    v2  $JS.ACK.<domain>.<account hash>.<stream>.<consumer>.<delivered>. ... .<pending>[.<more>]

v1 has 9 tokens, v2 has 11 and may grow at its end, so 10 is an error. All replies are split at
once, and the five tokens of each are taken by position and cast in one call.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire.frames import Frames

_ACK_PREFIX = b"$JS.ACK."
_ACK_PREFIX_VALUE = np.frombuffer(_ACK_PREFIX, np.int64)[0]
_V1_TOKENS, _V2_TOKENS = 9, 11
_MAX_BYTES = (1 << 31) - 1  # the offsets of Arrow's binary and string are int32


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AckTokens:
    """The numbers in the reply subjects of deliveries (ADR-15, "JSAck"): int64, one per frame."""

    stream_seq: NDArray[np.int64]
    """Sequence in the stream; in a KV bucket the revision."""
    consumer_seq: NDArray[np.int64]
    """How many messages the consumer had delivered with this one."""
    timestamp_ns: NDArray[np.int64]
    """When the stream stored the message: nanoseconds since 1970, UTC."""
    pending: NDArray[np.int64]
    """How many messages matched and were still to be delivered after this one."""
    delivered: NDArray[np.int64]
    """How often this message was delivered, this time included."""

    def __len__(self) -> int:
        return self.stream_seq.size

    def __repr__(self) -> str:
        if not len(self):
            return "<AckTokens none>"
        return (
            f"<AckTokens {len(self)}, stream_seq {self.stream_seq[0]}..{self.stream_seq[-1]}, "
            f"consumer_seq {self.consumer_seq[0]}..{self.consumer_seq[-1]}>"
        )

    def select(self, index: NDArray[np.bool_] | NDArray[np.int64] | slice) -> AckTokens:
        """The tokens of some of the frames, as :meth:`Frames.select` takes them."""
        return AckTokens(*(getattr(self, field.name)[index] for field in fields(self)))


def is_delivery(frames: Frames) -> NDArray[np.bool_]:
    """Which frames are messages of a JetStream consumer: the reply begins with ``$JS.ACK.``.

    All else is status (heartbeat, flow control), an answer, a control line, or somebody's message.
    """
    result = frames.reply_end - frames.reply_begin >= len(_ACK_PREFIX)
    begin = frames.reply_begin[result]
    if begin.size:
        data = np.frombuffer(frames.buffer, np.uint8)
        prefix = data[begin[:, None] + np.arange(len(_ACK_PREFIX))]
        # Eight bytes compare as one integer.
        result[result] = prefix.view(np.int64)[:, 0] == _ACK_PREFIX_VALUE
    return result


def ack_tokens(frames: Frames) -> AckTokens:
    """The numbers in the reply subjects of deliveries (see :func:`is_delivery`).

    Raises:
        ProtocolError: a reply has neither 9 nor 11 or more tokens, or one of the five is not a
            number. The text holds the reply.
    """
    n = len(frames)
    frames = _in_order(frames)
    replies = _slices(frames.buffer, frames.reply_begin, frames.reply_end, pa.string())
    split = pc.split_pattern(replies, ".")
    offsets = split.offsets.to_numpy()
    count = offsets[1:] - offsets[:-1]
    good = (count == _V1_TOKENS) | (count >= _V2_TOKENS)
    if not (good & is_delivery(frames)).all():
        raise _bad_reply(frames)
    first = offsets[:-1] + np.where(count == _V1_TOKENS, 4, 6)
    tokens = split.values.take(pa.array((first + np.arange(5)[:, None]).ravel()))
    # The cast alone would take "-5" and "0x5" for numbers.
    if pc.ascii_is_decimal(tokens).false_count:
        raise _bad_reply(frames)
    try:
        numbers = tokens.cast(pa.int64()).to_numpy().reshape(5, n)
    except pa.ArrowInvalid:
        raise _bad_reply(frames) from None
    delivered, stream_seq, consumer_seq, timestamp_ns, pending = numbers
    return AckTokens(stream_seq, consumer_seq, timestamp_ns, pending, delivered)


def _bad_reply(frames: Frames) -> ProtocolError:
    """The error for the first reply that is none of a delivery: looks at them one by one."""
    for i in range(len(frames)):
        reply = frames.reply(i)
        tokens = reply.split(b".")
        count = len(tokens)
        if not reply.startswith(_ACK_PREFIX):
            wrong = "no delivery"
        elif count != _V1_TOKENS and count < _V2_TOKENS:
            wrong = f"{count} tokens where 9, or 11 and more, were expected"
        else:
            first = 4 if count == _V1_TOKENS else 6
            odd = [t for t in tokens[first : first + 5] if not _is_int64(t)]
            if not odd:
                continue
            wrong = f"{odd[0]!r} is not a number"
        return ProtocolError(f"the reply subject {reply!r}: {wrong}")
    raise AssertionError("every reply is well-formed")


def _is_int64(token: bytes) -> bool:
    return token.isdigit() and len(token) < 20 and int(token) < 1 << 63


def subjects(frames: Frames) -> pa.Array:
    """The subjects: ``pa.string()``, empty for control frames.

    Raises:
        ProtocolError: a subject is not UTF-8.
    """
    frames = _in_order(frames)
    raw = _slices(frames.buffer, frames.subject_begin, frames.subject_end, pa.binary())
    try:
        return raw.cast(pa.string())
    except pa.ArrowInvalid:
        for subject in raw.to_pylist():
            try:
                subject.decode()
            except UnicodeDecodeError:
                raise ProtocolError(f"the subject {subject!r} is not UTF-8") from None
        raise


def payloads(frames: Frames) -> pa.Array:
    """The payloads without their header blocks: ``pa.binary()``."""
    frames = _in_order(frames)
    return _slices(frames.buffer, frames.payload_begin, frames.payload_end, pa.binary())


def header_blocks(frames: Frames) -> pa.Array:
    """The header blocks, see ``wire/headers.py``: ``pa.binary()``, ``b""`` for MSG."""
    frames = _in_order(frames)
    return _slices(frames.buffer, frames.header_begin, frames.payload_begin, pa.binary())


def _in_order(frames: Frames) -> Frames:
    """The frames, such that their positions rise and can be offsets of an Arrow array.

    Raises:
        OverflowError: they have more than 2 GiB.
    """
    if len(frames.buffer) <= _MAX_BYTES and (frames.begin[1:] >= frames.stop[:-1]).all():
        return frames
    if frames.nbytes > _MAX_BYTES:
        raise OverflowError(
            f"{len(frames)} frames of {frames.nbytes} bytes do not fit into one Arrow array, "
            f"which holds {_MAX_BYTES}: build columns of fewer frames"
        )
    return Frames.join([frames])


def _slices(
    buffer: bytes, begin: NDArray[np.int64], end: NDArray[np.int64], kind: pa.DataType
) -> pa.Array:
    n = begin.size
    if not n:
        return pa.array([], kind)
    borders = np.empty(2 * n, np.int32)
    borders[0::2] = begin
    borders[1::2] = end
    over = pa.Array.from_buffers(
        kind, 2 * n - 1, [None, pa.py_buffer(borders), pa.py_buffer(buffer)]
    )
    return over.take(pa.array(np.arange(0, 2 * n, 2)))
