"""Merges after failures, beside concurrent writers, and while keys vanish from the bucket."""

from __future__ import annotations

import base64
import itertools
import os
import random
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession, functions as F

from nats_stream_source.delta import Deletes, Engine, conflicts, merge_changes
from nats_stream_source.delta.compare_with_bucket import compare_with_bucket
from nats_stream_source.delta.driver.log import DeltaLog
from nats_stream_source.delta.rules.events import EventShape
from nats_stream_source.delta.rules.layout import ENTRY_SEQUENCE, SEQUENCE, Layout
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import TableConflictError
from nats_stream_source.jetstream.kv.codec import NO_CODEC
from nats_stream_source.options import CONNECTION, connection_settings, parse
from tests.integration.delta.driver.in_process import InProcessTable, arrow
from tests.integration.delta.merge_model import (
    ENGINES,
    SCHEMA,
    Bucket,
    Entry,
    Frame,
    Merge,
    Model,
    Reconciled,
    both_modes,
    by_driver,
    delete,
    every_engine,
    live,
    purge,
    put,
    spark_in_faults,
    stored,
    version,
)
from tests.support.delta import ENTRIES
from tests.support.nats import buckets

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


@every_engine
@both_modes
def test_random_interleavings_with_keys_that_vanish(
    frame: Frame,
    table: Path,
    bucket: Bucket,
    reconciled: Reconciled,
    deletes: Deletes,
    merge: Merge,
) -> None:
    rng = random.Random(3)
    unread: list[Entry] = []
    values: dict[str, int] = {}
    removed = 0
    for _ in range(2):
        wanted = [
            (rng.choice("abcdefghijkl"), rng.choice(["PUT", "PUT", "PUT", "DEL", "PURGE"]))
            for _ in range(15)
        ]
        written = bucket.write(*wanted)
        unread += written
        for entry in written:
            if entry.operation == "PUT":
                values[entry.key] = entry.revision
            else:
                values.pop(entry.key, None)
        read = rng.randrange(len(unread)) + 1
        merge(frame(*unread[:read]), str(table), deletes=deletes)
        unread = unread[read:]
        gone = rng.sample(sorted(values), 2)
        bucket.purge_subjects(*gone)
        for key in gone:
            del values[key]
        removed += reconciled(deletes=deletes).removed
        # No row of a missing key stays, and no live key that the query has read is lost.
        behind = {entry.key for entry in unread}
        assert live(table).keys() <= values.keys()
        assert live(table).keys() >= values.keys() - behind
    merge(frame(*unread), str(table), deletes=deletes)
    reconciled(deletes=deletes)
    assert live(table) == values
    assert removed


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["remove", "mark", "history"])
def test_random_interleavings_with_revisions_that_vanish(
    table: Path, shared_server: NatsServer, kind: str, seed: int
) -> None:
    """Newest revisions vanish, so that older ones are current again, also of unread entries."""
    rng = random.Random(seed)
    bucket = Bucket(shared_server.url, f"vanish-{kind}-{seed}").create(deny_delete=False)
    settings = connection_settings(parse({"servers": bucket.url}, CONNECTION))
    merged = InProcessTable(table, "mark" if kind == "mark" else "remove")
    replaced = 0

    def merge(entries: Sequence[Entry]) -> None:
        if kind == "history":
            columns = ENTRIES.names
            layout = Layout(2, ("bucket", "key"), ENTRY_SEQUENCE, (SEQUENCE,), "remove", True)
            shape = EventShape(ENTRIES, layout, ("value",), frozenset(columns), computed=True)
            merged.merge_events(arrow(entries), shape)
        else:
            merged.merge(*entries)

    def reconciled() -> int:
        result = compare_with_bucket(merged.table, bucket.name, settings, NO_CODEC, merged.deletes)
        assert not result.changed
        return result.replaced

    unread: list[Entry] = []
    for step in range(8):
        for number in range(rng.randrange(1, 6)):
            written = (rng.choice("abcd"), rng.choice(["PUT", "PUT", "PUT", "DEL"]))
            unread += bucket.write(written, value=f"{step}.{number}".encode())
        for key in rng.sample("abcd", 2):
            last = bucket.last(key)
            if last is not None and not last.get("hdrs"):
                request = {"seq": last["seq"]}
                buckets.api(bucket.url, f"STREAM.MSG.DELETE.KV_{bucket.name}", request)
        read = rng.randrange(len(unread) + 1)
        merge(unread[:read])
        unread = unread[read:]
        replaced += reconciled() if table.exists() else 0
    merge(unread)
    replaced += reconciled()
    assert replaced
    assert reconciled() == 0
    last_of = {key: bucket.last(key) for key in "abcd"}
    current = {
        key: (last["seq"], base64.b64decode(last["data"]))
        for key, last in last_of.items()
        if last is not None and not last.get("hdrs")
    }
    rows = [row for row in stored(table) if not (row.get("deleted") or row.get("__END_AT"))]
    assert {row["key"]: (row["revision"], row["value"]) for row in rows} == current
    assert len(rows) == len(current)
    if kind == "history":
        bounds = sorted(
            (
                row["key"],
                row["__START_AT"]["revision"],
                row["__END_AT"] and row["__END_AT"]["revision"],
            )
            for row in stored(table)
        )
        for (key, _, end), (following, start, _) in itertools.pairwise(bounds):
            assert key != following or (end is not None and end <= start)
