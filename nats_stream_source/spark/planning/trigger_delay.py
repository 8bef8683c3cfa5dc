"""How long a micro-batch waits for ``minRowsPerTrigger`` rows (``maxTriggerDelay``).

A query with ``minRowsPerTrigger`` reads nothing until so many rows are available, or until
``maxTriggerDelay`` seconds have passed since its last micro-batch. The first micro-batch of a run
does not wait, as with Spark's Kafka source (``minOffsetsPerTrigger``): a query that was stopped for
a while catches up at once. ``Trigger.AvailableNow`` and ``Trigger.Once`` do not wait either.
"""

from __future__ import annotations

from collections.abc import Callable


class TriggerDelay:
    """Decides whether the rows that are available make a micro-batch.

    Args:
        min_rows: ``minRowsPerTrigger``; None if the query does not wait.
        max_delay: ``maxTriggerDelay``, seconds.
        clock: the time in seconds.
    """

    def __init__(self, min_rows: int | None, max_delay: float, clock: Callable[[], float]) -> None:
        self._min_rows = min_rows
        self._max_delay = max_delay
        self._clock = clock
        self._last_trigger: float | None = None

    def is_due(self, rows: int) -> bool:
        """Whether a micro-batch with ``rows`` available rows begins now."""
        if self._min_rows is None or rows >= self._min_rows or self._last_trigger is None:
            return True
        return self._clock() - self._last_trigger >= self._max_delay

    def record(self) -> None:
        """Record that a micro-batch begins."""
        if self._min_rows is not None:
            self._last_trigger = self._clock()
