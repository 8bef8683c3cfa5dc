"""Detects stalled queries: they run and messages are pending, but they do not finish a micro-batch.

The detector counts only time for which the query is responsible: its driver runs and has its
session, all servers run, and writes were acknowledged since the query's last micro-batch. On a busy
machine a micro-batch may still take minutes, so the limit is far above that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

LIMIT = 240.0
"""Seconds without a micro-batch."""

_MAX_STEP = 10.0  # seconds that count between two updates: the observer may be delayed too


class StallDetector:
    """Finds stalled queries from periodic updates.

    Attributes:
        stalls: a text for each stalled query, once per stall.
    """

    def __init__(self, queries: Iterable[str], limit: float = LIMIT) -> None:
        self._limit = limit
        self._updated_at: float | None = None
        self._batches = dict.fromkeys(queries, 0)
        self._acked = dict.fromkeys(self._batches, 0)  # as of the last micro-batch
        self._waited = dict.fromkeys(self._batches, 0.0)
        self.stalls: list[str] = []

    def update(
        self,
        now: float,
        batches: Mapping[str, int],
        acked: Mapping[str, int],
        *,
        ready: bool,
        stopped: Collection[str] = (),
    ) -> None:
        """Record the current state.

        Args:
            now: seconds of a monotonic clock.
            batches: by query, how many micro-batches it has finished.
            acked: by query, how many writes to its source are acknowledged.
            ready: whether the driver and all servers run.
            stopped: queries that stopped for data loss.
        """
        elapsed = 0.0 if self._updated_at is None else min(now - self._updated_at, _MAX_STEP)
        self._updated_at = now
        for query, previous in self._batches.items():
            count = batches.get(query, 0)
            if count != previous or query in stopped:
                self._batches[query] = count
                self._acked[query] = acked.get(query, 0)
                self._waited[query] = 0.0
            elif ready and acked.get(query, 0) > self._acked[query]:
                before, self._waited[query] = self._waited[query], self._waited[query] + elapsed
                if before < self._limit <= self._waited[query]:
                    self.stalls.append(
                        f"{query}: no micro-batch after number {count} for {self._limit:g} s, "
                        f"{acked[query] - self._acked[query]} writes acknowledged meanwhile"
                    )
