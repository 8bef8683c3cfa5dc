"""Slices of the received bytes as Arrow arrays and numbers.

Where it is selected (``framing/scanner.py``), ``compiled_slices`` copies the slices into the memory
of a new array, in one pass and without an object for each.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nats_stream_source.wire.framing import scanner
from nats_stream_source.wire.framing.frames import Buffer

Positions: TypeAlias = NDArray[np.int64]

_MAX_BYTES = (1 << 31) - 1  # the offsets of Arrow's binary and string types are int32
_MAX_DIGITS = 18  # each number of so many digits fits into a signed 64-bit integer


def bytes_at(buffer: Buffer, begin: Positions, width: int) -> NDArray[Any]:
    """Return a new array whose elements are the ``width`` bytes from each position on."""
    # An array over the buffer with overlapping elements: element i starts at byte i.
    overlapping: NDArray[Any] = np.ndarray((len(buffer) - width + 1,), f"V{width}", buffer, 0, (1,))
    result: NDArray[Any] = overlapping[begin]
    return result


def slices(
    buffer: Buffer, begin: Positions, end: Positions, data_type: pa.DataType, prefix: bytes = b""
) -> pa.Array:
    """Return ``buffer[begin[i]:end[i]]`` for each i as an array.

    Args:
        data_type: binary or string.
        prefix: a prefix of every slice; the returned slices are without it.

    Raises:
        ValueError: a slice does not start with ``prefix``.
        OverflowError: the slices have more than 2 GiB.
    """
    n = begin.size
    size = int(end.sum() - begin.sum()) - n * len(prefix)
    if size > _MAX_BYTES:
        raise OverflowError(
            f"could not build Arrow array: {n} slices have {size} bytes, expected at most "
            f"{_MAX_BYTES}; build columns of fewer frames"
        )
    if scanner.selected() == "python":
        received = bytes(buffer)  # slices of bytes are cheaper
        found = [received[b:e] for b, e in zip(begin.tolist(), end.tolist(), strict=True)]
        if not prefix or all(one.startswith(prefix) for one in found):
            stripped = [one[len(prefix) :] for one in found] if prefix else found
            return pa.array(stripped, pa.binary()).view(data_type)
    else:
        offsets = np.empty(n + 1, np.int32)
        # Arrow keeps freed memory. The C library returns large pieces: each array would page it in.
        data = pa.allocate_buffer(max(size, 0))
        target = np.frombuffer(data, np.uint8)
        begin, end = np.ascontiguousarray(begin), np.ascontiguousarray(end)
        if scanner.compiled_slices.copy(buffer, begin, end, prefix, offsets, target) == n:
            buffers = [None, pa.py_buffer(offsets), data]
            return pa.Array.from_buffers(data_type, n, buffers, null_count=0)
    raise ValueError(f"could not remove prefix: a slice does not start with {prefix!r}")


def numbers(buffer: Buffer, begin: Positions, end: Positions) -> Positions:
    """Parse the decimal numbers ``buffer[begin[i]:end[i]]``, of at most 18 digits; -1 for others.

    An ``end`` before its ``begin`` is not a number.
    """
    # Deferred import: it takes 20 ms at the start of a query, and planners do not need it.
    import pyarrow.compute as pc

    text = slices(buffer, np.minimum(begin, end), end, pa.string())
    good = pc.ascii_is_decimal(text).to_numpy(zero_copy_only=False) & (end - begin <= _MAX_DIGITS)
    if not good.all():
        text = pc.if_else(pa.array(good), text, "-1")
    parsed: Positions = text.cast(pa.int64()).to_numpy()
    return parsed
