"""Metrics of the merges of a streaming query, where they are watched."""

from __future__ import annotations

from pyspark.sql import SparkSession

from nats_stream_source.delta.merge_metrics import merge_metrics
from nats_stream_source.delta.merge_result import MergeResult
from nats_stream_source.metrics import recorder
from nats_stream_source.spark.task_counts import QUERY_ID


def report_merge(spark: SparkSession, table: str, result: MergeResult) -> None:
    """Record a merge of a streaming query, if its metrics are watched."""
    active = recorder()
    if active is None:
        return
    with active.guarded():
        # The thread that runs the micro-batch has its query's id.
        query = spark.sparkContext.getLocalProperty(QUERY_ID)
        if query is not None:
            active.when_watched(query, merge_metrics(active, table, result))
