"""Slices of the received bytes as Arrow arrays, without a Python object for each slice.

Theory of operation. Where it is selected (``framing/scanner.py``), ``compiled_slices`` copies the
slices into the memory of a new array, in one pass. Otherwise Arrow does: the positions of one
field, ``begin[0], end[0], begin[1], end[1], ...``, never decrease. So they are the offsets of an
Arrow binary array over the received bytes. Its even elements are the field, its odd elements the
bytes in between. ``take`` of the even elements copies the field of all frames into a new array.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nats_stream_source.wire.ascii_integers import bytes_at
from nats_stream_source.wire.framing import scanner
from nats_stream_source.wire.framing.frames import Buffer, Frames

_MAX_BYTES = (1 << 31) - 1  # the offsets of Arrow's binary and string types are int32


def in_order(frames: Frames) -> Frames:
    """Return the frames with rising positions, which can be offsets of an Arrow array.

    Raises:
        OverflowError: the frames have more than 2 GiB.
    """
    if len(frames.buffer) <= _MAX_BYTES and (
        frames.adjacent or (frames.begin[1:] >= frames.stop[:-1]).all()
    ):
        return frames
    if frames.nbytes > _MAX_BYTES:
        raise OverflowError(
            f"could not build Arrow array: {len(frames)} frames have {frames.nbytes} bytes, "
            f"expected at most {_MAX_BYTES}; build columns of fewer frames"
        )
    return Frames.join([frames])


def slices(
    buffer: Buffer,
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    data_type: pa.DataType,
    prefix: bytes = b"",
) -> pa.Array:
    """Return ``buffer[begin[i]:end[i]]`` for each i as an array.

    Args:
        begin, end: positions, which must rise, as those of :func:`in_order` do.
        data_type: binary or string.
        prefix: a prefix of every slice; the returned slices are without it.

    Raises:
        ValueError: a slice does not start with ``prefix``.
    """
    if not begin.size:
        return pa.array([], data_type)
    if scanner.selected() == "compiled":
        return _copied(buffer, begin, end, data_type, prefix)
    return _taken(buffer, _after_prefix(buffer, begin, end, prefix), end, data_type)


def _copied(
    buffer: Buffer,
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    data_type: pa.DataType,
    prefix: bytes,
) -> pa.Array:
    n = begin.size
    offsets = np.empty(n + 1, np.int32)
    # Arrow keeps freed memory. The C library returns large pieces: each array would page it in.
    data = pa.allocate_buffer(max(int(end.sum() - begin.sum()) - n * len(prefix), 0))
    target = np.frombuffer(data, np.uint8)
    begin, end = np.ascontiguousarray(begin), np.ascontiguousarray(end)
    if scanner.compiled_slices.copy(buffer, begin, end, prefix, offsets, target) < n:
        raise _prefix_error(prefix)
    return pa.Array.from_buffers(data_type, n, [None, pa.py_buffer(offsets), data], null_count=0)


def _taken(
    buffer: Buffer, begin: NDArray[np.int64], end: NDArray[np.int64], data_type: pa.DataType
) -> pa.Array:
    n = begin.size
    offsets = np.empty(2 * n, np.int32)
    offsets[0::2] = begin
    offsets[1::2] = end
    overlay = pa.Array.from_buffers(
        data_type, 2 * n - 1, [None, pa.py_buffer(offsets), pa.py_buffer(buffer)]
    )
    return overlay.take(pa.array(np.arange(0, 2 * n, 2)))


def _after_prefix(
    buffer: Buffer, begin: NDArray[np.int64], end: NDArray[np.int64], prefix: bytes
) -> NDArray[np.int64]:
    """Return the positions after ``prefix``, with which every slice must start."""
    if not prefix:
        return begin
    if not (end - begin >= len(prefix)).all() or (
        bytes_at(buffer, begin, len(prefix)).tobytes() != prefix * begin.size
    ):
        raise _prefix_error(prefix)
    return begin + len(prefix)


def _prefix_error(prefix: bytes) -> ValueError:
    return ValueError(f"could not remove prefix: a slice does not start with {prefix!r}")
