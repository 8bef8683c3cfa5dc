"""``merge`` after failed batches and crashes of the query, and with concurrent writers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from nats_stream_source.delta import Deletes, Engine, conflicts, merge_changes
from nats_stream_source.delta.driver.log import DeltaLog
from nats_stream_source.errors import TableConflictError
from tests.integration.delta.merge_model import (
    ENGINES,
    SCHEMA,
    Entry,
    Frame,
    Merge,
    Model,
    by_driver,
    delete,
    every_engine,
    purge,
    put,
    spark_in_faults,
)
from tests.integration.delta.table_content import live, stored, version

pytestmark = pytest.mark.delta


@pytest.mark.parametrize("deletes", ["mark"])
@spark_in_faults
def test_batch_failure_leaves_table_unchanged(
    frame: Frame, table: Path, deletes: Deletes, merge: Merge
) -> None:
    merge(frame(put("a", 1)), str(table), deletes=deletes)
    rows, before = stored(table), version(table)
    batch = [put("a", 2), put("b", 3), delete("c", 4)]
    fails = F.when(F.col("revision") == 3, F.raise_error(F.lit("torn"))).otherwise(F.col("value"))
    with pytest.raises(Exception, match="torn"):
        merge(frame(*batch).withColumn("value", fails), str(table), deletes=deletes)
    assert (version(table), stored(table)) == (before, rows)
    merge(frame(*batch), str(table), deletes=deletes)
    model = Model(deletes)
    model.merge([put("a", 1), *batch])
    assert stored(table) == model.stored()


def test_batch_is_read_once_and_not_cached(spark: SparkSession, table: Path, merge: Merge) -> None:
    read = spark.sparkContext.accumulator(0)

    def counted(row: tuple[Any, ...]) -> tuple[Any, ...]:
        read.add(1)
        return row

    rows = [put(f"k{index}", index + 1).row() for index in range(10)]
    for _ in range(2):
        batch = spark.createDataFrame(spark.sparkContext.parallelize(rows, 2).map(counted), SCHEMA)
        merge(batch, str(table))
    assert read.value == 2 * len(rows)
    java: Any = spark._jsparkSession
    assert java.sharedState().cacheManager().isEmpty()


@every_engine
def test_query_crashes_and_restarts(
    spark: SparkSession,
    frame: Frame,
    table: Path,
    tmp_path: Path,
    next_engine: Callable[[], Engine],
) -> None:
    """`foreachBatch` calls the function in a clone of the session."""
    log = [put("a", 1), put("b", 2), delete("a", 3), put("c", 4), put("b", 5), purge("c", 6)]
    for index in range(3):
        part = tmp_path / "log" / f"part={index}"
        frame(*log[2 * index : 2 * index + 2]).coalesce(1).write.parquet(str(part))
        for file in part.iterdir():
            os.utime(file, (1_700_000_000 + index, 1_700_000_000 + index))
    functions = {name: merge_changes(str(table), engine=name) for name in ENGINES}
    crashes = iter(["before", "after", None, "before", "after"])

    def crashing(batch: DataFrame, batch_id: int) -> None:
        crash = next(crashes, None)
        if crash == "before":
            raise RuntimeError("crash")
        functions[next_engine()](batch, batch_id)
        if crash == "after":
            raise RuntimeError("crash")

    for _ in range(5):
        stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
        query = (
            stream.parquet(str(tmp_path / "log" / "*"))
            .writeStream.foreachBatch(crashing)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        try:
            query.awaitTermination()
        except Exception as error:
            assert "crash" in str(error)  # noqa: PT017 - another error fails the test
            continue
        break
    else:
        pytest.fail("the query did not finish in five attempts")
    assert next(crashes, "all") == "all"
    model = Model("remove")
    model.merge(log)
    assert stored(table) == model.stored()


@pytest.mark.faults
@pytest.mark.parametrize("engine", ["spark"], indirect=True)
def test_writers_concurrent(frame: Frame, table: Path, merge: Merge) -> None:
    """Each merge succeeds or raises a Delta conflict; no key has two rows."""
    merge(frame(), str(table))
    batches = [[put(key, revision) for key in "abc"] for revision in (1, 2, 3)]

    def write(batch: list[Entry]) -> int:
        try:
            merge(frame(*batch), str(table))
        except TableConflictError:
            return 0
        return batch[0].revision

    with ThreadPoolExecutor(3) as threads:
        newest = max(threads.map(write, batches))
    assert live(table) == dict.fromkeys("abc", newest)
    assert len(stored(table)) == 3


@pytest.mark.parametrize("deletion_vectors", [False, True])
@by_driver
def test_commit_of_other_writer_during_merge(
    frame: Frame,
    table: Path,
    merge: Merge,
    deletion_vectors: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each rewrites the row of key "z", and with it all others of the one file."""
    left = made = 0
    put_version = DeltaLog.put

    def put_after_a_commit(*arguments: Any) -> None:
        nonlocal left, made
        if left:
            left, made = left - 1, made + 1
            DeltaTable(table).update({"revision": f"{1000 + made}"}, predicate="key = 'z'")
        put_version(*arguments)

    monkeypatch.setattr(conflicts, "_LONGEST_WAIT", 0.01)
    merge(frame(put("z", 1), put("a", 1)), str(table), deletion_vectors=deletion_vectors)
    monkeypatch.setattr(DeltaLog, "put", put_after_a_commit)
    left = 3
    caplog.clear()  # the session's first query logs which settings it lacks
    merge(frame(put("a", 2), put("b", 3)), str(table))
    assert live(table) == {"a": 2, "b": 3, "z": 1003}
    assert sum("another writer changed" in one for one in caplog.messages) == 3

    left = 100
    with pytest.raises(TableConflictError, match="other writers committed during each of 10 att"):
        merge(frame(put("a", 4)), str(table))
    assert made == 3 + conflicts.ATTEMPTS
    assert [row["revision"] for row in stored(table)] == [2, 3, 1013]


@spark_in_faults
def test_table_deleted_and_created_is_found(frame: Frame, table: Path, merge: Merge) -> None:
    for revision in (1, 2):
        for key in "ab":
            merge(frame(put(key, revision)), str(table))
        assert live(table) == {"a": revision, "b": revision}
        shutil.rmtree(table)
