"""Where each frame of a buffer begins and ends, and its fields.

Theory of operation. Two ways that agree on every input:

``_walk`` takes one frame at a position with a regular expression. It is the definition: what it
accepts is a frame, what it refuses is a :class:`ProtocolError`, and it alone knows unfinished
frames.

``_Scan`` finds the MSG and HMSG frames of a whole buffer with some fifty numpy calls. The
positions of all bytes up to the space (its *marks*) hold every space, CR and LF. After each LF a
line may begin; its number of marks says which fields a control line there would have, and the
marks themselves are the fields' borders. Numbers are read from their last digit backwards, all at
once. What does not look exactly as servers write it (one space between fields, payload whole and
followed by CRLF) is simply left out, so the scan never accepts what ``_walk`` would refuse.

What the scan finds are *candidates*: a payload may hold ``\\r\\nMSG x 1 5\\r\\n``. Only the chain
decides: a candidate is a frame if the frame before it ends where it begins, from the buffer's
first byte on. ``cut`` follows the chain, a whole run of adjoining candidates at a time; where no
candidate stands (PING, INFO, an odd line, the unfinished end) it walks one frame.

A scan costs as much as walking about ``_SCAN_PAYS`` frames, and reading every byte of a large
payload is a waste. So ``cut`` walks first, and scans the rest as soon as the frames seen so far
say that enough of them are left.

Deliveries of one consumer are so much alike that they are found faster than by a scan, and their
numbers with them: ``wire/runs.py``. Where that does not pay, since too many others lie between, the
scan does the rest.
"""

from __future__ import annotations

import re
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire import layout
from nats_stream_source.wire.runs import Runs

Table: TypeAlias = NDArray[np.int64]
"""Frames as columns; the rows are the fields of :class:`~nats_stream_source.wire.frames.Frames`
after ``buffer``: begin, stop, kind, sid, subject_begin, subject_end, reply_begin, reply_end,
header_begin, payload_begin, payload_end; and, with -1 where they were not read, the numbers of the
ACK subject: delivered, stream_seq, consumer_seq, time, pending."""

FIELDS = 11
ACKS = layout.FIELDS
MAX_LINE = 1 << 20
"""Bytes of the longest control line, its CRLF included. INFO of a large cluster has several KiB."""
MAX_PAYLOAD = (1 << 31) - 1
"""Bytes of the largest header block and payload; ``max_payload`` of a server is an int32."""

_CONTROL, _MSG, _HMSG = 0, 1, 2
_MAX_INT64 = (1 << 63) - 1
_SCAN_PAYS = 60
_RUN_PAYS = 60  # frames that a run must have on average
_ACK_PREFIX = b"$JS.ACK."
_WINDOW = 16
_LENGTH_DIGITS = 10
_Row: TypeAlias = tuple[int, int, int, int, int, int, int, int, int, int, int]

# What nats-py's parser takes (nats/protocol/parser.py), held to one line.
# Servers store subjects with any byte but blank, tab, CR and LF; \S would leave out VT and FF too.
_SUBJECT = rb"([^ \t\r\n]+)"
_MSG_LINE = re.compile(
    rb"MSG[ \t]+" + _SUBJECT + rb"[ \t]+(\d+)[ \t]+(?:" + _SUBJECT + rb"[ \t]+)?(\d+)\r\n"
)
_HMSG_LINE = re.compile(
    rb"HMSG[ \t]+"
    + _SUBJECT
    + rb"[ \t]+(\d+)[ \t]+(?:"
    + _SUBJECT
    + rb"[ \t]+)?(\d+)[ \t]+(\d+)\r\n"
)
_LF = re.compile(rb"\n")
_CONTROL_LINE = re.compile(
    rb"(?:PING|PONG|\+OK)[ \t]*\r\n|INFO[ \t]+[^\s][^\r\n]*\r\n|-ERR[ \t]+'[^\r\n]+'\r\n"
)


def cut(
    buffer: bytes | memoryview, begin: int = 0, size: int | None = None
) -> tuple[Table, int, int]:
    """Cut ``buffer[begin:size]``, which begins with a frame, into its whole frames.

    Returns:
        the frames; where the unfinished rest begins; the length of the unfinished frame, which is
        0 as long as its control line is not whole.

    Raises:
        ProtocolError: at some position stands what is no frame.
    """
    parts: list[Table] = []
    rows: list[_Row] = []
    runs: Runs | None = None
    scan: _Scan | None = None
    position, needed = begin, 0
    size = len(buffer) if size is None else size
    # How many frames are left is guessed from the first one, and again from every few: many small
    # frames may follow large ones.
    walked, window, window_begin = 0, 1, begin
    tried = found = 0
    while position < size:
        if scan is not None and (run := scan.run(position)) is not None:
            _flush(rows, parts)
            parts.append(run)
            position = int(run[1, -1])
            continue
        row = _walk(buffer, position, size)
        if isinstance(row, int):
            needed = row
            break
        walked += 1
        if walked == window and scan is None and runs is None:
            if (size - row[1]) * walked > _SCAN_PAYS * (row[1] - window_begin):
                if buffer[row[6] : row[6] + len(_ACK_PREFIX)] == _ACK_PREFIX:
                    runs = Runs(buffer, position, size)
                else:
                    scan = _Scan(buffer, row[1], size)
            walked, window, window_begin = 0, _WINDOW, row[1]
        if runs is not None and tried * _RUN_PAYS > found + 4 * _RUN_PAYS:
            runs, scan = None, _Scan(buffer, row[1], size)
        if runs is not None and row[2] != _CONTROL:
            tried += 1
            if (run := runs.read(row, FIELDS)) is not None:
                _flush(rows, parts)
                parts.append(run)
                position = int(run[1, -1])
                found += run.shape[1]
                continue
        rows.append(row)
        position = row[1]
    _flush(rows, parts)
    return _together(parts), position, needed


def _flush(rows: list[_Row], parts: list[Table]) -> None:
    if rows:
        parts.append(np.array(rows, dtype=np.int64).reshape(-1, FIELDS).T)
        rows.clear()


def _together(parts: list[Table]) -> Table:
    if len(parts) == 1 and parts[0].shape[0] == FIELDS + ACKS:
        return parts[0]
    table = np.full((FIELDS + ACKS, sum(part.shape[1] for part in parts)), -1, np.int64)
    begin = 0
    for part in parts:
        fields, count = part.shape
        table[:fields, begin : begin + count] = part
        begin += count
    return table


def _walk(buffer: bytes | memoryview, begin: int, size: int) -> _Row | int:
    """The frame at ``begin``; or, if it is not whole, its length (0: not known yet)."""
    header_length = 0
    if line := _MSG_LINE.match(buffer, begin, size):
        kind = _MSG
    elif line := _HMSG_LINE.match(buffer, begin, size):
        kind = _HMSG
        header_length = _number(line, 4, MAX_PAYLOAD)
    elif line := _CONTROL_LINE.match(buffer, begin, size):
        kind = _CONTROL
    else:
        if _LF.search(buffer, begin, min(begin + MAX_LINE, size)):
            raise ProtocolError(f"no NATS frame: {_shown(buffer, begin)}")
        if size - begin >= MAX_LINE:
            raise ProtocolError(
                f"a control line of more than {MAX_LINE} bytes: {_shown(buffer, begin)}"
            )
        return 0
    after = line.end()
    if after - begin > MAX_LINE:
        raise ProtocolError(
            f"a control line of more than {MAX_LINE} bytes: {_shown(buffer, begin)}"
        )
    if kind == _CONTROL:
        return (begin, after, kind, -1, begin, begin, begin, begin, begin, begin, begin)
    length = _number(line, kind + 3, MAX_PAYLOAD)
    if header_length > length:
        raise ProtocolError(f"more headers than bytes: {_shown(buffer, begin)}")
    sid = _number(line, 2, _MAX_INT64)
    end = after + length
    stop = end + 2
    if stop > size:
        return stop - begin
    if buffer[end:stop] != b"\r\n":
        raise ProtocolError(f"no CRLF after the payload: {_shown(buffer, begin)}")
    sid_end = line.end(2)
    reply_begin, reply_end = line.span(3) if line[3] is not None else (sid_end, sid_end)
    return (
        begin,
        stop,
        kind,
        sid,
        line.start(1),
        line.end(1),
        reply_begin,
        reply_end,
        after,
        after + header_length,
        end,
    )


def _number(line: re.Match[bytes], group: int, largest: int) -> int:
    digits = line[group]
    # int() of thousands of digits is refused by Python itself, with another error.
    if len(digits) > 100 or (value := int(digits)) > largest:
        raise ProtocolError(f"a number out of range: {_shown(line.string, line.start())}")
    return value


def _shown(buffer: bytes | memoryview, begin: int) -> str:
    line = bytes(buffer[begin : begin + 60]).partition(b"\r\n")[0]
    # INFO may hold a nonce, and a line that is none may hold anything: the start has to do.
    return repr(line[:4] if line.startswith(b"INFO") else line)


class _Scan:
    """All candidates of ``buffer[start:]``, ready to be followed as a chain."""

    def __init__(self, buffer: bytes | memoryview, start: int, size: int) -> None:
        self._table = _candidates(np.frombuffer(buffer, np.uint8, size), start)
        self._begin, stop = self._table[0], self._table[1]
        # The last of each run: the candidate that the next one does not adjoin.
        self._last = np.append(np.flatnonzero(self._begin[1:] != stop[:-1]), self._begin.size - 1)

    def run(self, position: int) -> Table | None:
        """The longest row of adjoining candidates that begins at ``position``, if there is one."""
        first = int(self._begin.searchsorted(position))
        if first == self._begin.size or self._begin[first] != position:
            return None
        last = int(self._last[self._last.searchsorted(first)])
        return self._table[:, first : last + 1]


def _candidates(data: NDArray[np.uint8], start: int) -> Table:
    """What looks like a whole MSG or HMSG frame in ``data[start:]``, in order of ``begin``."""
    marks = np.flatnonzero(data[start:] <= 32)
    marks += start
    mark = data[marks]
    # A line's marks are marks[first:feed + 1]; the last is its LF.
    feed = np.flatnonzero(mark == 10)
    first = np.empty_like(feed)
    first[:1] = 0
    first[1:] = feed[:-1] + 1
    count = feed - first
    # "MSG s 1 5\r" has 4 marks, with a reply 5; HMSG has one more.
    keep = np.flatnonzero((count >= 4) & (count <= 6))
    first, feed, count = first[keep], feed[keep], count[keep]
    word_end = marks[first]
    begin = marks[first - 1] + 1
    if first.size and first[0] == 0:
        begin[0] = start
    headers = word_end - begin - 3  # 0: MSG, 1: HMSG
    replies = count - headers - 4
    after = marks[feed] + 1
    keep = np.flatnonzero(
        (_joined(data, word_end, _WORD) == _WORD_VALUE)
        & (_joined(mark, first, _SECOND) == _SECOND_VALUE)
        & (_joined(mark, feed, _LAST) == _LAST_VALUE)
        & ((headers | replies) & ~1 == 0)
        & ((headers == 0) | (data[begin] == ord("H")))
        & (marks[feed - 1] == after - 2)
        & (after - begin <= MAX_LINE)
    )
    first, feed, begin, after = first[keep], feed[keep], begin[keep], after[keep]
    headers, replies, subject_begin = headers[keep], replies[keep], word_end[keep] + 1
    n = begin.size
    subject_end, sid_end, length_begin = marks[first + 1], marks[first + 2], marks[feed - 2]
    reply_end = marks[first + 2 + replies]
    reply_begin = sid_end + replies
    number, good = _numbers(
        data,
        np.concatenate((subject_end, length_begin)) + 1,
        np.concatenate((sid_end, marks[feed - 1])),
    )
    sid, length, good = number[:n], number[n:], good[:n] & good[n:]
    header_length = np.zeros(n, np.int64)
    if headers.any():
        with_headers = np.flatnonzero(headers)
        header_length[with_headers], number_good = _numbers(
            data, marks[feed - 3][with_headers] + 1, length_begin[with_headers]
        )
        good[with_headers] &= number_good
    end = after + length
    good &= subject_begin < subject_end
    good &= (replies == 0) | (reply_begin < reply_end)
    good &= header_length <= length
    good &= end + 2 <= data.size
    tail = np.minimum(end, data.size - 2)
    good &= (data[tail] == 13) & (data[tail + 1] == 10)
    table = np.empty((FIELDS, n), np.int64)
    table[0] = begin
    table[1] = end + 2
    table[2] = headers + 1
    table[3] = sid
    table[4] = subject_begin
    table[5] = subject_end
    table[6] = reply_begin
    table[7] = reply_end
    table[8] = after
    table[9] = after + header_length
    table[10] = end
    return table if good.all() else table[:, good]


def _joined(
    data: NDArray[np.uint8], at: NDArray[np.intp], around: NDArray[np.intp]
) -> NDArray[Any]:
    """The bytes ``around`` each position, as one integer: compared in one go."""
    together: NDArray[Any] = data[at[:, None] + around].view(f"u{around.size}")
    return together[:, 0]


def _as_integer(text: bytes) -> Any:
    return np.frombuffer(text, f"u{len(text)}")[0]


# What a line's bytes must be: its word, seen from the first mark; its second and third marks; and
# its last four marks, seen from the LF.
_WORD, _WORD_VALUE = np.arange(-3, 1), _as_integer(b"MSG ")
_SECOND, _SECOND_VALUE = np.arange(1, 3), _as_integer(b"  ")
_LAST, _LAST_VALUE = np.arange(-3, 1), _as_integer(b"  \r\n")


def _numbers(
    data: NDArray[np.uint8], begin: NDArray[np.int64], end: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The decimal numbers at ``data[begin:end]``, and which of them are such, of 1 to 10 digits."""
    width = end - begin
    good = (width >= 1) & (width <= _LENGTH_DIGITS)
    # Backwards from the last digit, so that row k counts 10**k in every number.
    power = np.arange(min(int(width.max(initial=1)), _LENGTH_DIGITS))[:, None]
    digits = data[end - 1 - power] - np.uint8(48)
    digits[power >= width] = 0
    good &= (digits <= 9).all(axis=0)
    return (digits * 10**power).sum(axis=0), good
