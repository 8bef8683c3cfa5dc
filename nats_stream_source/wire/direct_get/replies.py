"""The response to one Direct Get request (ADR-31, "Response Format"): a series of replies.

A message has the publisher's header fields first and the server's fields after them::

    NATS/1.0
    <the publisher's fields>
    Nats-Stream: ORDERS                      the stream, or the mirror, that sent the reply
    Nats-Subject: orders.1
    Nats-Sequence: 17
    Nats-Time-Stamp: 2026-11-21T05:04:14.123456789Z
    Nats-Num-Pending: 3                      in a batch only, like the next field
    Nats-Last-Sequence: 12                   of the previous message of this batch; 0 for the first

Publishers may send any fields, also ``Nats-Sequence: 1``, ``Status: 404`` and a first line with a
status. So only the *last* ``Nats-Stream`` and the lines after it count. A block without these four
fields is a :class:`DirectGetStatus`: the end of a batch (204), no message found (404), an invalid
request (408), too many subjects (413), no responders (503).

``Nats-Last-Sequence`` links the messages of a batch: a message that was lost in transit shows at
the next one, or at the EOB. :class:`DirectGetResponse` keeps the replies before the first gap.

Theory of operation. :func:`_read_one` parses one header block. The blocks of many messages of a
batch are split at once, backwards, into the lines of the server, which have a fixed order
(:func:`_read_alike`). If one of them differs (a new field, a status), all are parsed one by one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire.arrow_slices import bytes_at, numbers, slices
from nats_stream_source.wire.consumer.deliveries import Deliveries
from nats_stream_source.wire.consumer.messages import is_number
from nats_stream_source.wire.framing.frames import Frames, Row, read_only
from nats_stream_source.wire.framing.parse import Field
from nats_stream_source.wire.headers import parse_headers

EOB, NOT_FOUND, BAD_REQUEST, MIN_LAST_SEQUENCE, TOO_MANY = 204, 404, 408, 412, 413

_BARE = len(b"NATS/1.0")
_STREAM = b"Nats-Stream: "
_NAMES = (
    *(_STREAM, b"Nats-Subject: ", b"Nats-Sequence: "),
    *(b"Nats-Time-Stamp: ", b"Nats-Num-Pending: ", b"Nats-Last-Sequence: "),
)
_LINES = 1 + len(_NAMES) + 2  # the publisher's, those of the server, and two empty ones at the end
_FIELDS = re.compile(
    rb"\r\n%s([^\r\n]*)\r\n%s([^\r\n]*)\r\n%s(\d{1,19})\r\n%s([^\r\n]*)"
    rb"(?:\r\n%s(\d{1,19})\r\n%s(\d{1,19}))?(?:\r\n[^\r\n]+)*\r\n\r\n" % _NAMES
)
_MAX_INT64 = (1 << 63) - 1
_MANY = 64  # messages; parsing so many at once costs as much as one by one
# The fields of the table that the server's header fields fill, beside the time.
_FILLED = np.array(
    [
        *(Field.SUBJECT_BEGIN, Field.SUBJECT_END, Field.REPLY_BEGIN, Field.REPLY_END),
        *(Field.DELIVERED, Field.STREAM_SEQ, Field.CONSUMER_SEQ, Field.PENDING),
    ]
)


@dataclass(frozen=True, slots=True)
class DirectGetStatus:
    """A reply without a message; the numbers are those of the EOB, None where they are absent."""

    code: int
    description: str
    num_pending: int | None = None
    last_seq: int | None = None
    up_to_seq: int | None = None


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
        import pyarrow.compute as pc

        names = slices(self.buffer, self.reply_begin, self.reply_end, pa.binary())
        return pc.unique(names).to_pylist() in ([], [stream.encode()])


class DirectGetResponse:
    """The replies to one request, up to the first gap.

    Attributes:
        status: the status that ended the response; None before that, and if a message is missing.
        broken: a message is missing; those of ``page`` were received before it.
        connection_lost: the connection was lost before the response ended.
        last_seq: the sequence of the last message; 0 before the first one.
    """

    __slots__ = ("_parts", "broken", "connection_lost", "last_seq", "status")

    def __init__(self, status: DirectGetStatus | None = None) -> None:
        self._parts: list[Replies] = []
        self.status = status
        self.broken = False
        self.connection_lost = False
        self.last_seq = 0

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @property
    def page(self) -> Replies:
        """The messages, without a gap."""
        if len(self._parts) != 1:
            self._parts = [Replies.chain(self._parts)]
        return self._parts[0]

    @property
    def code(self) -> int | None:
        """The status code; None without a status."""
        return self.status.code if self.status else None

    @property
    def num_pending(self) -> int:
        """How many messages still match after this page.

        The last message's ``Nats-Num-Pending``; without a message, the EOB's.
        """
        if len(self):
            return max(int(self.page.pending[-1]), 0)
        return (self.status.num_pending if self.status else None) or 0

    @property
    def is_batch(self) -> bool:
        """Whether the first message has ``Nats-Last-Sequence``, as all messages of a batch do."""
        return bool(self._parts) and bool(self._parts[0].previous[0] >= 0)

    @property
    def stopped_after_first(self) -> bool:
        """Whether only the first message of a batch arrived, as through some account imports."""
        return not (self.ended or self.connection_lost) and len(self) == 1 and self.is_batch

    @property
    def is_of_old_server(self) -> bool:
        """Whether a server before 2.11 replied to a batch: it ignores ``batch``, ``multi_last``."""
        if self.status is not None and self.status.code == BAD_REQUEST:
            return "Empty" in self.status.description
        return bool(len(self)) and not self.is_batch

    @property
    def is_silent(self) -> bool:
        """Whether nothing arrived: the server that received the request is paused or lost."""
        return self.status is None and not len(self)

    @property
    def ended(self) -> bool:
        """Whether later frames do not belong to the response."""
        return self.broken or self.status is not None

    def feed(self, frames: Frames) -> int:
        """Receive the next frames; return how many of them, from the first, are in ``page``.

        Raises:
            ProtocolError: a frame is neither a message with the server's fields nor a status.
        """
        if self.ended or not len(frames):
            return 0
        replies = read_replies(frames)
        parsed = len(replies)
        expected = np.concatenate(([self.last_seq], replies.stream_seq[:-1]))[:parsed]
        missing = (replies.previous >= 0) & (replies.previous != expected)
        if missing.any():
            self.broken = True
            replies = replies.select(slice(int(missing.argmax())))
        if len(replies):
            self._parts.append(replies)
            self.last_seq = int(replies.stream_seq[-1])
        if not self.broken and parsed < len(frames):
            status = read_status(frames.header(parsed))
            self.broken = status.code == EOB and status.last_seq != self.last_seq
            self.status = None if self.broken else status
        return len(replies)


def read_replies(frames: Frames) -> Replies:
    """Parse replies up to the first frame that is not a message with the server's fields.

    Raises:
        ProtocolError: the timestamp of a message is invalid.
    """
    rows = None
    if (n := len(frames)) >= _MANY:
        many = n - (_read_one(frames.header(n - 1)) is None)  # the last one is mostly the EOB
        rows = _read_alike(frames.select(slice(many)))
    if rows is None:
        single = []
        for i in range(n):
            if (row := _read_one(frames.header(i))) is None:
                break
            single.append(row)
        rows = np.array(single, np.int64).reshape(-1, 8).T
    frames = frames.select(slice(rows.shape[1]))
    seq, pending, previous, own_end, *ends = rows
    stream_end, subject_end, seq_end, time_end = (frames.header_begin + end for end in ends)
    stream, subject, _, time, *_ = (len(b"\r\n" + name) for name in _NAMES)
    try:
        times = slices(frames.buffer, seq_end + time, time_end, pa.string())
        stored = times.cast(pa.timestamp("ns", "UTC"))
    except pa.ArrowInvalid as error:
        raise ProtocolError(f"invalid Direct Get reply: Nats-Time-Stamp: {error}") from None
    table = frames.table.copy()
    table[_FILLED] = (
        *(stream_end + subject, subject_end, frames.header_begin + own_end + stream, stream_end),
        *(np.where(own_end > _BARE, own_end, 0), seq, previous, pending),
    )
    table[Field.TIME] = stored.cast(pa.int64())
    return Replies(frames.buffer, read_only(table), frames.adjacent)


def _read_one(block: bytes) -> tuple[int, ...] | None:
    """Parse the server's fields of a header block; None for a status and for other blocks.

    Returns:
        ``Nats-Sequence``, ``Nats-Num-Pending`` and ``Nats-Last-Sequence`` (-1 where they are
        absent), and where the publisher's fields, the stream, the subject, the sequence and the
        time end.
    """
    own_end = block.rfind(b"\r\n" + _STREAM)
    match = _FIELDS.fullmatch(block, own_end) if own_end >= 0 else None
    if match is None:
        return None
    values = [-1 if digits is None else int(digits) for digits in match.group(3, 5, 6)]
    if max(values) > _MAX_INT64:
        return None
    return (*values, own_end, *(match.end(group) for group in range(1, 5)))


def _read_alike(frames: Frames) -> NDArray[np.int64] | None:
    """Parse messages of a batch as :func:`_read_one` does; None if one has unusual lines."""
    # Deferred import: it takes 20 ms at the start of a query, and planners do not need it.
    import pyarrow.compute as pc

    blocks = slices(frames.buffer, frames.header_begin, frames.payload_begin, pa.binary())
    split = pc.split_pattern(blocks, "\r\n", max_splits=_LINES - 1, reverse=True)
    lines = split.values
    if (split.value_lengths().to_numpy() != _LINES).any():
        return None
    data = np.frombuffer(lines.buffers()[2], np.uint8).data
    border = np.frombuffer(lines.buffers()[1], np.int32, len(lines) + 1).astype(np.int64)
    begin, end = border[:-1].reshape(-1, _LINES).T, border[1:].reshape(-1, _LINES).T
    for line, name in enumerate(_NAMES, 1):
        if (end[line] - begin[line] < len(name)).any() or (
            bytes_at(data, begin[line], len(name)).tobytes() != name * len(frames)
        ):
            return None
    values = [numbers(data, begin[line] + len(_NAMES[line - 1]), end[line]) for line in (3, 5, 6)]
    if (end[-2:] > begin[-2:]).any() or min(map(np.min, values)) < 0:
        return None
    ends = np.cumsum(end[:5] - begin[:5] + len(b"\r\n"), axis=0) - len(b"\r\n")
    return np.concatenate((values, ends))


def read_status(block: bytes) -> DirectGetStatus:
    """Parse the status of a header block; ProtocolError if it has none, or is empty."""
    headers = parse_headers(block) if block else None
    if headers is None or headers.status is None:
        raise ProtocolError(
            f"invalid Direct Get reply: it has {'other' if block else 'no'} headers, expected "
            f"those of a message or a status"
        )

    def number(name: str) -> int | None:
        value = headers.get(name) or ""
        return int(value) if is_number(value) else None

    return DirectGetStatus(
        headers.status,
        headers.description,
        number("Nats-Num-Pending"),
        number("Nats-Last-Sequence"),
        number("Nats-UpTo-Sequence"),
    )
