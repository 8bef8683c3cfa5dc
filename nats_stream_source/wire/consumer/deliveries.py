"""Deliveries of a consumer: frames with the numbers of their reply subjects (ADR-15, "JSAck").

The compiled scanner parses the numbers with the frames. :meth:`Deliveries.of` parses the others,
all at once, by the dots of the reply subjects (``ack_subject.py``). From there on the numbers
travel with the frames: they are rows of the same table, so a selection has those of its frames, and
frames that are copied out of their buffer leave the table of that buffer too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire.arrow_slices import in_order, slices
from nats_stream_source.wire.ascii_integers import bytes_at, is_int64
from nats_stream_source.wire.consumer.ack_subject import ACK_PREFIX, V1_TOKENS, V2_TOKENS
from nats_stream_source.wire.framing.frames import Frames, Row, read_only
from nats_stream_source.wire.table import ACK, Field, Table

_PREFIX = ACK_PREFIX.encode()
_PREFIX_VALUE = np.frombuffer(_PREFIX, np.int64)[0]
_NUMBERS = ACK.stop - ACK.start
_NUMBERS_SIZE = 8 * _NUMBERS  # bytes of the numbers of a delivery


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Deliveries(Frames):
    """Frames that are deliveries of a consumer, and the numbers in their reply subjects.

    The numbers are int64, one per frame.

    Attributes:
        delivered: number of deliveries of the message, this one included.
        stream_seq: sequence in the stream; in a KV bucket the revision.
        consumer_seq: number of deliveries of the consumer, this one included.
        time: time at which the stream stored the message: nanoseconds since 1970, UTC.
        pending: number of matching messages that were not delivered yet after this one.
    """

    delivered = Row(Field.DELIVERED)
    stream_seq = Row(Field.STREAM_SEQ)
    consumer_seq = Row(Field.CONSUMER_SEQ)
    time = Row(Field.TIME)
    pending = Row(Field.PENDING)

    @classmethod
    def of(cls, frames: Frames) -> Deliveries:
        """Return frames that are deliveries (:func:`is_delivery`), with their numbers.

        Raises:
            ProtocolError: a reply has neither 9 nor at least 11 tokens, or one of the five is not
                an integer. The message contains the reply.
        """
        if isinstance(frames, cls):
            return frames
        table, in_sequence = frames.table, frames.in_sequence
        if not _are_parsed(frames):
            table, in_sequence = table.copy(), False
            unparsed = np.flatnonzero(frames.acks[0] < 0)
            table[ACK, unparsed] = _split(frames.select(unparsed))
        return cls(frames.buffer, read_only(table), frames.adjacent, in_sequence)

    @property
    def size(self) -> int:
        """Bytes of the frames and of their numbers."""
        return self.nbytes + len(self) * _NUMBERS_SIZE

    def fitting(self, size: int) -> int:
        """Return how many of the first deliveries have at most ``size`` bytes together."""
        if self.size <= size:
            return len(self)
        ends = np.cumsum(self.stop - self.begin + _NUMBERS_SIZE)
        return int(np.searchsorted(ends, size, side="right"))


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
        result[others] = bytes_at(frames.buffer, begin, 8).view(np.int64) == _PREFIX_VALUE
    return result


def other_frames(frames: Frames) -> list[int]:
    """Return the indices of the frames that are not deliveries; see :func:`is_delivery`."""
    if _are_parsed(frames):
        return []
    return [int(index) for index in np.flatnonzero(~is_delivery(frames))]


def _are_parsed(frames: Frames) -> bool:
    """Return whether the numbers of all reply subjects were parsed."""
    return frames.in_sequence or not len(frames) or bool(frames.acks[0].min() >= 0)


def _split(frames: Frames) -> Table:
    frames = in_order(frames)
    replies = slices(frames.buffer, frames.reply_begin, frames.reply_end, pa.string())
    # Deferred import: it takes 20 ms at the start of a query, and parsed frames do not need it.
    import pyarrow.compute as pc

    split = pc.split_pattern(replies, ".")
    offsets = split.offsets.to_numpy()
    count = offsets[1:] - offsets[:-1]
    good = (count == V1_TOKENS) | (count >= V2_TOKENS)
    if not (good & is_delivery(frames)).all():
        raise _frames_error(frames)
    first = offsets[:-1] + np.where(count == V1_TOKENS, 4, 6)
    tokens = split.values.take(pa.array((first + np.arange(_NUMBERS)[:, None]).ravel()))
    # The cast alone accepts "-5" and "0x5".
    if pc.ascii_is_decimal(tokens).false_count:
        raise _frames_error(frames)
    try:
        numbers: Table = tokens.cast(pa.int64()).to_numpy().reshape(_NUMBERS, len(frames))
    except pa.ArrowInvalid:
        raise _frames_error(frames) from None
    return numbers


def _frames_error(frames: Frames) -> ProtocolError:
    """Return the error for the first invalid reply; checks the replies one by one."""
    for i in range(len(frames)):
        reply = frames.reply(i)
        tokens = reply.split(b".")
        count = len(tokens)
        if not reply.startswith(_PREFIX):
            problem = "it does not start with '$JS.ACK.'"
        elif count != V1_TOKENS and count < V2_TOKENS:
            problem = f"{count} tokens, expected 9 or at least 11"
        else:
            first = 4 if count == V1_TOKENS else 6
            invalid = [t for t in tokens[first : first + _NUMBERS] if not is_int64(t)]
            if not invalid:
                continue
            problem = f"token {invalid[0]!r} is not an integer"
        return ProtocolError(f"invalid reply subject {reply!r}: {problem}")
    raise AssertionError("every reply is valid")
