"""CDC into Delta tables, against a plain-Python model, read back with the package `deltalake`.

An entry is written short: ``put("a", 3)`` is the PUT of key a at revision 3. What a table must hold
is computed by :class:`Model`, which knows nothing of Spark.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import os
import random
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import buckets
import pytest
from delta.exceptions import (
    ConcurrentAppendException,
    ConcurrentDeleteDeleteException,
    ConcurrentDeleteReadException,
)
from delta.tables import DeltaTable as DeltaLake
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from nats_stream_source.delta import (
    Deletes,
    ReconcileResult,
    changes,
    merge,
    merge_changes,
    reconcile,
)
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    BucketNotFoundError,
    ConfigurationError,
    DataLossError,
    InvalidNameError,
    OptionError,
)
from nats_stream_source.jetstream.times import nanoseconds

pytestmark = pytest.mark.delta

SCHEMA = (
    "bucket STRING, key STRING, value BINARY, revision BIGINT, created TIMESTAMP, "
    "operation STRING, delta BIGINT, initial BOOLEAN, stream_created TIMESTAMP"
)
MADE = datetime(2026, 1, 1, 0, 0, 0, 123456, tzinfo=timezone.utc)
MADE_ANEW = MADE + timedelta(microseconds=1)

# Delta's conflicts have no class in common.
CONFLICTS = (
    ConcurrentAppendException,
    ConcurrentDeleteDeleteException,
    ConcurrentDeleteReadException,
)

both_modes = pytest.mark.parametrize("deletes", ["remove", "mark"])


@dataclasses.dataclass(frozen=True)
class Entry:
    key: str
    revision: int
    operation: str
    value: bytes | None
    stream_created: datetime = MADE
    bucket: str = "fleet"

    @property
    def order(self) -> tuple[datetime, int]:
        return (self.stream_created, self.revision)

    @property
    def created(self) -> datetime:
        return self.stream_created + timedelta(seconds=self.revision)

    def row(self) -> tuple[Any, ...]:
        return (
            self.bucket,
            self.key,
            self.value,
            self.revision,
            self.created,
            self.operation,
            random.randrange(1000),  # `delta` differs with every delivery
            random.random() < 0.5,  # and so does `initial`
            self.stream_created,
        )

    def stored(self, deletes: Deletes) -> dict[str, Any]:
        row = dataclasses.asdict(self) | {"created": self.created}
        return row | ({"deleted": self.operation != "PUT"} if deletes == "mark" else {})


def put(key: str, revision: int, made: datetime = MADE, **fields: Any) -> Entry:
    value = f"{key}@{revision}".encode()
    return dataclasses.replace(Entry(key, revision, "PUT", value, made), **fields)


def delete(key: str, revision: int, made: datetime = MADE, operation: str = "DEL") -> Entry:
    return Entry(key, revision, operation, None, made)


def purge(key: str, revision: int, made: datetime = MADE) -> Entry:
    return delete(key, revision, made, "PURGE")


class Model:
    """What the table holds after these batches, by key."""

    def __init__(self, deletes: Deletes) -> None:
        self.deletes = deletes
        self.rows: dict[str, Entry] = {}

    def merge(self, batch: Iterable[Entry]) -> None:
        newest: dict[str, Entry] = {}
        for entry in sorted(batch, key=lambda entry: entry.order):
            newest[entry.key] = entry
        for key, entry in newest.items():
            if key in self.rows and self.rows[key].order >= entry.order:
                continue
            if entry.operation == "PUT" or self.deletes == "mark":
                self.rows[key] = entry
            else:
                self.rows.pop(key, None)

    def stored(self) -> list[dict[str, Any]]:
        rows = sorted(self.rows.values(), key=lambda entry: entry.key)
        return [entry.stored(self.deletes) for entry in rows]


def stored(table: Path | str) -> list[dict[str, Any]]:
    """The table's rows, read without Spark."""
    rows: list[dict[str, Any]] = DeltaTable(table).to_pyarrow_table().to_pylist()
    return sorted(rows, key=lambda row: (row.get("bucket") or "", row["key"]))


def version(table: Path) -> int:
    return DeltaTable(table).version()


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "fleet"


Frame = Callable[..., DataFrame]


@pytest.fixture
def frame(spark: SparkSession) -> Frame:
    def make(*entries: Entry) -> DataFrame:
        return spark.createDataFrame([entry.row() for entry in entries], SCHEMA)

    return make


# --- the rules, one after the other ---------------------------------------------------------


CASES: dict[str, list[list[Entry]]] = {
    "the newest entry of a batch wins, wherever it stands": [
        [put("a", 3), put("a", 1), put("a", 2), put("b", 4)]
    ],
    "an older entry does not overwrite": [[put("a", 5)], [put("a", 4), delete("b", 3)]],
    "an older marker does not remove": [[put("a", 5)], [delete("a", 4), purge("a", 3)]],
    "DEL and PURGE": [[put("a", 1), put("b", 2), put("c", 3)], [delete("a", 4), purge("b", 5)]],
    "put and deleted within one batch": [[put("a", 1), delete("a", 2)]],
    "deleted and put again within one batch": [[put("a", 1)], [delete("a", 2), put("a", 3)]],
    "a newer PUT clears a mark": [[put("a", 1)], [delete("a", 2)], [put("a", 3)]],
    "a marker of a key without a row": [[put("a", 1)], [delete("b", 2)]],
    "the same entry twice in a batch": [[put("a", 1), put("a", 1)], [put("a", 1)] * 2],
    "replay from an earlier sequence": [
        [put("a", 1), put("b", 2)],
        [delete("a", 3)],
        [put("a", 1), put("b", 2), delete("a", 3)],
    ],
    "a bucket made anew": [
        [put("a", 8), put("b", 9)],
        [put("a", 1, MADE_ANEW), delete("b", 2, MADE_ANEW)],
    ],
    "late entries of the bucket before": [[put("a", 1, MADE_ANEW)], [put("a", 9)]],
    "both buckets in one batch": [[put("a", 9), put("a", 1, MADE_ANEW), delete("b", 9)]],
    "metaOnly": [[put("a", 1, value=None)], [put("a", 2, value=None), delete("a", 3)]],
    "an empty value is not null": [[put("a", 1, value=b"")]],
}


@both_modes
def test_rules(frame: Frame, table: Path, deletes: Deletes) -> None:
    # A MERGE takes a second whatever is in it: the cases run side by side, each with its own keys.
    model = Model(deletes)
    for turn in range(max(map(len, CASES.values()))):
        batch = [
            dataclasses.replace(entry, key=f"{case}/{entry.key}")
            for case, batches in CASES.items()
            if turn < len(batches)
            for entry in batches[turn]
        ]
        merge(frame(*batch), str(table), deletes=deletes)
        model.merge(batch)
        assert stored(table) == model.stored()


@both_modes
def test_empty_batches(frame: Frame, table: Path, deletes: Deletes) -> None:
    for _ in range(2):
        merge(frame(), str(table), deletes=deletes)
        assert (version(table), stored(table)) == (0, [])
    names = DeltaTable(table).to_pyarrow_table().column_names
    assert set(names) == set(put("a", 1).stored(deletes))


def test_the_model_itself() -> None:
    # What the cases above mean, by hand, so that model and code are not wrong together.
    removed, marked = Model("remove"), Model("mark")
    for model in (removed, marked):
        model.merge([put("a", 1), put("a", 3), put("b", 2)])
        model.merge([delete("a", 4), put("b", 1), delete("c", 5)])
    assert list(removed.rows.values()) == [put("b", 2)]
    assert list(marked.rows.values()) == [delete("a", 4), put("b", 2), delete("c", 5)]


@both_modes
def test_the_same_batch_again_makes_no_version(frame: Frame, table: Path, deletes: Deletes) -> None:
    batch = [put("a", 1), put("b", 2), delete("a", 3), delete("c", 4)]
    merge(frame(put("c", 1)), str(table), deletes=deletes)
    merge(frame(*batch), str(table), deletes=deletes)
    before, rows = version(table), stored(table)
    merge(frame(*batch), str(table), deletes=deletes)
    merge(frame(), str(table), deletes=deletes)
    assert (version(table), stored(table)) == (before, rows)


def test_marks_take_a_replay_of_any_range(frame: Frame, table: Path) -> None:
    log = [put("a", 1), put("b", 2), delete("a", 3), put("c", 4), purge("b", 5), put("b", 6)]
    merge(frame(*log), str(table), deletes="mark")
    rows, before = stored(table), version(table)
    for start, end in [(0, 1), (0, 2), (1, 4), (3, 5)]:
        merge(frame(*log[start:end]), str(table), deletes="mark")
    assert (version(table), stored(table)) == (before, rows)


def test_removed_rows_come_back_with_a_replay_that_ends_before_the_marker(
    frame: Frame, table: Path
) -> None:
    # The example in docs/delta.md: what `deletes="remove"` does not promise.
    merge(frame(put("a", 1), put("b", 2)), str(table))
    merge(frame(delete("a", 3)), str(table))
    merge(frame(put("a", 1)), str(table))
    assert [row["key"] for row in stored(table)] == ["a", "b"]
    merge(frame(delete("a", 3)), str(table))
    assert [row["key"] for row in stored(table)] == ["b"]


# --- failures -------------------------------------------------------------------------------


@both_modes
def test_a_batch_that_fails_half_way_leaves_the_table_as_it_was(
    frame: Frame, table: Path, deletes: Deletes
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


def test_the_batch_is_read_once_and_nothing_stays_cached(spark: SparkSession, table: Path) -> None:
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


@both_modes
def test_a_query_that_crashes_and_starts_again(
    spark: SparkSession, frame: Frame, table: Path, tmp_path: Path, deletes: Deletes
) -> None:
    """The function as `foreachBatch` calls it, in the session that `foreachBatch` clones."""
    log = [put("a", 1), put("b", 2), delete("a", 3), put("c", 4), put("b", 5), purge("c", 6)]
    for index in range(3):
        part = tmp_path / "log" / f"part={index}"
        frame(*log[2 * index : 2 * index + 2]).coalesce(1).write.parquet(str(part))
        for file in part.iterdir():
            os.utime(file, (1_700_000_000 + index, 1_700_000_000 + index))
    function = merge_changes(str(table), deletes=deletes)
    crashes = iter(["before", "after", None, "before", "after"])

    def crashing(batch: DataFrame, batch_id: int) -> None:
        crash = next(crashes, None)
        if crash == "before":
            raise RuntimeError("crash")
        function(batch, batch_id)
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
            assert "crash" in str(error)  # noqa: PT017 - any other failure is one
            continue
        break
    else:
        pytest.fail("the query never came through")
    assert next(crashes, "all") == "all"
    model = Model(deletes)
    model.merge(log)
    assert stored(table) == model.stored()


@both_modes
def test_random_interleavings(frame: Frame, table: Path, deletes: Deletes) -> None:
    """Puts, deletes, purges, buckets made anew; batches merged, merged again, failing, replayed."""
    rng = random.Random(7)
    log: list[Entry] = []
    model, made, revision, merged = Model(deletes), MADE, 0, 0
    for step in rng.sample(["on", "on", "again", "fail", "fail", "replay", "replay", "replay"], 8):
        for _ in range(rng.randrange(1, 30)):
            revision += 1
            make = rng.choice([put, put, delete, purge])
            log.append(make(rng.choice("abcdefghijklmnop"), revision, made))
        if rng.random() < 0.2:
            made, revision = made + timedelta(seconds=1), 0
        start, end = merged, len(log)
        if step == "replay":
            start = rng.randrange(len(log))
            end = rng.randrange(start, len(log)) + 1
        batch = log[start:end]
        rng.shuffle(batch)
        if step == "fail":
            torn = F.raise_error(F.lit("torn")).cast("binary")
            with pytest.raises(Exception, match="torn"):
                merge(frame(*batch).withColumn("value", torn), str(table), deletes=deletes)
        for _ in range(2 if step == "again" else 1):
            merge(frame(*batch), str(table), deletes=deletes)
        model.merge(batch)
        assert stored(table) == model.stored(), (step, batch)
        if step != "replay":
            merged = len(log)
    merge(frame(*log), str(table), deletes=deletes)
    model.merge(log)
    assert stored(table) == model.stored()
    # However the batches lay: the live rows are what the log alone says.
    whole = Model("remove")
    whole.merge(log)
    live = [row for row in stored(table) if row["operation"] == "PUT"]
    assert [row["revision"] for row in live] == [
        entry.revision for _, entry in sorted(whole.rows.items())
    ]


@both_modes
def test_the_merge_compares_for_itself(frame: Frame, table: Path, deletes: Deletes) -> None:
    """What was newer than the table's rows when it was chosen may not be when it is merged."""
    merge(frame(put("a", 5), put("b", 6), put("c", 3)), str(table), deletes=deletes)
    chosen = frame(put("a", 1), delete("b", 4), put("c", 7), delete("d", 8))
    chosen = chosen.drop("delta", "initial")
    if deletes == "mark":
        chosen = chosen.withColumn("deleted", F.col("operation") != "PUT")
    target = DeltaLake.forPath(chosen.sparkSession, str(table))
    changes._apply(target, chosen, ["bucket", "key"], deletes)
    assert live(table) == {"a": 5, "b": 6, "c": 7}
    assert marks(table) == ({"d": (8, "DEL")} if deletes == "mark" else {})


def test_two_writers_at_once(frame: Frame, table: Path) -> None:
    """Each comes through or is refused with Delta's conflict; no key has two rows."""
    merge(frame(), str(table))
    batches = [[put(key, revision) for key in "abc"] for revision in (1, 2, 3)]

    def write(batch: list[Entry]) -> int:
        try:
            merge(frame(*batch), str(table))
        except CONFLICTS:
            return 0
        return batch[0].revision

    with ThreadPoolExecutor(3) as threads:
        newest = max(threads.map(write, batches))
    assert live(table) == dict.fromkeys("abc", newest)
    assert len(stored(table)) == 3


# --- columns and tables ---------------------------------------------------------------------


def test_columns_of_the_users_own(frame: Frame, table: Path) -> None:
    """Parsed, dropped and odd columns; and one that only the table has."""

    def parsed(*entries: Entry) -> DataFrame:
        text = F.col("value").cast("string")
        columns = frame(*entries).drop("value", "bucket", "created", "initial")
        return (
            frame(*entries)
            .withColumn("at", F.split(text, "@")[1].cast("int"))
            .withColumn("tags", F.create_map(F.lit("text"), text))
            .withColumn("a-b", F.lit(True))
            .select(*columns.columns, "at", "tags", "a-b")
        )

    merge(parsed(put("a", 1), put("b", 2)), str(table), deletes="mark")
    spark = frame().sparkSession
    spark.sql(f"ALTER TABLE delta.`{table}` ADD COLUMN note STRING")
    spark.sql(f"UPDATE delta.`{table}` SET note = 'mine' WHERE key = 'a'")
    merge(parsed(put("a", 3), delete("b", 4), put("c", 5)), str(table), deletes="mark")
    assert [
        (row["key"], row["at"], row["tags"], row["note"], row["deleted"]) for row in stored(table)
    ] == [
        ("a", 3, [("text", "a@3")], "mine", False),
        ("b", None, [("text", None)], None, True),
        ("c", 5, [("text", "c@5")], None, False),
    ]
    assert not {"value", "bucket", "created", "delta", "initial"} & set(stored(table)[0])


def test_buckets_that_share_a_table(frame: Frame, table: Path) -> None:
    merge(frame(put("a", 1), put("a", 9, bucket="yard")), str(table))
    assert [(row["bucket"], row["revision"]) for row in stored(table)] == [
        ("fleet", 1),
        ("yard", 9),
    ]
    merge(frame(put("a", 2), delete("a", 3)), str(table))
    assert [(row["bucket"], row["revision"]) for row in stored(table)] == [("yard", 9)]


def test_a_table_in_the_catalog(spark: SparkSession, frame: Frame) -> None:
    spark.sql("CREATE DATABASE IF NOT EXISTS lake")
    for _ in range(2):
        merge_changes("lake.fleet")(frame(put("a", 1)), 0)
    assert [row.key for row in spark.table("lake.fleet").collect()] == ["a"]
    spark.sql("DROP TABLE lake.fleet")


def test_a_table_that_is_not_deltas_is_not_replaced(spark: SparkSession, frame: Frame) -> None:
    spark.sql("CREATE TABLE plain (key STRING) USING parquet")
    with pytest.raises(Exception, match=r"(?i)not a delta table"):
        merge(frame(put("a", 1)), "plain")
    spark.sql("DROP TABLE plain")


@pytest.mark.parametrize("column", ["key", "revision", "operation", "stream_created"])
def test_a_needed_column_is_missing(frame: Frame, table: Path, column: str) -> None:
    with pytest.raises(ConfigurationError, match=f"the batch has no column '{column}'"):
        merge(frame(put("a", 1)).drop(column), str(table))
    assert not table.exists()


def test_tables_that_do_not_fit(spark: SparkSession, frame: Frame, tmp_path: Path) -> None:
    batch = frame(put("a", 1))
    removed, marked, other = (str(tmp_path / name) for name in ("removed", "marked", "other"))
    merge(batch, removed)
    merge(batch, marked, deletes="mark")
    spark.range(1).write.format("delta").save(other)
    refused: list[tuple[DataFrame, str, Deletes, str]] = [
        (batch, removed, "mark", "no column 'deleted'.*deletes='remove'"),
        (batch, marked, "remove", "a column 'deleted'.*deletes='mark'"),
        (batch, other, "remove", "the table .* has no column 'key'"),
        (batch.withColumn("deleted", F.lit(1)), marked, "mark", "its own column 'deleted'"),
        (batch.withColumn("speed", F.lit(1)), removed, "remove", "no column 'speed'.*ALTER TABLE"),
        (batch.drop("bucket"), removed, "remove", "no column 'bucket'"),
        (batch.withColumn("key", F.lit(None)), removed, "remove", "null in one of"),
        (batch.withColumn("operation", F.lit("put")), removed, "remove", "other than PUT"),
        (batch, removed, "drop", "deletes='drop'"),  # type: ignore[list-item]
    ]
    for frame_, table, deletes, message in refused:
        before = [version(Path(one)) for one in (removed, marked, other)]
        with pytest.raises(ConfigurationError, match=message):
            merge(frame_, table, deletes=deletes)
        assert [version(Path(one)) for one in (removed, marked, other)] == before
    with pytest.raises(ConfigurationError, match="'remove' or 'mark'"):
        merge_changes(removed, deletes="drop")  # type: ignore[arg-type]


# --- reconcile ------------------------------------------------------------------------------


class Bucket:
    """A real bucket; every write returns the entry that the source would deliver for it."""

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.name = name

    def make(self, **config: Any) -> Bucket:
        answer = buckets.create_bucket(self.url, self.name, history=3, **config)
        micros = nanoseconds(answer["created"]) // 1000
        self.made = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(microseconds=micros)
        return self

    def remove(self) -> None:
        buckets.delete_bucket(self.url, self.name)

    def write(self, *entries: tuple[str, str]) -> list[Entry]:
        """Write (key, operation) pairs."""
        how = {"PUT": (b"x", None), "DEL": (b"", buckets.DEL), "PURGE": (b"", buckets.PURGE)}
        messages = [(f"$KV.{self.name}.{key}", *how[operation]) for key, operation in entries]
        return [
            Entry(key, seq, operation, b"x" if operation == "PUT" else None, self.made, self.name)
            for (key, operation), seq in zip(
                entries, buckets.publish(self.url, messages), strict=True
            )
        ]

    def vanish(self, *keys: str) -> None:
        """Purge subjects through the API: no marker is left."""
        for key in keys:
            request = {"filter": f"$KV.{self.name}.{key}"}
            buckets.api(self.url, f"STREAM.PURGE.KV_{self.name}", request)

    def state(self) -> dict[str, Any]:
        return buckets.stream_state(self.url, self.name)


@pytest.fixture
def bucket(shared_server: NatsServer, request: pytest.FixtureRequest) -> Bucket:
    name = re.sub(r"\W", "_", request.node.name)
    return Bucket(shared_server.url, name).make()


@pytest.fixture
def reconciled(spark: SparkSession, table: Path, bucket: Bucket) -> Callable[..., ReconcileResult]:
    def run(**arguments: Any) -> ReconcileResult:
        arguments = {"bucket": bucket.name, "servers": bucket.url, **arguments}
        return reconcile(spark, str(table), **arguments)

    return run


Reconciled = Callable[..., ReconcileResult]


def live(table: Path) -> dict[str, int]:
    return {row["key"]: row["revision"] for row in stored(table) if not row.get("deleted")}


def marks(table: Path) -> dict[str, tuple[int, str]]:
    return {
        row["key"]: (row["revision"], row["operation"])
        for row in stored(table)
        if row.get("deleted")
    }


@both_modes
def test_reconcile(
    frame: Frame, table: Path, bucket: Bucket, reconciled: Reconciled, deletes: Deletes
) -> None:
    """Keys without a marker, with one that was not read, rewritten since; and a second time."""
    read = bucket.write(*((key, "PUT") for key in ("a", "b.c", "d", "e", "f")))
    merge(frame(*read), str(table), deletes=deletes)
    before = version(table)
    assert reconciled(deletes=deletes) == ReconcileResult(0, 5, 0, last_seq=5)
    assert version(table) == before

    unread = bucket.write(("d", "DEL"), ("e", "PURGE"), ("f", "DEL"), ("f", "PUT"), ("a", "PUT"))
    bucket.vanish("a", "b.c")
    assert reconciled(deletes=deletes) == ReconcileResult(4, 1, 0, last_seq=10)
    assert live(table) == {"f": 5}
    if deletes == "mark":
        assert marks(table) == {
            "a": (10, "PURGE"),
            "b.c": (10, "PURGE"),
            "d": (6, "DEL"),
            "e": (7, "PURGE"),
        }
        assert [row["value"] for row in stored(table)] == [None, None, None, None, b"x"]
    before = version(table)
    assert reconciled(deletes=deletes) == ReconcileResult(0, 1, 0, last_seq=10)
    assert version(table) == before

    # What the query had read before: a mark keeps it out, also the PUT that it never merged.
    if deletes == "mark":
        merge(frame(*read, *unread), str(table), deletes=deletes)
        assert live(table) == {"f": 9}
    again = bucket.write(("a", "PUT"))
    merge(frame(*again), str(table), deletes=deletes)
    assert live(table)["a"] == 11


@both_modes
def test_reconcile_beside_a_query(
    frame: Frame,
    table: Path,
    bucket: Bucket,
    reconciled: Reconciled,
    deletes: Deletes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys written again after the leader said they were gone, merged before the rows go."""
    merge(frame(*bucket.write(("a", "PUT"), ("b", "PUT"))), str(table), deletes=deletes)
    bucket.vanish("a", "b")
    # The package's attribute of this name is the function.
    module = importlib.import_module("nats_stream_source.delta.reconcile")
    compare = module._compare

    async def overtaken(*arguments: Any) -> Any:
        outcome = await compare(*arguments)
        await asyncio.to_thread(
            lambda: merge(frame(*bucket.write(("a", "PUT"))), str(table), deletes=deletes)
        )
        return outcome

    monkeypatch.setattr(module, "_compare", overtaken)
    assert reconciled(deletes=deletes) == ReconcileResult(1, 0, changed=1, last_seq=2)
    assert live(table) == {"a": 3}


@both_modes
def test_reconcile_a_bucket_made_anew(
    frame: Frame, table: Path, bucket: Bucket, reconciled: Reconciled, deletes: Deletes
) -> None:
    old = bucket.write(*((key, "PUT") for key in "abcd"))
    merge(frame(*old), str(table), deletes=deletes)
    bucket.remove()
    bucket.make()
    new = bucket.write(("b", "PUT"))
    assert reconciled(deletes=deletes) == ReconcileResult(3, 1, 0, last_seq=1)
    assert live(table) == {"b": 2}  # until the query has read the new bucket
    merge(frame(*new), str(table), deletes=deletes)
    assert live(table) == {"b": 1}
    if deletes == "mark":
        merge(frame(*old), str(table), deletes=deletes)
        assert live(table) == {"b": 1}


def test_reconcile_after_max_age(
    frame: Frame, table: Path, shared_server: NatsServer, reconciled: Reconciled
) -> None:
    bucket = Bucket(shared_server.url, "aging").make(max_age=10**9, duplicate_window=10**9)
    merge(frame(*bucket.write(("a", "PUT"), ("b", "PUT"))), str(table))
    deadline = time.monotonic() + 20
    while bucket.state()["messages"]:
        assert time.monotonic() < deadline, "max_age did nothing"
        time.sleep(0.05)
    assert reconciled(bucket="aging").removed == 2
    assert stored(table) == []


@both_modes
def test_random_interleavings_with_keys_that_vanish(
    frame: Frame, table: Path, bucket: Bucket, reconciled: Reconciled, deletes: Deletes
) -> None:
    rng = random.Random(3)
    unread: list[Entry] = []
    values: dict[str, int] = {}
    vanished = 0
    for _ in range(3):
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
        bucket.vanish(*gone)
        for key in gone:
            del values[key]
        vanished += reconciled(deletes=deletes).removed
        # No row whose key is gone, and no live key lost that the query has read.
        behind = {entry.key for entry in unread}
        assert live(table).keys() <= values.keys()
        assert live(table).keys() >= values.keys() - behind
    merge(frame(*unread), str(table), deletes=deletes)
    reconciled(deletes=deletes)
    assert live(table) == values
    assert vanished


def test_reconcile_touches_its_own_bucket_only(
    frame: Frame, table: Path, bucket: Bucket, reconciled: Reconciled
) -> None:
    (entry,) = bucket.write(("a", "PUT"))
    merge(frame(entry, dataclasses.replace(entry, bucket="yard")), str(table))
    bucket.vanish("a")
    assert reconciled() == ReconcileResult(1, 0, 0, last_seq=1)
    assert [row["bucket"] for row in stored(table)] == ["yard"]


def test_reconcile_refuses(
    spark: SparkSession, frame: Frame, tmp_path: Path, bucket: Bucket
) -> None:
    (entry,) = bucket.write(("a", "PUT"))
    beyond = dataclasses.replace(entry, revision=2)
    later = dataclasses.replace(entry, stream_created=entry.stream_created + timedelta(seconds=1))
    wild = dataclasses.replace(entry, key="a.*")
    tables = {"good": entry, "beyond": beyond, "later": later, "wild": wild}
    for name, one in tables.items():
        merge(frame(one), str(tmp_path / name))
    refused: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
        ("none", ConfigurationError, "no Delta table", {}),
        ("good", ConfigurationError, "no column 'deleted'", {"deletes": "mark"}),
        ("good", ConfigurationError, "'remove' or 'mark'", {"deletes": "drop"}),
        ("good", BucketNotFoundError, "'absent' does not exist", {"bucket": "absent"}),
        ("good", InvalidNameError, "not a bucket name", {"bucket": "a.b"}),
        ("good", OptionError, "'serverz'", {"serverz": "x"}),
        ("beyond", DataLossError, "revision 2 .* ends at 1", {}),
        ("later", ConfigurationError, "made later", {}),
        ("wild", InvalidNameError, "which no bucket can have", {}),
    ]
    for name, error, message, arguments in refused:
        with pytest.raises(error, match=message):
            reconcile(
                spark,
                str(tmp_path / name),
                **{"bucket": bucket.name, "servers": bucket.url, **arguments},
            )
    for name in tables:
        assert len(stored(tmp_path / name)) == 1
