"""The table of frames: positions and numbers of many frames as columns of one array.

A frame is a column, a field is a row. So a field of all frames is one contiguous array, and a
selection of adjacent frames is a view.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

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
