"""A 64-bit checksum of each element of a column.

Message ids contain it, so that a row whose content differs when a task is repeated is not taken for
the row that is stored. It is not a cryptographic hash: CRC-32 and Adler-32, which zlib computes as
fast as memory is read.
"""

from __future__ import annotations

from zlib import adler32, crc32

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

_MIX, _SHIFT = np.uint64(0xBF58476D1CE4E5B9), np.uint64(29)


def hash_column(column: pa.Array) -> Hashes:
    """One hash per element of a ``pa.binary()`` or ``pa.string()`` column; null hashes as empty."""
    values = column.cast(pa.binary()).fill_null(b"").to_pylist()
    return np.fromiter((crc32(v) << 32 | adler32(v) for v in values), np.uint64, len(values))


def combine(first: Hashes, second: Hashes) -> Hashes:
    """The hashes of pairs of elements; the order of the two matters."""
    mixed: Hashes = first * _MIX + second
    mixed = (mixed ^ (mixed >> _SHIFT)) * _MIX
    mixed ^= mixed >> _SHIFT
    return mixed
