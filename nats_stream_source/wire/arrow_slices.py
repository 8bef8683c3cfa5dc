"""Slices of the received bytes as Arrow arrays and numbers, without an object for each slice.

Theory of operation. Where it is selected (``framing/scanner.py``), ``compiled_slices`` copies the
slices into the memory of a new array, in one pass. Otherwise Arrow does: the positions of one
field, ``begin[0], end[0], begin[1], end[1], ...``, never decrease. So they are the offsets of an
Arrow binary array over the received bytes. Its even elements are the field, its odd elements the
bytes in between. ``take`` of the even elements copies the field of all frames into a new array.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nats_stream_source.wire.framing import scanner
from nats_stream_source.wire.framing.frames import Buffer, Frames

Positions: TypeAlias = NDArray[np.int64]

_MAX_BYTES = (1 << 31) - 1  # the offsets of Arrow's binary and string types are int32
_MAX_DIGITS = 18  # each number of so many digits fits into a signed 64-bit integer


def bytes_at(buffer: Buffer, begin: Positions, width: int) -> NDArray[Any]:
    """Return a new array whose elements are the ``width`` bytes from each position on."""
    # An array over the buffer with overlapping elements: element i starts at byte i.
    overlapping: NDArray[Any] = np.ndarray((len(buffer) - width + 1,), f"V{width}", buffer, 0, (1,))
    result: NDArray[Any] = overlapping[begin]
    return result


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
    buffer: Buffer, begin: Positions, end: Positions, data_type: pa.DataType, prefix: bytes = b""
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
        column = _copied(buffer, begin, end, data_type, prefix)
    else:
        column = _taken(buffer, begin, end, data_type, prefix)
    if column is None:
        raise ValueError(f"could not remove prefix: a slice does not start with {prefix!r}")
    return column


def _copied(
    buffer: Buffer, begin: Positions, end: Positions, data_type: pa.DataType, prefix: bytes
) -> pa.Array | None:
    n = begin.size
    offsets = np.empty(n + 1, np.int32)
    # Arrow keeps freed memory. The C library returns large pieces: each array would page it in.
    data = pa.allocate_buffer(max(int(end.sum() - begin.sum()) - n * len(prefix), 0))
    target = np.frombuffer(data, np.uint8)
    begin, end = np.ascontiguousarray(begin), np.ascontiguousarray(end)
    if scanner.compiled_slices.copy(buffer, begin, end, prefix, offsets, target) < n:
        return None
    return pa.Array.from_buffers(data_type, n, [None, pa.py_buffer(offsets), data], null_count=0)


def _taken(
    buffer: Buffer, begin: Positions, end: Positions, data_type: pa.DataType, prefix: bytes
) -> pa.Array | None:
    import pyarrow.compute as pc

    n = begin.size
    offsets = np.empty(2 * n, np.int32)
    offsets[0::2] = begin
    offsets[1::2] = end
    overlay = pa.Array.from_buffers(
        pa.binary(), 2 * n - 1, [None, pa.py_buffer(offsets), pa.py_buffer(buffer)]
    )
    column = overlay.take(pa.array(np.arange(0, 2 * n, 2)))
    if prefix:
        if pc.starts_with(column, prefix).false_count:
            return None
        column = pc.replace_substring(column, prefix, b"", max_replacements=1)
    return column.view(data_type)


def numbers(buffer: Buffer, begin: Positions, end: Positions) -> Positions:
    """Parse the decimal numbers ``buffer[begin[i]:end[i]]``, of at most 18 digits; -1 for others.

    Args:
        begin, end: as of :func:`slices`; an ``end`` before its ``begin`` is not a number.
    """
    # Deferred import: it takes 20 ms at the start of a query, and planners do not need it.
    import pyarrow.compute as pc

    text = slices(buffer, np.minimum(begin, end), end, pa.string())
    good = pc.ascii_is_decimal(text).to_numpy(zero_copy_only=False) & (end - begin <= _MAX_DIGITS)
    if not good.all():
        text = pc.if_else(pa.array(good), text, "-1")
    parsed: Positions = text.cast(pa.int64()).to_numpy()
    return parsed
