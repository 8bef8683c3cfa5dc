"""What is Spark's own in a merge: other writers, new columns, settings, and how a batch arrives."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession, functions as F

from nats_stream_source.delta.merge_result import MergeResult
from nats_stream_source.delta.rules.events import ChangeRules, EventBatch
from nats_stream_source.delta.spark import (
    batch as batches,
    reader,
    session as spark_session,
    table as spark_table,
)
from nats_stream_source.delta.spark.batch import Collector, batch_of
from nats_stream_source.delta.spark.session import EXACT
from nats_stream_source.delta.spark.table import SparkTable
from nats_stream_source.delta.upkeep import Upkeep
from nats_stream_source.errors import ConfigurationError
from tests.integration.delta.merge_model import (
    SCHEMA,
    Entry,
    Frame,
    columns_of,
    delete,
    put,
    versions,
)

pytestmark = pytest.mark.delta

HISTORY: dict[str, Any] = {
    "keys": "id",
    "sequence_by": "n",
    "apply_as_deletes": "v IS NULL",
    "stored_as_scd_type": 2,
}
MergeBySpark = Callable[..., MergeResult]
Row = tuple[int, int, str | None]


@pytest.fixture
def merge(spark: SparkSession, table: Path) -> MergeBySpark:
    """Function that merges a DataFrame, entries, or events ``(id, n, v)`` into the test's table."""

    def run(
        rows: DataFrame | list[Any], session: SparkSession = spark, **rules: Any
    ) -> MergeResult:
        frame = rows
        if isinstance(rows, list):
            entries = [row.row() for row in rows if isinstance(row, Entry)]
            schema = SCHEMA if entries else "id int, n int, v string"
            frame = session.createDataFrame(entries or rows, schema)
        batch = batch_of(frame, ChangeRules.of(**rules), Collector())
        return SparkTable(session, str(table), str(table)).merge(batch, None)

    return run


def _before_merge(monkeypatch: pytest.MonkeyPatch, *happenings: Callable[[], object]) -> list[str]:
    """Let something happen between the reading of rows and each MERGE; returns the MERGEs."""
    merged: list[str] = []
    merge_as_read = spark_table._merge_as_read

    def run(*arguments: Any) -> Any:
        merged.append("MERGE")
        if len(merged) <= len(happenings):
            happenings[len(merged) - 1]()
        return merge_as_read(*arguments)

    monkeypatch.setattr(spark_table, "_merge_as_read", run)
    return merged


def test_repeated_batch_changes_nothing_and_makes_no_version(
    table: Path, merge: MergeBySpark
) -> None:
    result = merge([put("a", 1), put("b", 2), put("a", 3)])
    assert (result.inserted, result.updated, result.deleted) == (2, 0, 0)
    result = merge([put("a", 4), delete("b", 5), delete("c", 6)])
    assert (result.inserted, result.updated, result.deleted) == (0, 1, 1)
    before = DeltaTable(table).version()
    assert merge([put("a", 4), delete("b", 5), delete("c", 6)]).changed == 0
    assert merge([put("a", 3)]).changed == 0
    assert DeltaTable(table).version() == before


@pytest.mark.parametrize("scd_type", [1, 2])
def test_repeated_events_make_no_version_and_delete_without_row_one_of_both_tables(
    table: Path, merge: MergeBySpark, scd_type: int
) -> None:
    rules = {**HISTORY, "stored_as_scd_type": scd_type}
    events: list[Row] = [(1, 1, "a"), (1, 2, None), (2, 1, "b")]
    merge(events, **rules)
    before = versions(table)
    merge(events, **rules)
    assert versions(table) == before
    for _ in range(2):
        assert merge([(3, 2, None)], **rules).changed == 0
        assert versions(table) == [before[0] + 1, before[1] + 1]


COPY = "SELECT 'c' AS key, * EXCEPT (key)"
MERGED = [("a", 2, None), ("b", 3, None), ("c", 4, None)]


@pytest.mark.parametrize(
    ("change", "merges", "expected"),
    [
        ("UPDATE {} SET revision = 9 WHERE key = 'a'", 2, [("a", 9, None), *MERGED[1:]]),
        ("DELETE FROM {} WHERE key = 'a'", 2, MERGED),
        (f"INSERT INTO {{}} BY NAME {COPY} FROM {{}} WHERE key = 'a'", 2, MERGED),
        ("UPDATE {} SET note = 'mine'", 1, [("a", 2, "mine"), ("b", 3, "mine"), ("c", 4, None)]),
    ],
    ids=["updated", "deleted", "inserted", "column of user"],
)
def test_row_that_other_writer_changes_meanwhile_is_merged_again(
    spark: SparkSession,
    table: Path,
    merge: MergeBySpark,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    merges: int,
    expected: list[tuple[str, int, str | None]],
) -> None:
    """Rows of several files, so that Delta's own check of a commit does not find each change.

    Columns of the user are neither compared nor changed.
    """
    merge([put("a", 1), put("b", 1)])
    name = f"delta.`{table}`"
    spark.sql(f"ALTER TABLE {name} ADD COLUMN note STRING")
    merged = _before_merge(monkeypatch, lambda: spark.sql(change.replace("{}", name)))
    merge([put("a", 2), put("b", 3), put("c", 4)])
    assert len(merged) == merges
    assert columns_of(table, "key", "revision", "note") == expected


def test_row_whose_value_other_writer_changes_meanwhile_is_merged_again(
    spark: SparkSession, table: Path, merge: MergeBySpark, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = {**HISTORY, "stored_as_scd_type": 1, "deletes": "mark"}
    merge([(1, 1, "a"), (2, 1, "a")], **rules)
    update = f"UPDATE delta.`{table}` SET v = 'z' WHERE id = 2"
    merged = _before_merge(monkeypatch, lambda: spark.sql(update))
    merge([(1, 2, "b"), (2, 1, "b")], **rules)
    assert len(merged) == 2
    assert columns_of(table, "id", "n", "v") == [(1, 2, "b"), (2, 1, "z")]


def test_values_that_events_lack_are_read_of_their_rows(
    spark: SparkSession, table: Path, merge: MergeBySpark, monkeypatch: pytest.MonkeyPatch
) -> None:
    def events(*rows: tuple[int, int, str | None, list[str]]) -> DataFrame:
        return spark.createDataFrame(list(rows), "id int, n int, v string, lacks array<string>")

    rules = {"keys": "id", "sequence_by": "n", "unavailable_columns": "lacks", "deletes": "mark"}
    merge(events((1, 1, "a", []), (2, 1, "a", [])), **rules)
    update = f"UPDATE delta.`{table}` SET v = 'z' WHERE id = 1"
    _before_merge(monkeypatch, lambda: spark.sql(update))
    again = events((1, 2, None, ["v"]), (2, 1, "b", []), (3, 1, None, ["v"]))
    merge(again, **rules)
    assert columns_of(table, "id", "n", "v") == [(1, 2, "z"), (2, 1, "b"), (3, 1, None)]


@pytest.mark.parametrize("scd_type", [1, 2])
def test_rows_are_read_in_steps_of_bounded_bytes(
    table: Path, merge: MergeBySpark, monkeypatch: pytest.MonkeyPatch, scd_type: int
) -> None:
    monkeypatch.setattr(reader, "ONCE_BYTES", 32)
    rules = {**HISTORY, "stored_as_scd_type": scd_type}
    merge([(id, 1, "a") for id in range(9)], **rules)
    read: list[int] = []
    rows_of_keys = SparkTable.rows_of_keys

    def run(table: SparkTable, of: pa.Table, keys: list[str], columns: list[str]) -> pa.Table:
        read.append(len(of))
        return rows_of_keys(table, of, keys, columns)

    monkeypatch.setattr(SparkTable, "rows_of_keys", run)
    merge([(id, n, "b") for n in (2, 3) for id in range(9)], **rules)
    assert len(read) > 2
    assert max(read) < 9
    assert columns_of(table, "id", "v")[-1] == (8, "b")


def test_events_of_other_writer_between_state_and_table_are_merged_again(
    table: Path, merge: MergeBySpark, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later event of the other writer stays, and its delete of an earlier event, too."""
    merge([(1, 1, "a"), (2, 1, "b")], **HISTORY)

    def other_writer() -> None:
        monkeypatch.undo()
        merge([(1, 5, None), (3, 4, "other")], **HISTORY)

    _before_merge(monkeypatch, lambda: None, other_writer)
    merge([(1, 3, "mine"), (2, 2, None), (3, 2, "mine"), (4, 2, None)], **HISTORY)
    assert columns_of(table, "v", "__START_AT", "__END_AT") == [
        ("a", 1, 3),
        ("b", 1, 2),
        ("mine", 2, 4),
        ("mine", 3, 5),
        ("other", 4, None),
    ]


def test_large_rows_are_sent_in_tasks_of_bounded_bytes(
    spark: SparkSession, frame: Frame, merge: MergeBySpark, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, tasks = frame(put("a", 1), put("b", 1), put("c", 1)), []
    create = SparkSession.createDataFrame

    def run(*arguments: Any) -> DataFrame:
        created: DataFrame = create(*arguments)
        tasks.append(created.rdd.getNumPartitions())
        return created

    monkeypatch.setattr(spark_session, "_TASK_BYTES", 1)
    # Of less than this, Spark sends as many tasks as there are cores.
    monkeypatch.setattr(spark_session, "_FEW_BYTES", 0)
    monkeypatch.setattr(SparkSession, "createDataFrame", run)
    merge(batch)
    assert tasks[-1] == 3


def test_new_columns_are_added_by_one_commit_and_feature_by_one_before(
    frame: Frame, table: Path, merge: MergeBySpark
) -> None:
    merge(frame(put("a", 1)).selectExpr("*", "named_struct('x', 1) AS s"))
    local = "struct(timestamp_ntz'2026-01-01 00:00:00' AS n) AS t"  # a feature of the table
    grown = "*", "named_struct('y', 'new', 'x', 2) AS s", "0.5D AS w", local
    merge(frame(put("b", 2)).selectExpr(*grown))
    operations = [one["operation"] for one in reversed(DeltaTable(table).history())]
    assert operations == ["CREATE TABLE", "MERGE", "SET TBLPROPERTIES", "WRITE", "MERGE"]
    assert columns_of(table, "key", "s", "w", "t") == [
        ("a", {"x": 1, "y": None}, None, None),
        ("b", {"x": 2, "y": "new"}, 0.5, {"n": datetime(2026, 1, 1)}),
    ]
    assert "timestampNtz" in (DeltaTable(table).protocol().reader_features or ())


def test_wider_type_is_refused_before_anything_is_written(
    spark: SparkSession, table: Path, merge: MergeBySpark
) -> None:
    merge(spark.createDataFrame([(1, 2, "a", 7)], "id int, n int, v string, w int"), **HISTORY)
    before = versions(table)
    wider = "id int, n int, v string, w long, x int"
    wide = spark.createDataFrame([(1, 3, "a", 1 << 40, 1)], wider)
    with pytest.raises(ConfigurationError, match="'w' gets a wider type; cast the column"):
        merge(wide, **HISTORY)
    assert versions(table) == before


def test_null_in_field_that_is_not_null_is_named(
    spark: SparkSession, table: Path, merge: MergeBySpark
) -> None:
    spark.sql(
        f"CREATE TABLE delta.`{table}` (key STRING, revision BIGINT, operation STRING, "
        f"stream_created TIMESTAMP, s STRUCT<x: INT NOT NULL>) USING delta"
    )
    batch = spark.sql(
        "SELECT 'k' AS key, 1L AS revision, 'PUT' AS operation, timestamp_seconds(0) AS "
        "stream_created, named_struct('x', cast(null AS int)) AS s"
    )
    with pytest.raises(ConfigurationError, match="'s', or a part of it, is NOT NULL in the table"):
        merge(batch)
    assert DeltaTable(table).version() == 0


WRONG = {
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MILLIS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "LEGACY",
    "spark.sql.parquet.datetimeRebaseModeInRead": "LEGACY",
    "spark.sql.parquet.int96RebaseModeInWrite": "EXCEPTION",
    "spark.sql.parquet.int96RebaseModeInRead": "EXCEPTION",
    "spark.databricks.delta.properties.defaults.appendOnly": "true",
    "spark.databricks.delta.write.txnAppId": "app",
    "spark.databricks.delta.write.txnVersion": "1",
}
"""Settings with which Spark would store other values, or skip commits."""


def test_settings_that_change_values_are_restored_after_merge_and_upkeep(
    spark: SparkSession, table: Path, merge: MergeBySpark, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPTIMIZE writes rows again, and does not shift their times."""
    assert WRONG.keys() == EXACT.keys()
    session = spark.newSession()
    for name, value in WRONG.items():
        session.conf.set(name, value)
    local = datetime(1850, 1, 2, 3, 4, 5, 678901)
    instant = local.replace(tzinfo=timezone.utc)

    def merge_row(id: int) -> None:
        columns = "id int, n int, v string, day date, local timestamp_ntz, instant timestamp"
        rows = [(id, 1, "a", date(1500, 1, id), local, instant)]
        merge(session.createDataFrame(rows, columns), session, **HISTORY)

    merge_row(1)
    merge_row(2)
    with monkeypatch.context() as patch:
        patch.setattr(spark_table, "_merge_as_read", lambda *arguments: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            merge_row(3)
    found = SparkTable(session, str(table), str(table))
    assert found.exists()
    assert found.maintain(Upkeep()).compacted == 2
    assert {name: session.conf.get(name) for name in WRONG} == WRONG
    expected = [(date(1500, 1, id), local, instant) for id in (1, 2)]
    assert columns_of(table, "day", "local", "instant") == expected
    read = spark.read.format("delta").load(str(table)).select("day", "local", "instant").toArrow()
    assert sorted(tuple(row.values()) for row in read.to_pylist()) == expected


# How a batch reaches the rule: as it is, reduced by the executors, or in parts.

_ORDER = ("timestamp_seconds(0) AS stream_created", "'PUT' AS operation")
_KEYED = ChangeRules.of(keys=["id"], sequence_by="n", apply_as_deletes="op = 'd'")
_Events = list[tuple[float, int, str]]


def _batch(spark: SparkSession, rows: int, keys: int, value: str = "'v'") -> DataFrame:
    """Entries of ``keys`` keys with the revisions 0 to ``rows``, in two partitions."""
    return spark.range(0, rows, 1, 2).selectExpr(
        f"concat('k', id % {keys}) AS key", "id AS revision", f"{value} AS value", *_ORDER
    )


def _parts(events: EventBatch) -> list[pa.Table]:
    return list(events.parts(events.shape))


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
    pairs = zip(rows["key"].to_pylist(), rows["revision"].to_pylist(), strict=True)
    return dict(sorted(pairs)), jobs  # the last one of a key counts


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


_PUTS: _Events = [(float(id), 1, "u") for id in range(6)]
_DELETES: _Events = [(-0.0 if id == 0 else float(id), 2, "d") for id in range(6)]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.usefixtures("bound")
def test_batch_beyond_bound_has_events_of_key_in_one_part_and_next_one_has_one_part(
    spark: SparkSession, reverse: bool, persisted: Callable[[], int]
) -> None:
    """Put and delete of a key are in two partitions, and -0.0 is the key 0.0."""
    collector, columns = Collector(), "id double, n int, op string"
    rows = [*_DELETES, *_PUTS] if reverse else [*_PUTS, *_DELETES]
    frame = spark.createDataFrame(rows, columns)
    assert frame.select(F.spark_partition_id()).distinct().count() == 2
    events = batch_of(frame, _KEYED, collector)
    found = []
    for part in events.parts(events.shape):
        assert persisted() == 1
        found.append(sorted((abs(row["id"]), row["n"]) for row in part.to_pylist()))
        assert found[-1] == sorted(itertools.product({id for id, _ in found[-1]}, (1, 2)))
    assert (len(found), sum(map(len, found))) == (6, 12)
    assert persisted() == 0
    assert collector.large
    small = batch_of(spark.createDataFrame(_PUTS[:1], columns), _KEYED, collector)
    assert [len(part) for part in _parts(small)] == [1]
    assert not collector.large


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"stored_as_scd_type": 2},
        {"keys": "key", "sequence_by": "revision"},
        {"keys": "key", "sequence_by": "named_struct('of', struct(revision))"},
    ],
    ids=["entries", "history", "column", "struct"],
)
@pytest.mark.usefixtures("bound")
def test_batch_beyond_bound_is_validated_before_first_part(
    spark: SparkSession, rules: dict[str, Any], persisted: Callable[[], int]
) -> None:
    revision = "if(id IN (5, 7), null, id) AS revision"
    frame = spark.range(0, 8, 1, 2).selectExpr("concat('k', id) AS key", revision, *_ORDER)
    events = batch_of(frame, ChangeRules.of(**rules), Collector())
    with pytest.raises(ConfigurationError, match=r"2 (entries|events) have a null"):
        next(iter(events.parts(events.shape)))
    assert persisted() == 0


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
