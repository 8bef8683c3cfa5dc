"""Find the frames of a buffer: the definition.

``parse_frame`` parses the frame at a position with regular expressions. It accepts frames, raises
:class:`ProtocolError` for other bytes, and detects unfinished frames. ``find_frames`` follows the
frames of a buffer, each of which begins where the one before it stops.

The frames of a buffer are a table of positions and numbers. A frame is a column, a field is a row:
so a field of all frames is one contiguous array, and a selection of adjacent frames is a view.

The compiled scanner (``compiled_scan.pyx``) finds the same frames, and calls ``parse_frame`` for
unusual lines.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from nats_stream_source.errors import ProtocolError

Table: TypeAlias = NDArray[np.int64]
"""Frames as columns; the rows are the fields of :class:`Field`."""


class Field(IntEnum):
    """A row of the table; ``compiled_scan`` has the same numbers.

    Positions are those of bytes in the frames' buffer. The numbers of the ACK subject are -1 where
    they were not parsed with the frame.
    """

    BEGIN = 0
    STOP = 1
    KIND = 2
    SID = 3
    SUBJECT_BEGIN = 4
    SUBJECT_END = 5
    REPLY_BEGIN = 6
    REPLY_END = 7
    HEADER_BEGIN = 8
    PAYLOAD_BEGIN = 9
    PAYLOAD_END = 10
    DELIVERED = 11
    STREAM_SEQ = 12
    CONSUMER_SEQ = 13
    TIME = 14
    PENDING = 15


class FrameKind(IntEnum):
    """Kind of a frame: a message without or with a header block, or any other frame."""

    CONTROL = 0
    MSG = 1
    HMSG = 2


ACK = slice(Field.DELIVERED, Field.PENDING + 1)
"""The rows with the numbers of the ACK subject."""

NOT_PARSED = -1
"""A number of the ACK subject that was not parsed with the frame."""

POSITIONS = [
    field for field in Field if field < Field.DELIVERED and field not in (Field.KIND, Field.SID)
]
"""The rows that are positions."""

MAX_LINE = 1 << 20
"""Maximum length of a control line in bytes, with its CRLF. INFO has several KiB."""
MAX_PAYLOAD = (1 << 31) - 1
"""Maximum bytes of header block and payload; ``max_payload`` of a server is an int32."""

_MAX_INT64 = (1 << 63) - 1
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

    The numbers of ACK subjects are not parsed.

    Returns:
        the frames; the position of the unfinished tail; the length of the unfinished frame, 0 while
        its control line is incomplete.

    Raises:
        ProtocolError: the bytes at some position are not a frame.
    """
    size = len(buffer) if size is None else size
    rows: list[Row] = []
    position, needed = begin, 0
    while position < size:
        row = parse_frame(buffer, position, size)
        if isinstance(row, int):
            needed = row
            break
        rows.append(row)
        position = row[Field.STOP]
    table = np.full((len(Field), len(rows)), NOT_PARSED, np.int64)
    if rows:
        table[: Field.DELIVERED] = np.array(rows, np.int64).T
    return table, position, needed


def parse_frame(buffer: bytes | memoryview, begin: int, size: int) -> Row | int:
    """Parse the frame at ``begin`` of ``buffer[:size]``: the definition of a frame.

    Returns:
        the fields of :class:`Field` up to PAYLOAD_END; the length in bytes of an incomplete frame,
        0 while its control line is incomplete.

    Raises:
        ProtocolError: the bytes at ``begin`` are not a frame.
    """
    header_length = 0
    if line := _MSG_LINE.match(buffer, begin, size):
        kind = FrameKind.MSG
    elif line := _HMSG_LINE.match(buffer, begin, size):
        kind = FrameKind.HMSG
        header_length = _limited_number(line, 4, MAX_PAYLOAD)
    elif line := _CONTROL_LINE.match(buffer, begin, size):
        kind = FrameKind.CONTROL
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
    if kind == FrameKind.CONTROL:
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
