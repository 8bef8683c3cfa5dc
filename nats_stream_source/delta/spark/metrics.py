"""Metrics of the merges of a streaming query, where they are watched."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from nats_stream_source.delta.merge_result import MergeResult
from nats_stream_source.metrics.active import recorder
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
from nats_stream_source.spark.task_counts import QUERY_ID

if TYPE_CHECKING:
    from nats_stream_source.metrics.recorder import Recorder


def report_merge(spark: SparkSession, table: str, result: MergeResult) -> None:
    """Record a merge of a streaming query, if its metrics are watched."""
    active = recorder()
    if active is None:
        return
    with active.guarded():
        # The thread that runs the micro-batch has its query's id.
        query = spark.sparkContext.getLocalProperty(QUERY_ID)
        if query is not None:
            active.when_watched(query, _recording(active, table, result, time.time()))


def _recording(
    active: Recorder, table: str, result: MergeResult, now: float
) -> Callable[[str], None]:
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
