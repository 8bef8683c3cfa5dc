"""How far a range was read without a hole, so that what expires behind the reader is no loss.

A stream with a limit loses its oldest messages all the time, also while a range is read. That its
first sequence has moved on meanwhile proves nothing: what it passed may have been read before. So
the reader notes up to where it got every single sequence. Only when the stream now begins beyond
that can something have gone away unread; whether something was there, or only a hole that a deleted
message had left, nobody can say any more.
"""

from __future__ import annotations

import numpy as np


class Unbroken:
    """Follows the sequences that a reader gets, in growing order.

    Attributes:
        through: all sequences from ``first`` up to this one came; ``first - 1`` if none did.
    """

    def __init__(self, first: int) -> None:
        self.through = first - 1
        self._broken = False

    def add(self, sequences: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """The next sequences, growing, all later than those before."""
        if self._broken:
            return
        ahead = sequences[np.searchsorted(sequences, self.through + 1) :]
        expected = np.arange(self.through + 1, self.through + 1 + len(ahead))
        steps = int(np.argmin(np.append(ahead == expected, False)))
        self._broken = steps < len(ahead)
        self.through += steps
