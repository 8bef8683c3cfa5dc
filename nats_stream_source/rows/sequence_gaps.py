"""Messages that aged out while they were read: the sequences that a reader did not receive.

A stream with a limit removes its oldest messages continuously, also while a range is read. A first
sequence that has advanced meanwhile is not a loss: the removed messages may have been read before.
So :class:`SequenceGapTracker` records the sequences that were not received. Those below the
stream's present first sequence either aged out unread, or were a gap that a deleted message had
left; the two cannot be distinguished afterwards. At the start of a query the history is accepted as
it is: messages removed before its first message are not a loss.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MAX_GAPS = 100_000  # above, gaps are merged into one; their number of sequences stays exact


class SequenceGapTracker:
    """Tracks the sequences that a reader receives, in increasing order.

    Args:
        first: the first required sequence.
        expiry_allowed_through: messages up to here may be missing before the first received one.
    """

    def __init__(self, first: int, expiry_allowed_through: int = 0) -> None:
        self._next = first
        self._expiry_allowed_through = expiry_allowed_through
        self._gaps: list[NDArray[np.int64]] = []  # rows of (first, last, number of sequences)
        self._gap_count = 0

    @property
    def has_gaps(self) -> bool:
        """Whether a sequence before a received one was not received."""
        return self._gap_count > 0

    def add(self, sequences: NDArray[np.int64]) -> None:
        """Record the next sequences: increasing, and higher than all recorded ones."""
        ahead = sequences[np.searchsorted(sequences, self._next) :]
        if not len(ahead):
            return
        self._next = max(self._next, min(int(ahead[0]), self._expiry_allowed_through + 1))
        self._expiry_allowed_through = 0
        last = int(ahead[-1])
        if last - self._next == len(ahead) - 1:  # increasing, so nothing is missing
            self._next = last + 1
            return
        before = np.concatenate(([self._next - 1], ahead[:-1]))
        holes = np.flatnonzero(ahead - before > 1)
        if len(holes):
            begin, end = before[holes] + 1, ahead[holes] - 1
            self._record(np.column_stack((begin, end, end - begin + 1)))
        self._next = last + 1

    def _record(self, gaps: NDArray[np.int64]) -> None:
        self._gaps.append(gaps)
        self._gap_count += len(gaps)
        if self._gap_count > _MAX_GAPS:
            every = np.concatenate(self._gaps)
            self._gaps = [np.array([[every[0, 0], every[-1, 1], every[:, 2].sum()]])]
            self._gap_count = 1

    def aged_out(self, first_seq: int, end: int) -> tuple[int, int, int] | None:
        """The sequences up to ``end`` that were not received and are not available; None if none.

        Args:
            first_seq: the stream's present first sequence.

        Returns:
            The first and the last of these sequences, and their number.
        """
        last_removed = min(first_seq - 1, end)
        rest = max(self._next, self._expiry_allowed_through + 1)
        gaps = np.concatenate((*self._gaps, [[rest, last_removed, last_removed - rest + 1]]))
        gaps = gaps[gaps[:, 0] <= last_removed]
        if not len(gaps):
            return None
        last = min(int(gaps[-1, 1]), last_removed)
        gaps[-1, 2] = min(gaps[-1, 2], last - gaps[-1, 0] + 1)
        return int(gaps[0, 0]), last, int(gaps[:, 2].sum())
