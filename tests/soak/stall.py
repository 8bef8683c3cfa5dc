"""A query that hangs: it lives, there is something to read, and nothing is read.

Only the time counts in which that is the query's own doing: its driver lives and has its session,
all servers run, and writes were acknowledged since the query's last micro-batch. Even so a busy
machine may take minutes for one, so the limit is far beyond that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

LIMIT = 240.0
"""Seconds without a micro-batch."""

_MOST = 10.0  # seconds that count between two looks: whoever looks is kept waiting, too


class Stall:
    """Looks at the queries now and then.

    Attributes:
        found: which query stalled, in words, once for each time.
    """

    def __init__(self, queries: Iterable[str], limit: float = LIMIT) -> None:
        self._limit = limit
        self._at: float | None = None
        self._batches = dict.fromkeys(queries, 0)
        self._acked = dict.fromkeys(self._batches, 0)  # as of the last micro-batch
        self._waited = dict.fromkeys(self._batches, 0.0)
        self.found: list[str] = []

    def look(
        self,
        now: float,
        batches: Mapping[str, int],
        acked: Mapping[str, int],
        *,
        ready: bool,
        stopped: Collection[str] = (),
    ) -> None:
        """Take note of how things stand.

        Args:
            now: seconds of any clock that goes on.
            batches: how many micro-batches each query has ended.
            acked: how many writes are acknowledged of what each query reads.
            ready: whether the driver and the servers are as they should be.
            stopped: queries that have stopped for good.
        """
        passed = 0.0 if self._at is None else min(now - self._at, _MOST)
        self._at = now
        for query, known in self._batches.items():
            count = batches.get(query, 0)
            if count != known or query in stopped:
                self._batches[query] = count
                self._acked[query] = acked.get(query, 0)
                self._waited[query] = 0.0
            elif ready and acked.get(query, 0) > self._acked[query]:
                before, self._waited[query] = self._waited[query], self._waited[query] + passed
                if before < self._limit <= self._waited[query]:
                    self.found.append(
                        f"{query}: no micro-batch after number {count} for {self._limit:g} s, "
                        f"{acked[query] - self._acked[query]} writes acknowledged meanwhile"
                    )
