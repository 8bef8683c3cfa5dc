"""The longest holes in what came of a range: where something may be missing. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Holes:
    """Follows the sequences that a reader gets, and keeps the longest runs that did not come.

    Args:
        start: the first hole may begin after it.
        most: how many are kept.
    """

    def __init__(self, start: int, most: int) -> None:
        self._last = start
        self._most = most
        self._kept = np.zeros((0, 2), np.int64)  # first and last sequence of each

    def __repr__(self) -> str:
        return f"<Holes {len(self._kept)} up to {self._last}>"

    def add(self, sequences: NDArray[np.int64]) -> None:
        """The next sequences: growing, and all later than those before."""
        if not len(sequences):
            return
        before = np.concatenate(([self._last], sequences[:-1]))
        ends = np.flatnonzero(sequences - before > 1)
        self._last = int(sequences[-1])
        if len(ends):
            self._keep(np.column_stack((before[ends] + 1, sequences[ends] - 1)))

    def longest(self, end: int) -> list[tuple[int, int]]:
        """The first and the last sequence of each, in order, where the range ends at ``end``."""
        if self._last < end:
            self._keep(np.array([[self._last + 1, end]]))
            self._last = end
        return [(first, last) for first, last in sorted(self._kept.tolist())]

    def _keep(self, holes: NDArray[np.int64]) -> None:
        every = np.concatenate((self._kept, holes))
        if len(every) > self._most:
            every = every[np.argpartition(every[:, 0] - every[:, 1], self._most - 1)[: self._most]]
        self._kept = every
