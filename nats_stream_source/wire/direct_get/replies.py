"""The replies to one Direct Get request (ADR-31, "Response Format"), as columns.

Theory of operation. The server's fields are the last six lines of a header block, in a fixed order.
So the positions of all LFs determine where each field of each message starts and ends: the last
line of the block is found by its LF, the others are the lines before it. The lines are verified:
every name and the first message's stream byte by byte, the digits of numbers, and that no stray CR
is between them. A reply that differs (a new field, the reply of another stream, a status) is parsed
one by one (``parse.py``), so the two ways agree on every input.

``Nats-Last-Sequence`` links the messages of a batch: a message that was lost in transit shows at
the next one, or at the EOB. :class:`DirectGetResponse` keeps the replies before the first gap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire.arrow_slices import slices
from nats_stream_source.wire.ascii_integers import Positions, bytes_at, numbers_between
from nats_stream_source.wire.consumer.deliveries import Deliveries
from nats_stream_source.wire.direct_get.parse import (
    BARE,
    PENDING,
    PREVIOUS,
    SEQUENCE,
    STREAM,
    SUBJECT,
    TIME,
    DirectGetStatus,
    read_row,
    read_status,
)
from nats_stream_source.wire.framing.frames import Frames, Row, read_only
from nats_stream_source.wire.table import Field, Table

EOB, NOT_FOUND, BAD_REQUEST, MIN_LAST_SEQUENCE, TOO_MANY = 204, 404, 408, 412, 413

_COLUMNS_PAY = 32  # messages; parsing so many at once costs as much as one by one
# Backwards from the block's end: empty line, Nats-Last-Sequence, ..., Nats-Stream, the line before.
_LINES = np.arange(8)[:, None]
_END = b"\r\n\r\n"
_MIN_LENGTHS = np.array([2, *(len(text) - 1 for text in (PREVIOUS, PENDING, TIME, SEQUENCE))])[
    :, None
]
# The fields of the table that the server's header fields fill, beside the time.
_FIELDS = np.array(
    [
        *(Field.SUBJECT_BEGIN, Field.SUBJECT_END, Field.REPLY_BEGIN, Field.REPLY_END),
        *(Field.DELIVERED, Field.STREAM_SEQ, Field.CONSUMER_SEQ, Field.PENDING),
    ]
)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Replies(Deliveries):
    """Messages in the form of deliveries, described by the server's header fields.

    A subject is that of the stored message. Instead of a reply subject a frame has the name of the
    stream or mirror that sent it. Its header block includes the server's fields.

    Attributes:
        own_end: the number of bytes of the header block that are the publisher's; 0 without any.
        previous: the sequence of the message before this one in its batch; -1 outside of batches,
            like ``pending``.
    """

    own_end = Row(Field.DELIVERED)
    previous = Row(Field.CONSUMER_SEQ)

    def all_from(self, stream: str) -> bool:
        """Whether every reply is from ``stream``."""
        name = stream.encode()
        if not (self.reply_end - self.reply_begin == len(name)).all():
            return False
        return not len(self) or bool(_matches(self, self.reply_begin, name).all())


class DirectGetResponse:
    """The replies to one request, up to the first gap.

    Attributes:
        status: the status that ended the response; None before that.
        broken: a message is missing; ``replies`` were received before it.
        last_seq: the sequence of the last message; 0 before the first one.
    """

    __slots__ = ("_parts", "broken", "last_seq", "status")

    def __init__(self) -> None:
        self._parts: list[Replies] = []
        self.status: DirectGetStatus | None = None
        self.broken = False
        self.last_seq = 0

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @property
    def replies(self) -> Replies:
        """The messages, without a gap."""
        if len(self._parts) != 1:
            self._parts = [Replies.chain(self._parts)]
        return self._parts[0]

    @property
    def is_batch(self) -> bool:
        """Whether the first message has ``Nats-Last-Sequence``, as all messages of a batch do."""
        return bool(self._parts) and bool(self._parts[0].previous[0] >= 0)

    @property
    def ended(self) -> bool:
        """Whether later frames do not belong to the response."""
        return self.broken or self.status is not None

    def feed(self, frames: Frames) -> int:
        """Receive the next frames; return how many of them, from the first, are in ``replies``.

        Raises:
            ProtocolError: a frame is neither a message with the server's fields nor a status.
        """
        if self.ended or not len(frames):
            return 0
        replies = read_replies(frames)
        parsed = len(replies)
        expected = np.empty_like(replies.stream_seq)
        expected[:1] = self.last_seq
        expected[1:] = replies.stream_seq[:-1]
        missing = (replies.previous >= 0) & (replies.previous != expected)
        if missing.any():
            self.broken = True
            replies = replies.select(slice(0, int(missing.argmax())))
        if len(replies):
            self._parts.append(replies)
            self.last_seq = int(replies.stream_seq[-1])
        if not self.broken and parsed < len(frames):
            self.status = status = read_status(frames.header(parsed))
            self.broken = status.code == EOB and status.last_seq != self.last_seq
        return len(replies)


def read_replies(frames: Frames) -> Replies:
    """Parse replies up to the first frame that is not a message with the server's fields.

    Raises:
        ProtocolError: the timestamp of a message is invalid.
    """
    n = len(frames)
    table, times = frames.table.copy(), np.empty((2, n), np.int64)
    parsed = _parse_similar(frames, table, times) if n >= _COLUMNS_PAY else np.zeros(n, np.bool_)
    for i in np.flatnonzero(~parsed).tolist():
        row = read_row(frames.header(i))
        if row is None:
            n = i
            break
        begin = int(frames.header_begin[i])
        table[_FIELDS, i] = (
            begin + row.stream_end + len(SUBJECT),
            begin + row.subject_end,
            begin + row.own_end + len(STREAM),
            begin + row.stream_end,
            row.own_end if row.own_end > BARE else 0,
            row.seq,
            row.previous,
            row.pending,
        )
        times[:, i] = begin + row.time_begin, begin + row.time_end
    table, (begins, ends) = table[:, :n], times[:, :n]
    try:
        stored = slices(frames.buffer, begins, ends, pa.string()).cast(pa.timestamp("ns", "UTC"))
    except pa.ArrowInvalid as error:
        raise ProtocolError(f"invalid Direct Get reply: Nats-Time-Stamp: {error}") from None
    table[Field.TIME] = stored.cast(pa.int64())
    return Replies(frames.buffer, read_only(table), frames.adjacent)


def _parse_similar(frames: Frames, table: Table, times: Table) -> NDArray[np.bool_]:
    """Fill ``table`` and the positions of ``times`` for the messages of the form of the first.

    Returns:
        which messages these are.
    """
    parsed = np.zeros(len(frames), np.bool_)
    block = frames.header(0)
    model = read_row(block)
    begin, stop = int(frames.begin[0]), int(frames.stop[-1])
    if model is None or model.previous < 0:
        return parsed
    head = block[model.own_end : model.stream_end] + SUBJECT
    data = np.frombuffer(frames.buffer, np.uint8, stop - begin, begin)
    feed = np.flatnonzero(data == ord("\n"))
    feed += begin
    last = feed.searchsorted(frames.payload_begin - 1)
    ends = feed[last - _LINES]  # the first message has so many lines before
    # Lines of these lengths contain all bytes that are compared below.
    fits = (ends[:5] - ends[1:6] >= _MIN_LENGTHS).all(axis=0)
    fits &= ends[5] - ends[7] >= len(head)
    fits &= ends[7] > frames.header_begin
    fits &= ends[0] == frames.payload_begin - 1
    chosen = np.flatnonzero(fits)
    if not chosen.size:
        return parsed
    if chosen.size < fits.size:
        ends = ends[:, chosen]
    header = frames.header_begin[chosen]
    # The position of each line's CR: its end and the next line's name are compared together.
    previous_end, pending_end, time_end, seq_end, subject_end, stream_end, own_end = ends[1:] - 1
    good = _matches(frames, own_end, head)
    for at, text in (
        (subject_end, SEQUENCE),
        (seq_end, TIME),
        (time_end, PENDING),
        (pending_end, PREVIOUS),
        (previous_end, _END),
    ):
        good &= _matches(frames, at, text)
    # A subject or a time could still contain a lone CR.
    _, _, values = slices(frames.buffer, own_end + 2, time_end, pa.binary()).buffers()
    if np.count_nonzero(np.frombuffer(values, np.uint8) == ord("\r")) != 3 * chosen.size:
        return parsed
    n = chosen.size
    numbers, numeric = numbers_between(
        frames.buffer,
        np.concatenate(
            (
                subject_end + len(SEQUENCE),
                pending_end + len(PREVIOUS),
                time_end + len(PENDING),
            )
        ),
        np.concatenate((seq_end, previous_end, pending_end)),
    )
    good &= numeric.reshape(3, n).all(axis=0)
    own = own_end - header
    table[_FIELDS[:, None], chosen] = (
        stream_end + len(SUBJECT),
        subject_end,
        own_end + len(STREAM),
        stream_end,
        np.where(own > BARE, own, 0),
        *numbers.reshape(3, n),
    )
    times[:, chosen] = seq_end + len(TIME), time_end
    parsed[chosen] = good
    return parsed


def _matches(frames: Frames, at: Positions, text: bytes) -> NDArray[np.bool_]:
    """Return at which positions ``text`` is; it must fit into the buffer at each of them."""
    actual = bytes_at(frames.buffer, at, len(text))
    if actual.tobytes() == text * at.size:
        return np.ones(at.size, np.bool_)
    same = actual.view(np.uint8).reshape(at.size, -1) == np.frombuffer(text, np.uint8)
    result: NDArray[np.bool_] = same.all(axis=1)
    return result
