"""The numbers in the reply subjects of JetStream's deliveries (ADR-15, "JSAck").

::

    v1  $JS.ACK.<stream>.<consumer>.<delivered>.<stream_seq>.<consumer_seq>.<time>.<pending>
    v2  $JS.ACK.<domain>.<account hash>.<stream>.<consumer>.<delivered>. ... .<pending>[.<more>]

v1 has 9 tokens, v2 has 11 and may grow at its end, so 10 is an error.

Theory of operation. Two ways that agree on every input: ``_split`` splits all replies at their dots
at once, and takes and casts the five tokens of each. It is the definition, and it alone raises.
Replies that look alike are read much faster (``wire/layout.py``); where layouts change too often
for this to pay, the rest is split. The numbers of a run of deliveries were mostly read already when
their frames were found (``wire/runs.py``), and stand in ``Frames.acks``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire.arrow import in_order, slices
from nats_stream_source.wire.frames import Frames
from nats_stream_source.wire.layout import (
    FIELDS,
    V1_TOKENS,
    V2_TOKENS,
    Layout,
    bytes_at,
    is_int64,
    layout_of,
)

Numbers = NDArray[np.int64]

_ACK_PREFIX = b"$JS.ACK."
_ACK_PREFIX_VALUE = np.frombuffer(_ACK_PREFIX, np.int64)[0]
_ROWS_AT_ONCE = 2048  # what is in work then stays in the processor's cache
_LAYOUT_PAYS = 128  # frames: reading so many with a layout costs as much as splitting them


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AckTokens:
    """The numbers in the reply subjects of deliveries (ADR-15, "JSAck"): int64, one per frame."""

    stream_seq: Numbers
    """Sequence in the stream; in a KV bucket the revision."""
    consumer_seq: Numbers
    """How many messages the consumer had delivered with this one."""
    timestamp_ns: Numbers
    """When the stream stored the message: nanoseconds since 1970, UTC."""
    pending: Numbers
    """How many messages matched and were still to be delivered after this one."""
    delivered: Numbers
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

    def select(self, index: NDArray[np.bool_] | Numbers | slice) -> AckTokens:
        """The tokens of some of the frames, as :meth:`Frames.select` takes them."""
        return AckTokens(*(getattr(self, field.name)[index] for field in fields(self)))


def is_delivery(frames: Frames) -> NDArray[np.bool_]:
    """Which frames are messages of a JetStream consumer: the reply begins with ``$JS.ACK.``.

    All else is status (heartbeat, flow control), an answer, a control line, or somebody's message.
    """
    result = frames.reply_end - frames.reply_begin >= len(_ACK_PREFIX)
    all_long = result.all()
    begin = frames.reply_begin if all_long else frames.reply_begin[result]
    if begin.size:
        # Eight bytes compare as one integer.
        is_ack: NDArray[np.bool_] = (
            bytes_at(frames.buffer, begin, 8).view(np.int64) == _ACK_PREFIX_VALUE
        )
        if all_long:
            return is_ack
        result[result] = is_ack
    return result


def ack_tokens(frames: Frames) -> AckTokens:
    """The numbers in the reply subjects of deliveries (see :func:`is_delivery`).

    Raises:
        ProtocolError: a reply has neither 9 nor 11 or more tokens, or one of the five is not a
            number. The text holds the reply.
    """
    numbers = with_acks(frames).acks
    assert numbers is not None
    delivered, stream_seq, consumer_seq, timestamp_ns, pending = numbers
    return AckTokens(stream_seq, consumer_seq, timestamp_ns, pending, delivered)


def with_acks(frames: Frames) -> Frames:
    """The same frames, which know the numbers in their reply subjects from now on.

    Raises:
        ProtocolError: as :func:`ack_tokens`.
    """
    if frames.acks is None:
        return replace(frames, acks=_numbers(frames))
    unknown = np.flatnonzero(frames.acks[0] < 0)
    if not unknown.size:
        return frames
    acks = frames.acks.copy()
    acks[:, unknown] = _numbers(frames.select(unknown))
    return replace(frames, acks=acks)


def _numbers(frames: Frames) -> Numbers:
    n = len(frames)
    numbers = np.empty((FIELDS, n), np.int64)
    done = layouts = 0
    while done < n and layouts * _LAYOUT_PAYS <= done + 4 * _LAYOUT_PAYS:
        layout = layout_of(frames.reply(done))
        if layout is None:
            break
        done = _read(layout, frames, done, numbers)
        layouts += 1
    if done < n:
        numbers[:, done:] = _split(frames.select(slice(done, n)))
    return numbers


def _read(layout: Layout, frames: Frames, begin: int, numbers: Numbers) -> int:
    """Read the replies from ``begin`` on that have this layout; the first that has not."""
    others = frames.reply_end[begin:] - frames.reply_begin[begin:] != layout.length
    stop = begin + int(others.argmax()) if others.any() else len(frames)
    rows = 16  # a layout that ends soon must not cost much
    while begin < stop:
        rows = min(4 * rows, _ROWS_AT_ONCE)
        end = min(begin + rows, stop)
        begin += layout.read(frames.buffer, frames.reply_end[begin:end], numbers[:, begin:end])
        if begin < end:
            break
    return begin


def _split(frames: Frames) -> Numbers:
    frames = in_order(frames)
    replies = slices(frames.buffer, frames.reply_begin, frames.reply_end, pa.string())
    split = pc.split_pattern(replies, ".")
    offsets = split.offsets.to_numpy()
    count = offsets[1:] - offsets[:-1]
    good = (count == V1_TOKENS) | (count >= V2_TOKENS)
    if not (good & is_delivery(frames)).all():
        raise _bad_reply(frames)
    first = offsets[:-1] + np.where(count == V1_TOKENS, 4, 6)
    tokens = split.values.take(pa.array((first + np.arange(FIELDS)[:, None]).ravel()))
    # The cast alone would take "-5" and "0x5" for numbers.
    if pc.ascii_is_decimal(tokens).false_count:
        raise _bad_reply(frames)
    try:
        numbers: Numbers = tokens.cast(pa.int64()).to_numpy().reshape(FIELDS, len(frames))
    except pa.ArrowInvalid:
        raise _bad_reply(frames) from None
    return numbers


def _bad_reply(frames: Frames) -> ProtocolError:
    """The error for the first reply that is none of a delivery: looks at them one by one."""
    for i in range(len(frames)):
        reply = frames.reply(i)
        tokens = reply.split(b".")
        count = len(tokens)
        if not reply.startswith(_ACK_PREFIX):
            wrong = "no delivery"
        elif count != V1_TOKENS and count < V2_TOKENS:
            wrong = f"{count} tokens where 9, or 11 and more, were expected"
        else:
            first = 4 if count == V1_TOKENS else 6
            odd = [t for t in tokens[first : first + FIELDS] if not is_int64(t)]
            if not odd:
                continue
            wrong = f"{odd[0]!r} is not a number"
        return ProtocolError(f"the reply subject {reply!r}: {wrong}")
    raise AssertionError("every reply is well-formed")
