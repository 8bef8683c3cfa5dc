"""Find the frames of a buffer and their fields.

Theory of operation. Two ways agree on every input:

``parse_frame`` parses the frame at a position with a regular expression. It is the definition: it
accepts frames, raises :class:`ProtocolError` for other bytes, and only it detects unfinished
frames.

``_CandidateScan`` finds the MSG and HMSG frames of a whole buffer with some fifty numpy calls. The
positions of all bytes up to the space (its *marks*) include every space, CR and LF. A line may
start after each LF. The number of its marks determines the fields that a control line would have,
and the marks are the borders of the fields. Numbers are parsed from their last digit backwards, all
at once. A line that differs from the exact format of servers (one space between fields, a complete
payload followed by CRLF) is left out. So the scan never accepts what ``parse_frame`` rejects.

The scan returns *candidates*: a payload may contain ``\\r\\nMSG x 1 5\\r\\n``. A candidate is a
frame only if the frame before it ends where it starts, from the first byte of the buffer on.
``find_frames`` follows this chain, one run of adjacent candidates at a time. At a position without
a candidate (PING, INFO, an unusual line, the unfinished tail) it parses one frame.

A scan costs as much as parsing about ``_SCAN_PAYS`` single frames, and it is wasteful to read every
byte of a large payload. So ``find_frames`` parses single frames first, and scans the rest of the
buffer once the frames so far indicate that enough frames remain.

The deliveries of one consumer are so similar that a faster method finds them together with their
numbers: ``wire/delivery_scan.py``. Where other frames between them are too many for that, the scan
finds the rest.

Where the compiled scanner exists, it replaces both (``wire/scanner.py``) and calls ``parse_frame``
for unusual lines only.
"""

from __future__ import annotations

import re
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire import ascii_integers
from nats_stream_source.wire.delivery_scan import DeliveryScanner

Table: TypeAlias = NDArray[np.int64]
"""Frames as columns; the rows are the fields of :class:`~nats_stream_source.wire.frames.Frames`
after ``buffer``: begin, stop, kind, sid, subject_begin, subject_end, reply_begin, reply_end,
header_begin, payload_begin, payload_end; then the numbers of the ACK subject, -1 where they were
not parsed: delivered, stream_seq, consumer_seq, time, pending."""

FIELDS = 11
ACKS = ascii_integers.FIELDS
MAX_LINE = 1 << 20
"""Maximum length of a control line in bytes, with its CRLF. INFO has several KiB."""
MAX_PAYLOAD = (1 << 31) - 1
"""Maximum bytes of header block and payload; ``max_payload`` of a server is an int32."""

_CONTROL, _MSG, _HMSG = 0, 1, 2
_MAX_INT64 = (1 << 63) - 1
_SCAN_PAYS = 60
_RUN_PAYS = 60  # frames that a run must have on average
_ACK_PREFIX = b"$JS.ACK."
_WINDOW = 16
_LENGTH_DIGITS = 10
Row: TypeAlias = tuple[int, int, int, int, int, int, int, int, int, int, int]

# The lines that nats-py's parser accepts (nats/protocol/parser.py), limited to one line.
# Servers store subjects with any byte except blank, tab, CR and LF; \S would exclude VT and FF too.
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


def find_frames(
    buffer: bytes | memoryview, begin: int = 0, size: int | None = None
) -> tuple[Table, int, int]:
    """Find the complete frames of ``buffer[begin:size]``, which starts with a frame.

    Returns:
        the frames; the position of the unfinished tail; the length of the unfinished frame, 0 while
        its control line is incomplete.

    Raises:
        ProtocolError: the bytes at some position are not a frame.
    """
    parts: list[Table] = []
    rows: list[Row] = []
    runs: DeliveryScanner | None = None
    scan: _CandidateScan | None = None
    position, needed = begin, 0
    size = len(buffer) if size is None else size
    # The number of remaining frames is estimated from the first frame, and again from each window
    # of frames: many small frames may follow large ones.
    parsed, window, window_begin = 0, 1, begin
    tried = in_runs = 0
    while position < size:
        if scan is not None and (run := scan.run(position)) is not None:
            _flush(rows, parts)
            parts.append(run)
            position = int(run[1, -1])
            continue
        row = parse_frame(buffer, position, size)
        if isinstance(row, int):
            needed = row
            break
        parsed += 1
        if parsed == window and scan is None and runs is None:
            if (size - row[1]) * parsed > _SCAN_PAYS * (row[1] - window_begin):
                if buffer[row[6] : row[6] + len(_ACK_PREFIX)] == _ACK_PREFIX:
                    runs = DeliveryScanner(buffer, position, size)
                else:
                    scan = _CandidateScan(buffer, row[1], size)
            parsed, window, window_begin = 0, _WINDOW, row[1]
        if runs is not None and tried * _RUN_PAYS > in_runs + 4 * _RUN_PAYS:
            runs, scan = None, _CandidateScan(buffer, row[1], size)
        if runs is not None and row[2] != _CONTROL:
            tried += 1
            if (run := runs.read(row, FIELDS)) is not None:
                _flush(rows, parts)
                parts.append(run)
                position = int(run[1, -1])
                in_runs += run.shape[1]
                continue
        rows.append(row)
        position = row[1]
    _flush(rows, parts)
    return _concatenate(parts), position, needed


def _flush(rows: list[Row], parts: list[Table]) -> None:
    if rows:
        parts.append(np.array(rows, dtype=np.int64).reshape(-1, FIELDS).T)
        rows.clear()


def _concatenate(parts: list[Table]) -> Table:
    if len(parts) == 1 and parts[0].shape[0] == FIELDS + ACKS:
        return parts[0]
    table = np.full((FIELDS + ACKS, sum(part.shape[1] for part in parts)), -1, np.int64)
    begin = 0
    for part in parts:
        fields, count = part.shape
        table[:fields, begin : begin + count] = part
        begin += count
    return table


def parse_frame(buffer: bytes | memoryview, begin: int, size: int) -> Row | int:
    """Parse the frame at ``begin`` of ``buffer[:size]``: the definition of a frame.

    Returns:
        the first FIELDS fields of a :data:`Table`; the length in bytes of an incomplete frame, 0
        while its control line is incomplete.

    Raises:
        ProtocolError: the bytes at ``begin`` are not a frame.
    """
    header_length = 0
    if line := _MSG_LINE.match(buffer, begin, size):
        kind = _MSG
    elif line := _HMSG_LINE.match(buffer, begin, size):
        kind = _HMSG
        header_length = _limited_number(line, 4, MAX_PAYLOAD)
    elif line := _CONTROL_LINE.match(buffer, begin, size):
        kind = _CONTROL
    else:
        if _LF.search(buffer, begin, min(begin + MAX_LINE, size)):
            raise ProtocolError(
                f"invalid NATS frame: unknown control line {_excerpt(buffer, begin)}"
            )
        if size - begin >= MAX_LINE:
            raise ProtocolError(
                f"invalid NATS frame: control line {_excerpt(buffer, begin)} is longer than "
                f"{MAX_LINE} bytes"
            )
        return 0
    after = line.end()
    if after - begin > MAX_LINE:
        raise ProtocolError(
            f"invalid NATS frame: control line {_excerpt(buffer, begin)} is longer than "
            f"{MAX_LINE} bytes"
        )
    if kind == _CONTROL:
        return (begin, after, kind, -1, begin, begin, begin, begin, begin, begin, begin)
    length = _limited_number(line, kind + 3, MAX_PAYLOAD)
    if header_length > length:
        raise ProtocolError(
            f"invalid NATS frame: more header bytes than total bytes in {_excerpt(buffer, begin)}"
        )
    sid = _limited_number(line, 2, _MAX_INT64)
    end = after + length
    stop = end + 2
    if stop > size:
        return stop - begin
    if buffer[end:stop] != b"\r\n":
        raise ProtocolError(
            f"invalid NATS frame: no CRLF after the payload of {_excerpt(buffer, begin)}"
        )
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


def _limited_number(line: re.Match[bytes], group: int, largest: int) -> int:
    digits = line[group]
    # Python's int() raises another error for thousands of digits.
    if len(digits) > 100 or (value := int(digits)) > largest:
        raise ProtocolError(
            f"invalid NATS frame: number out of range in {_excerpt(line.string, line.start())}"
        )
    return value


def _excerpt(buffer: bytes | memoryview, begin: int) -> str:
    line = bytes(buffer[begin : begin + 60]).partition(b"\r\n")[0]
    # INFO may contain a nonce, and an invalid line any bytes: only the start is shown.
    return repr(line[:4] if line.startswith(b"INFO") else line)


class _CandidateScan:
    """All candidates of ``buffer[start:]``, and the runs of adjacent candidates."""

    def __init__(self, buffer: bytes | memoryview, start: int, size: int) -> None:
        self._table = _candidates(np.frombuffer(buffer, np.uint8, size), start)
        self._begin, stop = self._table[0], self._table[1]
        # The last candidate of each run: the next one is not adjacent to it.
        self._last = np.append(np.flatnonzero(self._begin[1:] != stop[:-1]), self._begin.size - 1)

    def run(self, position: int) -> Table | None:
        """Return the longest run of adjacent candidates that starts at ``position``, or None."""
        first = int(self._begin.searchsorted(position))
        if first == self._begin.size or self._begin[first] != position:
            return None
        last = int(self._last[self._last.searchsorted(first)])
        return self._table[:, first : last + 1]


def _candidates(data: NDArray[np.uint8], start: int) -> Table:
    """Return all candidates for MSG and HMSG frames in ``data[start:]``, in order of ``begin``."""
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
        (_bytes_around(data, word_end, _WORD) == _WORD_VALUE)
        & (_bytes_around(mark, first, _SECOND) == _SECOND_VALUE)
        & (_bytes_around(mark, feed, _LAST) == _LAST_VALUE)
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
    number, good = _parse_numbers(
        data,
        np.concatenate((subject_end, length_begin)) + 1,
        np.concatenate((sid_end, marks[feed - 1])),
    )
    sid, length, good = number[:n], number[n:], good[:n] & good[n:]
    header_length = np.zeros(n, np.int64)
    if headers.any():
        with_headers = np.flatnonzero(headers)
        header_length[with_headers], number_good = _parse_numbers(
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


def _bytes_around(
    data: NDArray[np.uint8], at: NDArray[np.intp], around: NDArray[np.intp]
) -> NDArray[Any]:
    """Return the bytes ``around`` each position as one integer, for a single comparison."""
    selected: NDArray[Any] = data[at[:, None] + around].view(f"u{around.size}")
    return selected[:, 0]


def _as_integer(text: bytes) -> Any:
    return np.frombuffer(text, f"u{len(text)}")[0]


# The required bytes of a line: its keyword, relative to the first mark; its second and third marks;
# its last four marks, relative to the LF.
_WORD, _WORD_VALUE = np.arange(-3, 1), _as_integer(b"MSG ")
_SECOND, _SECOND_VALUE = np.arange(1, 3), _as_integer(b"  ")
_LAST, _LAST_VALUE = np.arange(-3, 1), _as_integer(b"  \r\n")


def _parse_numbers(
    data: NDArray[np.uint8], begin: NDArray[np.int64], end: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Parse the numbers at ``data[begin:end]``; also return which have 1 to 10 digits."""
    width = end - begin
    good = (width >= 1) & (width <= _LENGTH_DIGITS)
    # Backwards from the last digit, so that row k has the weight 10**k in every number.
    power = np.arange(min(int(width.max(initial=1)), _LENGTH_DIGITS))[:, None]
    digits = data[end - 1 - power] - np.uint8(48)
    digits[power >= width] = 0
    good &= (digits <= 9).all(axis=0)
    return (digits * 10**power).sum(axis=0), good
