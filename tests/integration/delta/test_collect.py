"""How the driver collects a batch: reduced by the executors, or as it is after a small batch."""

from __future__ import annotations

import uuid

import pytest
from pyspark.sql import DataFrame, SparkSession

from nats_stream_source.delta.driver.collect import BatchCollector
from nats_stream_source.delta.limits import NO_LIMITS, LimitCheck

pytestmark = pytest.mark.delta

_ORDER = ("timestamp_seconds(0) AS stream_created", "'PUT' AS operation")


def _batch(spark: SparkSession, rows: int, keys: int, value: str = "'v'") -> DataFrame:
    """Entries of ``keys`` keys with the revisions 0 to ``rows``, in two partitions."""
    return spark.range(0, rows, 1, 2).selectExpr(
        f"concat('k', id % {keys}) AS key", "id AS revision", f"{value} AS value", *_ORDER
    )


def _collect(collector: BatchCollector, batch: DataFrame) -> tuple[dict[str, int], int]:
    """The revisions by key, and the number of Spark's jobs that read the batch."""
    context = batch.sparkSession.sparkContext
    group = f"collect-{uuid.uuid4()}"  # the id of an object is used again
    context.setJobGroup(group, group)
    try:
        newest = collector.newest(batch, ["key"], LimitCheck(NO_LIMITS))
        jobs = len(context.statusTracker().getJobIdsForGroup(group))
    finally:
        context._jsc.clearJobGroup()
    return dict(zip(newest["key"].to_pylist(), newest["revision"].to_pylist(), strict=True)), jobs


def _newest(rows: int, keys: int) -> dict[str, int]:
    return {f"k{id % keys}": id for id in range(rows)}


def _few(collector: BatchCollector) -> int:
    return int(repr(collector).rpartition("few=")[2].rstrip(">"))


def test_batches_of_query_small_large_and_small(spark: SparkSession) -> None:
    """Only a batch that outgrows the last one is read twice, and every result is the same."""
    collector = BatchCollector()
    seen = []
    for rows in (100, 100, 25_000, 100, 100):
        few = _few(collector)
        found, jobs = _collect(collector, _batch(spark, rows, 50))
        assert found == _newest(rows, 50)
        seen.append((rows, few > 0, few > 0 and rows > few, jobs))
    assert [one[:3] for one in seen] == [
        (100, False, False),
        (100, True, False),
        (25_000, True, True),
        (100, False, False),
        (100, True, False),
    ]
    reduced, few, again = seen[0][3], seen[1][3], seen[2][3]
    assert again == few + reduced


def test_large_values_after_small_batch_lower_limit(spark: SparkSession) -> None:
    """The limit of rows follows the size of the rows, so that the driver's memory is bounded."""
    collector = BatchCollector()
    _collect(collector, _batch(spark, 100, 50))
    assert _few(collector) == 10_000
    _collect(collector, _batch(spark, 100, 50, "repeat('x', 40000)"))
    assert 100 < _few(collector) < 250
    _collect(collector, _batch(spark, 100, 100, "repeat('x', 200000)"))
    assert _few(collector) == 0


def test_empty_batch_keeps_limit(spark: SparkSession) -> None:
    collector = BatchCollector()
    assert _collect(collector, _batch(spark, 0, 1))[0] == {}
    assert _few(collector) == 0
    _collect(collector, _batch(spark, 10, 5))
    assert _collect(collector, _batch(spark, 0, 1))[0] == {}
    assert _few(collector) == 10_000
