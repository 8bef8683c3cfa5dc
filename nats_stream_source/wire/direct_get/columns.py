"""Many Direct Get replies at once, as columns; ``parse`` parses a single reply.

Theory of operation. The server's fields are the last six lines of a header block, in a fixed order.
So the positions of all LFs determine where each field of each message starts and ends: the last
line of the block is found by its LF, the others are the lines before it. The lines are verified:
every name and the first message's stream byte by byte, the digits of numbers, and that no stray CR
is between them. A reply that differs (a new field, the reply of another stream, a status) is parsed
one by one, so the two ways agree on every input.

Positions are relative to the header block and stay valid when frames are copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nats_stream_source.wire.arrow_slices import slices
from nats_stream_source.wire.ascii_integers import Positions, bytes_at, numbers_between
from nats_stream_source.wire.direct_get.parse import (
    BARE,
    PENDING,
    PREVIOUS,
    SEQUENCE,
    STREAM,
    SUBJECT,
    TIME,
    Row,
    StoredReply,
    read_row,
    stored_reply,
)
from nats_stream_source.wire.framing.frames import Frames

Table = NDArray[np.int64]
"""One column for each message; the rows are the fields of :class:`Row`."""

_SEQ, _PENDING, _PREVIOUS, _OWN_END, _STREAM_END, _SUBJECT_END, _TIME_BEGIN, _TIME_END = range(8)
_FIELDS = len(Row._fields)
_COLUMNS_PAY = 32  # messages; parsing so many at once costs as much as one by one
_MAX_BYTES = (1 << 31) - 1  # positions in Arrow arrays are int32
# Backwards from the block's end: empty line, Nats-Last-Sequence, ..., Nats-Stream, the line before.
_LINES = np.arange(8)[:, None]
_END = b"\r\n\r\n"
_MIN_LENGTHS = np.array([2, *(len(text) - 1 for text in (PREVIOUS, PENDING, TIME, SEQUENCE))])[
    :, None
]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ReplyColumns(Sequence[StoredReply]):
    """The server fields of each reply, as columns; also a sequence of :class:`StoredReply`.

    Attributes:
        frames: the messages.
        table: the fields of :class:`Row`, int64, one column for each message.
    """

    frames: Frames
    table: Table

    def __len__(self) -> int:
        return int(self.table.shape[1])

    def __repr__(self) -> str:
        shown = f"{self.sequences[0]}..{self.sequences[-1]}" if len(self) else "none"
        return f"<ReplyColumns {len(self)}, {shown}>"

    @overload
    def __getitem__(self, index: int) -> StoredReply: ...
    @overload
    def __getitem__(self, index: slice) -> ReplyColumns: ...
    def __getitem__(self, index: int | slice) -> StoredReply | ReplyColumns:
        if isinstance(index, slice):
            return self.select(index)
        return stored_reply(self.frames.header(index), Row(*self.table[:, index].tolist()))

    def __iter__(self) -> Iterator[StoredReply]:
        return map(self.__getitem__, range(len(self)))

    def select(self, rows: slice | NDArray[np.bool_]) -> ReplyColumns:
        """Return the replies at some positions."""
        return ReplyColumns(self.frames.select(rows), self.table[:, rows])

    @property
    def sequences(self) -> Table:
        """The stream sequences."""
        sequences: Table = self.table[_SEQ]
        return sequences

    @property
    def previous(self) -> Table:
        """The sequence of the message before each in its batch; -1 outside of batches."""
        previous: Table = self.table[_PREVIOUS]
        return previous

    @property
    def own_ends(self) -> Table:
        """Number of bytes of each header block that are the publisher's; 0 without any."""
        ends = self.table[_OWN_END]
        return np.where(ends > BARE, ends, 0)

    @property
    def subject_spans(self) -> tuple[Positions, Positions]:
        """Start and end positions of the subjects in the frames' buffer."""
        begin = self.frames.header_begin
        return (
            begin + self.table[_STREAM_END] + len(SUBJECT),
            begin + self.table[_SUBJECT_END],
        )

    @property
    def time_spans(self) -> tuple[Positions, Positions]:
        """Start and end positions of the times in the frames' buffer."""
        begin = self.frames.header_begin
        return begin + self.table[_TIME_BEGIN], begin + self.table[_TIME_END]

    def all_from(self, stream: str) -> bool:
        """Whether every reply is from ``stream``."""
        if not len(self):
            return True
        name = stream.encode("utf-8", "surrogateescape")
        begin = self.table[_OWN_END] + len(STREAM)
        if not (self.table[_STREAM_END] - begin == len(name)).all():
            return False
        return bool(_matches(self.frames, self.frames.header_begin + begin, name).all())

    @staticmethod
    def join(parts: Sequence[ReplyColumns]) -> ReplyColumns:
        """Concatenate replies."""
        if len(parts) == 1:
            return parts[0]
        table = np.concatenate([np.empty((_FIELDS, 0), np.int64), *(p.table for p in parts)], 1)
        return ReplyColumns(Frames.chain([part.frames for part in parts]), table)


def texts(frames: Frames, spans: tuple[Positions, Positions]) -> list[str]:
    """Decode the strings at rising positions in the frames' buffer; UTF-8, surrogateescape."""
    begin, end = spans
    if begin.size < _COLUMNS_PAY or len(frames.buffer) > _MAX_BYTES:
        return [
            bytes(frames.buffer[b:e]).decode("utf-8", "surrogateescape")
            for b, e in zip(begin.tolist(), end.tolist(), strict=True)
        ]
    # Decoded once as one string, from which the single strings are sliced.
    _, offsets, values = slices(frames.buffer, begin, end, pa.binary()).buffers()
    border = np.frombuffer(offsets, np.int32, begin.size + 1).tolist()
    raw = values.to_pybytes()
    if raw.isascii():
        text = raw.decode("ascii")
        return [text[b:e] for b, e in pairwise(border)]
    return [raw[b:e].decode("utf-8", "surrogateescape") for b, e in pairwise(border)]


def read_replies(frames: Frames) -> ReplyColumns:
    """Parse replies up to the first frame that is not a message with the server's fields."""
    n = len(frames)
    table = np.empty((_FIELDS, n), np.int64)
    parsed = _parse_similar(frames, table) if n >= _COLUMNS_PAY else np.zeros(n, np.bool_)
    rows: list[Row] = []
    rest = np.flatnonzero(~parsed)
    for i in rest.tolist():
        row = read_row(frames.header(i))
        if row is None:
            n = i
            break
        rows.append(row)
    if rows:
        table[:, rest[: len(rows)]] = np.array(rows, np.int64).T
    return ReplyColumns(frames.select(slice(0, n)), table[:, :n])


def _parse_similar(frames: Frames, table: Table) -> NDArray[np.bool_]:
    """Fill ``table`` for the messages of the same form as the first; return which these are."""
    parsed = np.zeros(len(frames), np.bool_)
    block = frames.header(0)
    model = read_row(block)
    begin, stop = int(frames.begin[0]), int(frames.stop[-1])
    if model is None or model.previous < 0 or len(frames.buffer) > _MAX_BYTES:
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
    number, numeric = numbers_between(
        frames.buffer,
        np.concatenate(
            (
                subject_end + len(SEQUENCE),
                time_end + len(PENDING),
                pending_end + len(PREVIOUS),
            )
        ),
        np.concatenate((seq_end, pending_end, previous_end)),
    )
    good &= numeric.reshape(3, n).all(axis=0)
    rows = table if n == len(frames) else np.empty((_FIELDS, n), np.int64)
    rows[:3] = number.reshape(3, n)
    for row, value in (
        (_OWN_END, own_end),
        (_STREAM_END, stream_end),
        (_SUBJECT_END, subject_end),
        (_TIME_BEGIN, seq_end + len(TIME)),
        (_TIME_END, time_end),
    ):
        np.subtract(value, header, out=rows[row])
    if rows is not table:
        table[:, chosen] = rows
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
