"""Types of the compiled scanner (``compiled_scan.pyx``)."""

import numpy as np
from numpy.typing import NDArray

FIELDS: dict[str, int]

def in_sequence(
    sid: NDArray[np.int64],
    delivered: NDArray[np.int64],
    stream_seq: NDArray[np.int64],
    consumer_seq: NDArray[np.int64],
) -> bool:
    """Return whether frames are consecutive deliveries of one consumer; see ``scanner``.

    Args:
        sid, delivered, stream_seq, consumer_seq: rows of ``parse.Field``, contiguous.

    Raises:
        ValueError: the rows have different lengths.
    """

def scan(
    buffer: bytes | memoryview, begin: int, size: int, table: NDArray[np.int64], count: int
) -> tuple[int, int, int]:
    """Find frames of ``buffer[begin:size]`` and append them to ``table`` from column ``count`` on.

    Args:
        buffer: a block that starts with a frame at ``begin``, in bytes.
        table: the columns of ``parse.Field``, contiguous.

    Returns:
        the number of columns with frames; the position after the last frame; the length of the
        unfinished frame there, or 0. With 0, either the table is full, or ``size`` was reached, or
        the bytes at the position are not a frame that this function accepts.

    Raises:
        ValueError: the positions are not within the buffer, or the table has another shape.
    """
