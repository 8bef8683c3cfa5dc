"""Pieces of the received bytes as Arrow arrays, without a Python object for each.

Theory of operation. The borders of one field, ``begin[0], end[0], begin[1], end[1], ...``, never
fall, so they are the offsets of an Arrow binary array that lies over the received bytes
themselves. Its even elements are the field, its odd ones the bytes between; ``take`` of the even
ones copies the field of all frames into an array of its own.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nats_stream_source.wire.frames import Buffer, Frames

_MAX_BYTES = (1 << 31) - 1  # the offsets of Arrow's binary and string are int32


def in_order(frames: Frames) -> Frames:
    """The frames, such that their positions rise and can be offsets of an Arrow array.

    Raises:
        OverflowError: they have more than 2 GiB.
    """
    if len(frames.buffer) <= _MAX_BYTES and (frames.begin[1:] >= frames.stop[:-1]).all():
        return frames
    if frames.nbytes > _MAX_BYTES:
        raise OverflowError(
            f"{len(frames)} frames of {frames.nbytes} bytes do not fit into one Arrow array, "
            f"which holds {_MAX_BYTES}: build columns of fewer frames"
        )
    return Frames.join([frames])


def slices(
    buffer: Buffer, begin: NDArray[np.int64], end: NDArray[np.int64], kind: pa.DataType
) -> pa.Array:
    """``buffer[begin[i]:end[i]]`` for each i, as an array of ``kind`` (binary or string).

    The positions must rise, as those of :func:`in_order` do.
    """
    n = begin.size
    if not n:
        return pa.array([], kind)
    borders = np.empty(2 * n, np.int32)
    borders[0::2] = begin
    borders[1::2] = end
    over = pa.Array.from_buffers(
        kind, 2 * n - 1, [None, pa.py_buffer(borders), pa.py_buffer(buffer)]
    )
    return over.take(pa.array(np.arange(0, 2 * n, 2)))
