"""Slices of the received bytes as Arrow arrays, without a Python object for each slice.

Theory of operation. The positions of one field, ``begin[0], end[0], begin[1], end[1], ...``, never
decrease. So they are the offsets of an Arrow binary array over the received bytes. Its even
elements are the field, its odd elements the bytes in between. ``take`` of the even elements copies
the field of all frames into a new array.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nats_stream_source.wire.frames import Buffer, Frames

_MAX_BYTES = (1 << 31) - 1  # the offsets of Arrow's binary and string types are int32


def in_order(frames: Frames) -> Frames:
    """Return the frames with rising positions, which can be offsets of an Arrow array.

    Raises:
        OverflowError: the frames have more than 2 GiB.
    """
    if len(frames.buffer) <= _MAX_BYTES and (frames.begin[1:] >= frames.stop[:-1]).all():
        return frames
    if frames.nbytes > _MAX_BYTES:
        raise OverflowError(
            f"could not build Arrow array: {len(frames)} frames have {frames.nbytes} bytes, "
            f"expected at most {_MAX_BYTES}; build columns of fewer frames"
        )
    return Frames.join([frames])


def slices(
    buffer: Buffer, begin: NDArray[np.int64], end: NDArray[np.int64], data_type: pa.DataType
) -> pa.Array:
    """Return ``buffer[begin[i]:end[i]]`` for each i as an array.

    ``data_type`` is binary or string. The positions must rise, as those of :func:`in_order` do.
    """
    n = begin.size
    if not n:
        return pa.array([], data_type)
    offsets = np.empty(2 * n, np.int32)
    offsets[0::2] = begin
    offsets[1::2] = end
    overlay = pa.Array.from_buffers(
        data_type, 2 * n - 1, [None, pa.py_buffer(offsets), pa.py_buffer(buffer)]
    )
    return overlay.take(pa.array(np.arange(0, 2 * n, 2)))
