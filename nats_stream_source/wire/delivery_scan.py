"""Find runs of one consumer's deliveries: frames, and the numbers of their ACK subjects.

Theory of operation. A line may start after each LF. Lines that start with ``MSG `` or ``HMSG`` are
candidates. In a run, all lines are equal except for the key and the length of the payload. The
length is parsed backwards from the end of the line. The reply before it has a layout
(``wire/ascii_integers.py``) and the same sid before it. The bytes between the keyword and the sid
are the subject. So only line ends are searched in payloads, and each control line is parsed once.

Any difference from the layout ends the run: a message of another subscription, a status message, a
number with one more digit, a control line, an unusual line. A candidate is a frame only if the
frame before it ends where it starts. A payload that contains bytes like a frame ends the run too.
The frame that ended the run is parsed alone (``wire/scan.py``), and another run may start after it.
A run never accepts bytes that parsing one frame at a time would reject.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from nats_stream_source.wire.ascii_integers import (
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
_MIN_ROWS, _MAX_ROWS = 64, 4096  # of one block: a run may end soon; the cache is limited
_SLICE = 128 << 10  # bytes
_MAX_SUBJECT = 256
_MIN_LINE = 20  # bytes; the reply of a delivery alone is longer


class DeliveryScanner:
    """The candidates of ``buffer[start:size]``, from which runs are read."""

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
        self._rows = _MAX_ROWS
        self._begin: Positions = begin
        self._feed: Positions = feed[heads]
        self._plain: NDArray[np.bool_] = plain

    def read(self, row: tuple[int, ...], fields: int) -> NDArray[np.int64] | None:
        """Return the run that starts with a frame that was parsed alone.

        Args:
            row: the fields of that frame, as those of ``Frames`` after ``buffer``.
            fields: the number of these fields.

        Returns:
            the frames of the run, a table of ``fields`` + FIELDS rows, the latter with the numbers
            of the reply; None if the frame is not a delivery with a layout.
        """
        begin, _, kind, sid, _, subject_end, reply_begin, reply_end, *_ = row
        if reply_begin == reply_end:
            return None
        buffer = self._buffer
        # The sid and the spaces around it are equal in every line of the run.
        before = bytes(buffer[subject_end:reply_begin])
        layout = layout_of(bytes(buffer[reply_begin:reply_end]), before)
        first = int(self._begin.searchsorted(begin))
        if layout is None or before != b" %d " % sid or first == self._begin.size:
            return None
        if self._begin[first] != begin:
            return None
        table = np.empty((fields + FIELDS, self._begin.size - first), np.int64)
        count = 0
        while first + count < self._begin.size:
            last = min(first + count + self._rows, self._begin.size)
            block = table[:, count : last - first]
            good = self._read_block(first + count, layout, len(before), kind == _HMSG, begin, block)
            count += good
            if good < block.shape[1]:
                # The candidates after it were parsed in vain: parse smaller blocks next time.
                self._rows = max(_MIN_ROWS, min(self._rows, 4 * count))
                break
            begin = int(table[1, count - 1])
            self._rows = _MAX_ROWS
        table = table[:, :count]
        table[3] = sid
        return table if count else None

    def _read_block(
        self,
        first: int,
        layout: Layout,
        before: int,
        headers: bool,
        position: int,
        table: NDArray[np.int64],
    ) -> int:
        """Fill ``table`` with the candidates from ``first`` on; return how many continue the run.

        The first one must start at ``position``.
        """
        buffer, data = self._buffer, self._data
        begin = self._begin[first : first + table.shape[1]]
        feed = self._feed[first : first + begin.size]
        good = self._plain[first : first + begin.size] != headers
        long = feed - begin >= max(layout.length + 8, _MIN_LINE)
        if not long.all():
            # Reading backwards from the end of a shorter line could leave the buffer.
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
    # Slice by slice, so that the compared bytes stay in the processor's cache.
    positions = []
    for begin in range(start, data.size, _SLICE):
        slice_ = np.flatnonzero(data[begin : begin + _SLICE] == ord("\n"))
        slice_ += begin
        positions.append(slice_)
    return np.concatenate(positions) if positions else np.empty(0, np.int64)


def _without_spaces(buffer: bytes | memoryview, begin: Positions, end: Positions) -> int:
    """Return how many of ``buffer[begin:end]``, from the first, lack spaces and control bytes."""
    if not begin.size:
        return 0
    length = end - begin
    longest = int(length.max())
    width = -(-longest // 8)
    if longest > _MAX_SUBJECT:
        return int((length > _MAX_SUBJECT).argmax())
    if int(begin[-1]) + 8 * width > len(buffer):
        begin = begin[: int(begin.searchsorted(len(buffer) - 8 * width, side="right"))]
        length = length[: begin.size]
    word = bytes_at(buffer, begin, 8 * width).view("<u8").reshape(-1, width)
    # Bit 7 of each byte from 0 to 32; bytes after such a byte may be marked wrongly.
    low = word - _SPACE_AND_ONE
    low &= ~word
    low &= _high_bits(width)[length]
    if not low.any():
        return begin.size
    return int(low.any(axis=1).argmax())


_SPACE_AND_ONE = np.uint64(0x2121212121212121)


@functools.cache
def _high_bits(width: int) -> Words:
    """Return, for each length, bit 7 of the first bytes, in ``width`` words of eight bytes."""
    lengths = np.arange(8 * width + 1)[:, None]
    marks = np.where(np.arange(8 * width) < lengths, 0x80, 0).astype(np.uint8)
    return marks.view("<u8")
