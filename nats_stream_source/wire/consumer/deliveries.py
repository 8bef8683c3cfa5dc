"""Deliveries of a consumer: frames with the numbers of their reply subjects (ADR-15, "JSAck").

The compiled scanner parses the numbers with the frames. :meth:`Deliveries.of` parses the others,
all at once, by the dots of the reply subjects (``messages.py``). From there on the numbers
travel with the frames: they are rows of the same table, so a selection has those of its frames, and
frames that are copied out of their buffer leave the table of that buffer too.

:func:`encode_deliveries` makes deliveries of messages that were read one by one, which is cheaper
than a consumer for a few of them (``jetstream/ordered/reader.py``). The messages are encoded as the
bytes that a server would have sent, and a ``Framer`` parses these bytes. So both ways share all
further code, down to the rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nats_stream_source.wire.arrow_slices import slices
from nats_stream_source.wire.consumer.messages import ACK_PREFIX, V1_TOKENS, V2_TOKENS, AckReply
from nats_stream_source.wire.framing.frames import Framer, Frames, Row, read_only
from nats_stream_source.wire.framing.parse import ACK, Field, Table

_NUMBERS = ACK.stop - ACK.start
_NUMBERS_SIZE = 8 * _NUMBERS  # bytes of the numbers of a delivery
_CONSUMER = "-"  # not a valid consumer name: no consumer delivered the messages


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
        """Return deliveries with their numbers; ProtocolError as :meth:`AckReply.parse`."""
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
    # Deferred import: it takes 20 ms at the start of a query, and parsed frames do not need it.
    import pyarrow.compute as pc

    result: NDArray[np.bool_] = frames.acks[0] >= 0
    if not result.all():
        others = ~result
        found = pc.starts_with(_replies(frames.select(others)), ACK_PREFIX)
        result[others] = found.to_numpy(zero_copy_only=False)
    return result


def other_frames(frames: Frames) -> list[int]:
    """Return the indices of the frames that are not deliveries; see :func:`is_delivery`."""
    if _are_parsed(frames):
        return []
    return [int(index) for index in np.flatnonzero(~is_delivery(frames))]


def _are_parsed(frames: Frames) -> bool:
    """Return whether the numbers of all reply subjects were parsed."""
    return frames.in_sequence or not len(frames) or bool(frames.acks[0].min() >= 0)


def _replies(frames: Frames) -> pa.Array:
    return slices(frames.buffer, frames.reply_begin, frames.reply_end, pa.binary())


def _split(frames: Frames) -> Table:
    import pyarrow.compute as pc

    replies = _replies(frames)
    split = pc.split_pattern(replies, ".")
    count = split.value_lengths().to_numpy()
    good = (count == V1_TOKENS) | (count >= V2_TOKENS)
    if good.all() and not pc.starts_with(replies, ACK_PREFIX).false_count:
        first = split.offsets.to_numpy()[:-1] + np.where(count == V1_TOKENS, 4, 6)
        tokens = split.values.take(pa.array((first + np.arange(_NUMBERS)[:, None]).ravel()))
        # The cast alone accepts "-5" and "0x5".
        if not pc.ascii_is_decimal(tokens.view(pa.string())).false_count:
            with contextlib.suppress(pa.ArrowInvalid):
                numbers = tokens.cast(pa.string()).cast(pa.int64())
                parsed: Table = numbers.to_numpy().reshape(_NUMBERS, len(frames))
                return parsed
    for i in range(len(frames)):
        AckReply.parse(frames.reply(i).decode(errors="replace"))  # raises for the first invalid one
    raise AssertionError("every reply is valid")


class Delivery(NamedTuple):
    """One message to encode; ``headers`` is its header block, empty without headers."""

    subject: str
    stream_seq: int
    timestamp_ns: int
    headers: bytes
    payload: bytes


def encode_deliveries(stream: str, messages: Sequence[Delivery]) -> Deliveries:
    """Encode ``messages``, in order, with reply subjects as in ADR-15 ("JSAck", v1).

    Consumer sequences start at 1; pending is the number of messages that follow.
    """
    block = b"".join(
        encode_delivery(stream, message, consumer_seq, len(messages) - consumer_seq)
        for consumer_seq, message in enumerate(messages, 1)
    )
    return Deliveries.of(Framer().feed(block))


def add_size_header(block: bytes, size: int) -> bytes:
    """Add ``Nats-Msg-Size`` to a header block, as a consumer with ``headers_only`` delivers it.

    Like the server, remove the last two bytes of the block without checking them.
    """
    fields = block[:-2] if block else b"NATS/1.0\r\n"
    return b"%sNats-Msg-Size: %d\r\n\r\n" % (fields, size)


def encode_delivery(
    stream: str, message: Delivery, consumer_seq: int = 0, pending: int = 0
) -> bytes:
    """Return the frame, as bytes, in which a consumer would have delivered ``message``."""
    subject = (
        f"{message.subject} 1 $JS.ACK.{stream}.{_CONSUMER}.1.{message.stream_seq}.{consumer_seq}."
        f"{message.timestamp_ns}.{pending}"
    ).encode()
    block, payload = message.headers, message.payload
    if not block:
        return b"MSG %s %d\r\n%s\r\n" % (subject, len(payload), payload)
    sizes = b"%d %d" % (len(block), len(block) + len(payload))
    return b"HMSG %s %s\r\n%s%s\r\n" % (subject, sizes, block, payload)
