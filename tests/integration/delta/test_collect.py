"""How a batch of Spark reaches the driver: as it is, reduced by the executors, or in parts."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from nats_stream_source.delta.rules.arguments import ChangeRules
from nats_stream_source.delta.rules.events import EventBatch
from nats_stream_source.delta.spark import batch as batches
from nats_stream_source.delta.spark.batch import Collector, batch_of

pytestmark = pytest.mark.delta

_ORDER = ("timestamp_seconds(0) AS stream_created", "'PUT' AS operation")
_RULES = ChangeRules.of(keys=["id"], sequence_by="n", apply_as_deletes="op = 'd'")
_Events = list[tuple[float, int, str]]


def _batch(spark: SparkSession, rows: int, keys: int, value: str = "'v'") -> DataFrame:
    """Entries of ``keys`` keys with the revisions 0 to ``rows``, in two partitions."""
    return spark.range(0, rows, 1, 2).selectExpr(
        f"concat('k', id % {keys}) AS key", "id AS revision", f"{value} AS value", *_ORDER
    )


def _parts(events: EventBatch) -> list[pa.Table]:
    return list(events.source.parts(events.shape))


def _collect(collector: Collector, batch: DataFrame) -> tuple[dict[str, int], int]:
    """The newest revisions by key, and the number of Spark's jobs that read the batch."""
    context = batch.sparkSession.sparkContext
    group = f"collect-{uuid.uuid4()}"  # the id of an object is used again
    context.setJobGroup(group, group)
    try:
        (rows,) = _parts(batch_of(batch, ChangeRules.of(), collector))
        jobs = len(context.statusTracker().getJobIdsForGroup(group))
    finally:
        context._jsc.clearJobGroup()
    newest: dict[str, int] = {}
    for key, revision in zip(
        *(rows[name].to_pylist() for name in ("key", "revision")), strict=True
    ):
        newest[key] = max(revision, newest.get(key, -1))
    return newest, jobs


def _newest(rows: int, keys: int) -> dict[str, int]:
    return {f"k{id % keys}": id for id in range(rows)}


def test_batches_of_query_small_large_and_small(spark: SparkSession) -> None:
    """Only a batch that outgrows the last one is read twice, and every result is the same."""
    collector = Collector()
    seen = []
    for rows in (0, 100, 0, 100, 25_000, 100, 100):
        few = collector.few
        found, jobs = _collect(collector, _batch(spark, rows, 50))
        assert found == _newest(rows, 50)
        seen.append((few > 0, jobs))
    assert [few for few, _ in seen] == [False, False, True, True, True, False, True]
    reduced, few, again = seen[1][1], seen[3][1], seen[4][1]
    assert again == few + reduced


def test_large_values_after_small_batch_lower_limit(spark: SparkSession) -> None:
    """The limit of rows follows the size of the rows, so that the driver's memory is bounded."""
    collector = Collector()
    _collect(collector, _batch(spark, 100, 50))
    assert collector.few == 10_000
    _collect(collector, _batch(spark, 100, 50, "repeat('x', 40000)"))
    assert 100 < collector.few < 250
    _collect(collector, _batch(spark, 100, 100, "repeat('x', 200000)"))
    assert collector.few == 0


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound of two rows, which each batch of the tests exceeds."""
    monkeypatch.setattr(batches, "MAX_ROWS", 2)


@pytest.fixture
def persisted(spark: SparkSession) -> Callable[[], int]:
    """Function that returns how many DataFrames of the test are persisted."""
    known = len(spark.sparkContext._jsc.getPersistentRDDs())
    return lambda: len(spark.sparkContext._jsc.getPersistentRDDs()) - known


def _events(spark: SparkSession, *rows: tuple[float | None, int | None, str]) -> EventBatch:
    """Events in two partitions, half of them in each."""
    frame = spark.createDataFrame(list(rows), "id double, n int, op string")
    assert frame.select(F.spark_partition_id()).distinct().count() == 2
    return batch_of(frame, _RULES, Collector())


_PUTS: _Events = [(float(id), 1, "u") for id in range(6)]
_DELETES: _Events = [(-0.0 if id == 0 else float(id), 2, "d") for id in range(6)]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.usefixtures("bound")
def test_batch_beyond_bound_has_events_of_key_in_one_part(
    spark: SparkSession, reverse: bool, persisted: Callable[[], int]
) -> None:
    """Put and delete of a key are in two partitions, and -0.0 is the key 0.0."""
    partitions = (_DELETES, _PUTS) if reverse else (_PUTS, _DELETES)
    events = _events(spark, *partitions[0], *partitions[1])
    found: dict[float, set[int]] = {}
    parts = 0
    for part in events.source.parts(events.shape):
        assert persisted() == 1
        parts += 1
        ids = {abs(id) for id in part["id"].to_pylist()}
        assert not ids & found.keys()
        for id, n in zip(part["id"].to_pylist(), part["n"].to_pylist(), strict=True):
            found.setdefault(abs(id), set()).add(n)
    assert parts == 6
    assert found == {float(id): {1, 2} for id in range(6)}
    assert persisted() == 0


@pytest.mark.usefixtures("bound")
def test_batch_beyond_bound_is_released_after_failure(
    spark: SparkSession, persisted: Callable[[], int]
) -> None:
    events = _events(spark, *_PUTS, *_DELETES)
    parts = events.source.parts(events.shape)
    next(parts)
    assert persisted() == 1
    parts.close()  # type: ignore[attr-defined]  # as the end of a merge that failed does
    assert persisted() == 0


@pytest.mark.usefixtures("bound")
def test_query_after_batch_beyond_bound_collects_again_in_one_part(spark: SparkSession) -> None:
    events = _events(spark, *_PUTS, *_DELETES)
    collector = Collector()
    assert len(list(collector.parts(events.source.frame, events.shape.layout))) == 6  # type: ignore[attr-defined]
    assert collector.large
    small = spark.createDataFrame([(1.0, 1, "u")], "id double, n int, op string")
    events = batch_of(small, _RULES, collector)
    assert [len(part) for part in _parts(events)] == [1]
    assert not collector.large


def test_executor_collects_groups_of_bounded_bytes(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition is reduced group by group, and the driver has the newest of all groups."""
    collector = Collector()
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
    monkeypatch.setattr(batches, "_GROUP_BYTES", 1000)
    try:
        assert _collect(collector, _batch(spark, 2_000, 20))[0] == _newest(2_000, 20)
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
