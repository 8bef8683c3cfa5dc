"""Many answers to a Direct Get at once, as columns; ``wire/answer_text.py`` reads a single one.

Theory of operation. The server's fields are the last six lines of a header block, in a fixed order.
So the positions of all LFs say where each field of each message begins and ends: the block's last
line is found by its LF, the others are those before it. That the lines are what they have to be is
checked, not assumed: every name, and the first message's stream, byte for byte; that numbers are
digits; that no stray CR stands between. What does not look exactly so (a field that is new, another
stream's answer, a status) is read plainly, one by one, so the two ways agree on every input.

Positions are relative to the header block, and stay right when frames are copied elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nats_stream_source.wire.answer_text import (
    BARE,
    PENDING,
    PREVIOUS,
    SEQUENCE,
    STREAM,
    SUBJECT,
    TIME,
    Answer,
    Row,
    answer_of,
    read_row,
)
from nats_stream_source.wire.arrow import slices
from nats_stream_source.wire.frames import Frames
from nats_stream_source.wire.layout import Positions, bytes_at, numbers_between

Table = NDArray[np.int64]
"""One column for each message; the rows are the fields of :class:`Row`."""

_SEQ, _PENDING, _PREVIOUS, _OWN_END, _STREAM_END, _SUBJECT_END, _TIME_BEGIN, _TIME_END = range(8)
_FIELDS = len(Row._fields)
_ALIKE_PAYS = 32  # messages: to read so many together costs as much as one by one
_MAX_BYTES = (1 << 31) - 1  # positions in Arrow arrays are int32
# From the block's end back: the empty line, Nats-Last-Sequence, ..., Nats-Stream, the line before.
_LINES = np.arange(8)[:, None]
_END = b"\r\n\r\n"
_SHORTEST = np.array([2, *(len(text) - 1 for text in (PREVIOUS, PENDING, TIME, SEQUENCE))])[:, None]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Answers(Sequence[Answer]):
    """What the server says of each message; a sequence of :class:`Answer` for those who want one.

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
        return f"<Answers {len(self)}, {shown}>"

    @overload
    def __getitem__(self, index: int) -> Answer: ...
    @overload
    def __getitem__(self, index: slice) -> Answers: ...
    def __getitem__(self, index: int | slice) -> Answer | Answers:
        if isinstance(index, slice):
            return Answers(self.frames.select(index), self.table[:, index])
        return answer_of(self.frames.header(index), Row(*self.table[:, index].tolist()))

    def __iter__(self) -> Iterator[Answer]:
        return map(self.__getitem__, range(len(self)))

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
        """How many bytes of each header block are the publisher's; 0 where there are none."""
        ends = self.table[_OWN_END]
        return np.where(ends > BARE, ends, 0)

    @property
    def subject_spans(self) -> tuple[Positions, Positions]:
        """Where the subjects begin and end in the frames' buffer."""
        begin = self.frames.header_begin
        return (
            begin + self.table[_STREAM_END] + len(SUBJECT),
            begin + self.table[_SUBJECT_END],
        )

    @property
    def time_spans(self) -> tuple[Positions, Positions]:
        """Where the times begin and end in the frames' buffer."""
        begin = self.frames.header_begin
        return begin + self.table[_TIME_BEGIN], begin + self.table[_TIME_END]

    def all_from(self, stream: str) -> bool:
        """Whether every answer names ``stream``."""
        if not len(self):
            return True
        name = stream.encode("utf-8", "surrogateescape")
        begin = self.table[_OWN_END] + len(STREAM)
        if not (self.table[_STREAM_END] - begin == len(name)).all():
            return False
        return bool(_stands(self.frames, self.frames.header_begin + begin, name).all())

    @staticmethod
    def join(parts: Sequence[Answers]) -> Answers:
        """The answers of several, one after the other."""
        if len(parts) == 1:
            return parts[0]
        table = np.concatenate([np.empty((_FIELDS, 0), np.int64), *(p.table for p in parts)], 1)
        return Answers(Frames.chain([part.frames for part in parts]), table)


def texts(frames: Frames, spans: tuple[Positions, Positions]) -> list[str]:
    """The texts that stand at rising positions in the frames' buffer; UTF-8, surrogateescape."""
    begin, end = spans
    if begin.size < _ALIKE_PAYS or len(frames.buffer) > _MAX_BYTES:
        return [
            bytes(frames.buffer[b:e]).decode("utf-8", "surrogateescape")
            for b, e in zip(begin.tolist(), end.tolist(), strict=True)
        ]
    # Together in one text, from which the single ones are cut: decoded once.
    _, offsets, values = slices(frames.buffer, begin, end, pa.binary()).buffers()
    border = np.frombuffer(offsets, np.int32, begin.size + 1).tolist()
    raw = values.to_pybytes()
    if raw.isascii():
        text = raw.decode("ascii")
        return [text[b:e] for b, e in pairwise(border)]
    return [raw[b:e].decode("utf-8", "surrogateescape") for b, e in pairwise(border)]


def read_answers(frames: Frames) -> Answers:
    """The answers of frames, up to the first that is no message with the server's fields."""
    n = len(frames)
    table = np.empty((_FIELDS, n), np.int64)
    read = _read_alike(frames, table) if n >= _ALIKE_PAYS else np.zeros(n, np.bool_)
    rows: list[Row] = []
    odd = np.flatnonzero(~read)
    for i in odd.tolist():
        row = read_row(frames.header(i))
        if row is None:
            n = i
            break
        rows.append(row)
    if rows:
        table[:, odd[: len(rows)]] = np.array(rows, np.int64).T
    return Answers(frames.select(slice(0, n)), table[:, :n])


def _read_alike(frames: Frames, table: Table) -> NDArray[np.bool_]:
    """Fill ``table`` for the messages that look like the first one; which ones these are."""
    read = np.zeros(len(frames), np.bool_)
    block = frames.header(0)
    like = read_row(block)
    begin, stop = int(frames.begin[0]), int(frames.stop[-1])
    if like is None or like.previous < 0 or len(frames.buffer) > _MAX_BYTES:
        return read
    head = block[like.own_end : like.stream_end] + SUBJECT
    data = np.frombuffer(frames.buffer, np.uint8, stop - begin, begin)
    feed = np.flatnonzero(data == ord("\n"))
    feed += begin
    last = feed.searchsorted(frames.payload_begin - 1)
    ends = feed[last - _LINES]  # there are as many before, since the first message has them
    # Lines that are so long hold all that is looked at below: it is within the block.
    fits = (ends[:5] - ends[1:6] >= _SHORTEST).all(axis=0)
    fits &= ends[5] - ends[7] >= len(head)
    fits &= ends[7] > frames.header_begin
    fits &= ends[0] == frames.payload_begin - 1
    chosen = np.flatnonzero(fits)
    if not chosen.size:
        return read
    if chosen.size < fits.size:
        ends = ends[:, chosen]
    header = frames.header_begin[chosen]
    # Where each line's CR stands: from there on its end and the next line's name are one text.
    previous_end, pending_end, time_end, seq_end, subject_end, stream_end, own_end = ends[1:] - 1
    good = _stands(frames, own_end, head)
    for at, text in (
        (subject_end, SEQUENCE),
        (seq_end, TIME),
        (time_end, PENDING),
        (pending_end, PREVIOUS),
        (previous_end, _END),
    ):
        good &= _stands(frames, at, text)
    # Of the texts between the names, a CR alone could still be in a subject or a time.
    _, _, values = slices(frames.buffer, own_end + 2, time_end, pa.binary()).buffers()
    if np.count_nonzero(np.frombuffer(values, np.uint8) == ord("\r")) != 3 * chosen.size:
        return read
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
    read[chosen] = good
    return read


def _stands(frames: Frames, at: Positions, text: bytes) -> NDArray[np.bool_]:
    """At which of the positions ``text`` stands; all of them are so far from the buffer's end."""
    found = bytes_at(frames.buffer, at, len(text))
    if found.tobytes() == text * at.size:
        return np.ones(at.size, np.bool_)
    same = found.view(np.uint8).reshape(at.size, -1) == np.frombuffer(text, np.uint8)
    result: NDArray[np.bool_] = same.all(axis=1)
    return result
