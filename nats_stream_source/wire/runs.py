"""Runs of one consumer's deliveries: frames and the numbers of their ACK subjects, found in one go.

Theory of operation. After each LF a line may begin; those that begin with ``MSG `` or ``HMSG`` are
candidates. In a run, all lines are alike up to the key and the length of the payload: the length is
read backwards from the line's end, the reply before it has a layout (``wire/layout.py``) and the
same sid before it, and what is left between the word and the sid is the subject. So no byte of a
payload is looked at but for its line ends, and the control line's only once.

What differs from the layout ends the run: another subscription's message, a status message, a
number that has grown by a digit, a control line, an odd one. A candidate is a frame only if the
frame before it ends where it begins; a payload that holds what looks like a frame ends the run too.
What ended it is walked (``wire/scan.py``), and another run may begin behind it. A run never accepts
what walking would refuse.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from nats_stream_source.wire.layout import (
    FIELDS,
    Layout,
    Positions,
    Words,
    bytes_at,
    layout_of,
    number_before,
)

_MSG, _HMSG = 1, 2
_MSG_WORD, _HMSG_WORD = (int.from_bytes(word, "little") for word in (b"MSG ", b"HMSG"))
_CRLF = int.from_bytes(b"\r\n", "little")
_FEWEST_ROWS, _MOST_ROWS = 64, 4096  # at once: a run may end soon; the cache is not so large
_SLICE = 128 << 10  # bytes
_LONGEST_SUBJECT = 256
_SHORTEST_LINE = 20  # bytes; a delivery's reply alone has more


class Runs:
    """The candidates of ``buffer[start:size]``, from which runs can be read."""

    def __init__(self, buffer: bytes | memoryview, start: int, size: int) -> None:
        self._buffer = buffer
        self._size = size
        data = np.frombuffer(buffer, np.uint8, size)
        feed = _line_feeds(data, start)
        begin = np.empty_like(feed)
        begin[:1] = start
        begin[1:] = feed[:-1]
        begin[1:] += 1
        begin = begin[: int(begin.searchsorted(size - 4, side="right"))]
        letter = data[begin]
        heads = np.flatnonzero((letter == ord("M")) | (letter == ord("H")))
        begin = begin[heads]
        word = bytes_at(buffer, begin, 4).view("<u4")
        plain = word == _MSG_WORD
        good = plain | (word == _HMSG_WORD)
        if not good.all():
            heads, begin, plain = heads[good], begin[good], plain[good]
        self._data = data
        self._rows = _MOST_ROWS
        self._begin: Positions = begin
        self._feed: Positions = feed[heads]
        self._plain: NDArray[np.bool_] = plain

    def read(self, row: tuple[int, ...], fields: int) -> NDArray[np.int64] | None:
        """The run that begins with a frame that was walked.

        Args:
            row: the frame's fields, as those of ``Frames`` after ``buffer``.
            fields: how many they are.

        Returns:
            the frames of the run as a table of ``fields`` + FIELDS rows, the latter the numbers in
            the reply; None where the frame is no delivery with a layout.
        """
        begin, _, kind, sid, _, subject_end, reply_begin, reply_end, *_ = row
        if reply_begin == reply_end:
            return None
        buffer = self._buffer
        # With the sid and the spaces around it: what is the same in every line before the numbers.
        before = bytes(buffer[subject_end:reply_begin])
        layout = layout_of(bytes(buffer[reply_begin:reply_end]), before)
        first = int(self._begin.searchsorted(begin))
        if layout is None or before != b" %d " % sid or first == self._begin.size:
            return None
        if self._begin[first] != begin:
            return None
        table = np.empty((fields + FIELDS, self._begin.size - first), np.int64)
        found = 0
        while first + found < self._begin.size:
            last = min(first + found + self._rows, self._begin.size)
            block = table[:, found : last - first]
            good = self._block(first + found, layout, len(before), kind == _HMSG, begin, block)
            found += good
            if good < block.shape[1]:
                # What was looked at behind it was in vain: look at less the next time.
                self._rows = max(_FEWEST_ROWS, min(self._rows, 4 * found))
                break
            begin = int(table[1, found - 1])
            self._rows = _MOST_ROWS
        table = table[:, :found]
        table[3] = sid
        return table if found else None

    def _block(
        self,
        first: int,
        layout: Layout,
        before: int,
        headers: bool,
        position: int,
        table: NDArray[np.int64],
    ) -> int:
        """Fill ``table`` with the candidates from ``first`` on; how many go on with the run.

        The first must begin at ``position``.
        """
        buffer, data = self._buffer, self._data
        begin = self._begin[first : first + table.shape[1]]
        feed = self._feed[first : first + begin.size]
        good = self._plain[first : first + begin.size] != headers
        long = feed - begin >= max(layout.length + 8, _SHORTEST_LINE)
        if not long.all():
            # Looking back from the end of a shorter line could lead before the buffer.
            n = int(long.argmin())
            begin, feed, good = begin[:n], feed[:n], good[:n]
        if not begin.size or begin[0] != position:
            return 0
        digits, length, numeric = number_before(buffer, feed - 1)
        good &= numeric
        reply_end = feed - 2 - digits
        header_length: Positions | int = 0
        if headers:
            good &= data[begin + 4] == ord(" ")
            digits, header_length, numeric = number_before(buffer, reply_end)
            good &= numeric
            good &= header_length <= length
            reply_end -= digits + 1
        subject_begin = begin + (5 if headers else 4)
        line_begin = reply_end - layout.length
        after = feed + 1
        end = after + length
        stop = end + 2
        tail = np.minimum(end, self._size - 2)
        good &= line_begin > subject_begin
        good &= stop <= self._size
        good &= data[feed - 1] == ord("\r")
        good &= data[tail] == ord("\r")
        good &= data[tail + 1] == ord("\n")
        good[1:] &= begin[1:] == stop[:-1]
        n = good.size if good.all() else int(good.argmin())
        n = _without_spaces(buffer, subject_begin[:n], line_begin[:n])
        n = layout.read(buffer, reply_end[:n], table[-FIELDS:, :n]) if n else 0
        values = (
            (0, begin),
            (1, stop),
            (4, subject_begin),
            (5, line_begin),
            (6, line_begin + before),
            (7, reply_end),
            (8, after),
            (9, after + header_length),
            (10, end),
        )
        for row, value in values:
            table[row, :n] = value[:n]
        table[2, :n] = _HMSG if headers else _MSG
        return n


def _line_feeds(data: NDArray[np.uint8], start: int) -> Positions:
    # Slice by slice: what is compared stays in the processor's cache.
    found = []
    for begin in range(start, data.size, _SLICE):
        slice_ = np.flatnonzero(data[begin : begin + _SLICE] == ord("\n"))
        slice_ += begin
        found.append(slice_)
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _without_spaces(buffer: bytes | memoryview, begin: Positions, end: Positions) -> int:
    """How many, from the first on, of ``buffer[begin:end]`` have no space and no control byte."""
    if not begin.size:
        return 0
    length = end - begin
    longest = int(length.max())
    width = -(-longest // 8)
    if longest > _LONGEST_SUBJECT:
        return int((length > _LONGEST_SUBJECT).argmax())
    if int(begin[-1]) + 8 * width > len(buffer):
        begin = begin[: int(begin.searchsorted(len(buffer) - 8 * width, side="right"))]
        length = length[: begin.size]
    word = bytes_at(buffer, begin, 8 * width).view("<u8").reshape(-1, width)
    # Bit 7 of each byte that is 0 to 32; bytes behind such a one may be marked wrongly.
    low = word - _SPACE_AND_ONE
    low &= ~word
    low &= _inside(width)[length]
    if not low.any():
        return begin.size
    return int(low.any(axis=1).argmax())


_SPACE_AND_ONE = np.uint64(0x2121212121212121)


@functools.cache
def _inside(width: int) -> Words:
    """For each length, bit 7 of its first bytes, in ``width`` words of eight bytes."""
    lengths = np.arange(8 * width + 1)[:, None]
    marks = np.where(np.arange(8 * width) < lengths, 0x80, 0).astype(np.uint8)
    return marks.view("<u8")
