"""Which sequences of a range did not come, so that what expires behind the reader is no loss.

A stream with a limit loses its oldest messages all the time, also while a range is read. That its
first sequence has moved on meanwhile proves nothing: what it passed may have been read before. So
the reader notes what did not come. Where the stream now begins beyond that, it went away unread; or
it was only a hole that a deleted message had left, which nobody can tell any more.

Where a query begins, history reaches back as far as it does: what goes before its first message is
no loss.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MOST_GAPS = 100_000  # then they are told as one, and their number is still right


class Unbroken:
    """Follows the sequences that a reader gets, in growing order.

    Args:
        first: the first sequence that is wanted.
        history_through: what goes up to here before the first message came is no loss.
    """

    def __init__(self, first: int, history_through: int = 0) -> None:
        self._next = first
        self._history_through = history_through
        self._gaps: list[NDArray[np.int64]] = []  # of (first, last, how many)
        self._noted = 0

    def add(self, sequences: NDArray[np.int64]) -> None:
        """The next sequences, growing, all later than those before."""
        ahead = sequences[np.searchsorted(sequences, self._next) :]
        if not len(ahead):
            return
        self._next = max(self._next, min(int(ahead[0]), self._history_through + 1))
        self._history_through = 0
        before = np.concatenate(([self._next - 1], ahead[:-1]))
        holes = np.flatnonzero(ahead - before > 1)
        if len(holes):
            first, last = before[holes] + 1, ahead[holes] - 1
            self._note(np.column_stack((first, last, last - first + 1)))
        self._next = int(ahead[-1]) + 1

    def _note(self, gaps: NDArray[np.int64]) -> None:
        self._gaps.append(gaps)
        self._noted += len(gaps)
        if self._noted > _MOST_GAPS:
            every = np.concatenate(self._gaps)
            self._gaps = [np.array([[every[0, 0], every[-1, 1], every[:, 2].sum()]])]
            self._noted = 1

    def gone(self, first_seq: int, end: int) -> tuple[int, int, int] | None:
        """What did not come and cannot any more, of all up to ``end``; None if nothing.

        Args:
            first_seq: where the stream begins now.

        Returns:
            The first and the last sequence of it, and how many did not come.
        """
        most = min(first_seq - 1, end)
        rest = max(self._next, self._history_through + 1)
        gaps = np.concatenate((*self._gaps, [[rest, most, most - rest + 1]]))
        gaps = gaps[gaps[:, 0] <= most]
        if not len(gaps):
            return None
        last = min(int(gaps[-1, 1]), most)
        gaps[-1, 2] = min(gaps[-1, 2], last - gaps[-1, 0] + 1)
        return int(gaps[0, 0]), last, int(gaps[:, 2].sum())
