"""Memory for received bytes and their frames that is used again.

A block of 4 MiB and the table of its frames live for a few milliseconds. The C library returns such
large pieces to the operating system, and each new one is paged in again: one page fault per 4 KiB,
a sixth of the reader's CPU at 128 bytes per message.

Theory of operation. An array of a pool is a view of a bytearray. When the array and all views of it
are gone, a weak reference returns the bytearray to the pool. NumPy lets the views of an array refer
to that array and not to the bytearray, since the latter is not an array: so the array lives as long
as any of its views, and a piece in use is never returned.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_MAX_EXCESS = 4  # a piece is not used for an array of less than 1 / _MAX_EXCESS of its size

A = TypeVar("A", bound=NDArray[Any])


class BufferPool:
    """Arrays in memory that is used again.

    Args:
        keep: the maximum number of unused pieces.
    """

    __slots__ = ("_unused",)

    def __init__(self, keep: int = 2) -> None:
        self._unused: deque[bytearray] = deque(maxlen=keep)

    def block(self, nbytes: int) -> NDArray[np.uint8]:
        """Return an array of ``nbytes`` bytes with any content."""
        piece = self._piece(nbytes)
        return self._returned(np.ndarray((nbytes,), np.uint8, piece), piece)

    def table(self, rows: int, columns: int) -> NDArray[np.int64]:
        """Return an array of ``rows`` rows and at least ``columns`` columns with any content."""
        size = rows * np.dtype(np.int64).itemsize
        piece = self._piece(size * columns)
        return self._returned(np.ndarray((rows, len(piece) // size), np.int64, piece), piece)

    def _piece(self, nbytes: int) -> bytearray:
        # An array may end, and append its piece, at any moment: also in another thread.
        with contextlib.suppress(IndexError):
            while True:
                piece = self._unused.pop()  # the last one: caches may still have it
                if nbytes <= len(piece) <= nbytes * _MAX_EXCESS:
                    return piece
        return bytearray(nbytes)

    def _returned(self, array: A, piece: bytearray) -> A:
        weakref.finalize(array, self._unused.append, piece).atexit = False
        return array
