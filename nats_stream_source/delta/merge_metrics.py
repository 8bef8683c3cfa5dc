"""The figures of a merge as metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from nats_stream_source.delta.merge_result import MergeResult
from nats_stream_source.metrics.table import (
    CHANGED_BYTES,
    COMPACTED,
    COMPACTIONS,
    CONTRADICTIONS,
    FILES,
    FRESHNESS,
    INDEX_BYTES,
    INDEX_KEYS,
    MERGED_ROWS,
    MERGES,
    NEWEST,
    VACUUMED,
    WRITTEN_BYTES,
)

if TYPE_CHECKING:
    from nats_stream_source.metrics.recorder import Recorder


def merge_metrics(active: Recorder, table: str, result: MergeResult) -> Callable[[str], None]:
    """Return a function that records a merge which has just ended for a query by its label."""
    now = time.time()

    def record(query: str) -> None:
        active.add(MERGES, 1, query, table, result.engine)
        for change in ("inserted", "updated", "deleted"):
            active.add(MERGED_ROWS, getattr(result, change), query, table, change)
        if result.newest is not None:
            newest = result.newest.timestamp()
            active.observe(FRESHNESS, max(0.0, now - newest), query, table)
            active.set(NEWEST, newest, query, table)
        done = result.maintained
        for metric, amount in (
            (CONTRADICTIONS, result.contradictions),
            (CHANGED_BYTES, result.changed_bytes),
            (WRITTEN_BYTES, result.written_bytes),
            (COMPACTED, done.compacted),
            (COMPACTIONS, done.written),
            (VACUUMED, done.deleted),
        ):
            if amount is not None:
                active.add(metric, amount, query, table)
        if result.files is not None:
            active.set(FILES, result.files, query, table)
        if result.engine == "driver":
            active.set(INDEX_KEYS, result.index_keys, query, table)
            active.set(INDEX_BYTES, result.index_bytes, query, table)

    return record
