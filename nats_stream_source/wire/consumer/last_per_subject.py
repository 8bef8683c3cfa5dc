"""Initial values of ``last_per_subject`` over several consumers: coverage, and rows that wait.

A rebuilt consumer starts its initial values again, so those of many subjects would hardly ever
arrive in one piece where frames are lost. Instead, all rows of all consumers are kept, together
with the ranges of stream sequences that they cover. Two deliveries with consecutive consumer
sequences cover the range between them: the consumer has no row in it. A later consumer has no new
row in a covered range either, because a message that is the last of its subject now was so before,
unless it is newer than the earlier consumer. So the initial values are complete once the covered
ranges adjoin from their start to their end.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from nats_stream_source.wire.consumer.deliveries import Deliveries


class Coverage:
    """Covered ranges ``(low, high]`` of stream sequences.

    Attributes:
        prefix: everything from the start up to this sequence is covered.
        last_row: the last row in it; the start without a row.
    """

    def __init__(self, start: int) -> None:
        self.prefix = start
        self.last_row = start
        # Disjoint, rising, beyond the prefix: low and high borders, last row.
        self._low: list[int] = []
        self._high: list[int] = []
        self._row: list[int] = []

    def missing(self, stream_seq: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these sequences, in rising order, are not covered."""
        beyond: NDArray[np.bool_] = stream_seq > self.prefix
        if self._low and beyond.any():
            index = np.searchsorted(np.array(self._low), stream_seq, side="left") - 1
            high = np.array(self._high)[np.maximum(index, 0)]
            beyond &= (index < 0) | (stream_seq > high)
        return beyond

    def add(self, low: int, high: int, row: int) -> bool:
        """Cover ``(low, high]``; returns whether any of it was not covered.

        Args:
            row: the last row in it, or ``low`` without a row.
        """
        if high <= self.prefix:
            return False
        if low <= self.prefix:
            self.prefix = high
            self.last_row = max(self.last_row, row)
            self._absorb()
            return True
        first = bisect_left(self._high, low)  # the first range that overlaps or adjoins
        if first < len(self._low) and self._low[first] <= low and high <= self._high[first]:
            return False
        stop = first
        while stop < len(self._low) and self._low[stop] <= high:
            low, high = min(low, self._low[stop]), max(high, self._high[stop])
            row = max(row, self._row[stop])
            stop += 1
        self._low[first:stop], self._high[first:stop], self._row[first:stop] = [low], [high], [row]
        return True

    def _absorb(self) -> None:
        """Join the ranges that the prefix has reached to it."""
        count = 0
        while count < len(self._low) and self._low[count] <= self.prefix:
            self.prefix = max(self.prefix, self._high[count])
            self.last_row = max(self.last_row, self._row[count])
            count += 1
        del self._low[:count], self._high[:count], self._row[:count]


class HeldRows:
    """Rows that wait for a missing row before them, in the order of arrival.

    Attributes:
        size: bytes of the rows and of their numbers.
    """

    def __init__(self) -> None:
        self.size = 0
        self._runs: list[Deliveries] = []

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def add(self, rows: Deliveries) -> None:
        """Hold ``rows``; none of their sequences is held already."""
        if len(rows):
            # Joined, so that a few rows do not keep the whole received block in memory.
            self._runs.append(Deliveries.join([rows]))
            self.size += rows.size

    def release(self, through: int) -> Deliveries:
        """Remove and return the rows up to the sequence ``through``, in rising order."""
        if not self._runs or min(int(run.stream_seq[0]) for run in self._runs) > through:
            return Deliveries.join([])
        rows = Deliveries.join(self._runs)
        order = np.argsort(rows.stream_seq, kind="stable")
        count = int(np.searchsorted(rows.stream_seq[order], through, side="right"))
        self._runs, self.size = [], 0
        self.add(rows.select(order[count:]))
        return Deliveries.join([rows.select(order[:count])])
