"""Tables with features of Delta Lake: the rows are right, whichever engine ``"auto"`` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from nats_stream_source.delta import Engine, Upkeep, maintain, merge
from nats_stream_source.delta.driver.collect import BatchCollector
from nats_stream_source.delta.driver.copy_on_write import CopyOnWriteTable
from nats_stream_source.delta.driver.features import DELETION_VECTORS, is_unsupported
from nats_stream_source.delta.driver.storage import TableStorage, schema_of
from nats_stream_source.delta.limits import NO_LIMITS, LimitCheck
from nats_stream_source.delta.spark.settings import temporary_setting
from nats_stream_source.errors import ConfigurationError
from tests.integration.delta.cdc.conftest import ENGINES
from tests.integration.delta.merge_model import Frame, delete, put

pytestmark = pytest.mark.delta
COLUMNS = (
    "bucket STRING, key STRING, value BINARY, revision BIGINT, created TIMESTAMP, "
    "operation STRING, stream_created TIMESTAMP"
)
# Each feature: the engine of "auto", what the table is created with, and what delta-rs itself does
# if it is not asked before: "refuses" the commit, or "merges".
FEATURES: dict[str, tuple[str, str, str]] = {
    "deletion vectors": ("delta-rs", "TBLPROPERTIES (delta.enableDeletionVectors = true)", ""),
    "column mapping": ("delta-rs", "TBLPROPERTIES (delta.columnMapping.mode = 'name')", ""),
    "partitions": ("delta-rs", "PARTITIONED BY (operation)", ""),
    "change data feed": ("delta-rs", "TBLPROPERTIES (delta.enableChangeDataFeed = true)", ""),
    "a column of TIMESTAMP_NTZ": ("delta-rs", "at TIMESTAMP_NTZ", ""),
    "NOT NULL": ("delta-rs", "NOT NULL", ""),
    "row tracking": ("spark", "TBLPROPERTIES (delta.enableRowTracking = true)", "refuses"),
    "in-commit timestamps": (
        "spark",
        "TBLPROPERTIES (delta.enableInCommitTimestamps = true)",
        "refuses",
    ),
    "type widening": ("spark", "TBLPROPERTIES (delta.enableTypeWidening = true)", "refuses"),
    "v2 checkpoints": ("spark", "TBLPROPERTIES (delta.checkpointPolicy = 'v2')", "merges"),
    "clustering": ("spark", "CLUSTER BY (key)", "refuses"),
    "a generated column": (
        "spark",
        "day DATE GENERATED ALWAYS AS (CAST(created AS DATE))",
        "merges",
    ),
    "an identity column": ("spark", "id BIGINT GENERATED ALWAYS AS IDENTITY", "refuses"),
    "a VARIANT": ("spark", "v VARIANT", "merges"),
    "a check constraint": ("spark", "CHECK", "merges"),
}

IN_EVERY_RUN = ("deletion vectors", "change data feed", "row tracking", "a generated column")


def create(spark: SparkSession, table: Path, clause: str) -> None:
    """Create a table whose clause is a table clause, a column, or the name of a constraint."""
    columns, after = COLUMNS, clause
    if clause == "NOT NULL":
        columns, after = COLUMNS.replace("key STRING", "key STRING NOT NULL"), ""
    elif clause == "CHECK":
        after = ""
    elif clause[0].islower():
        columns, after = f"{COLUMNS}, {clause}", ""
    spark.sql(f"CREATE TABLE delta.`{table}` ({columns}) USING delta {after}")
    if clause == "CHECK":
        spark.sql(f"ALTER TABLE delta.`{table}` ADD CONSTRAINT early CHECK (revision < 100)")


@pytest.mark.parametrize(
    "feature",
    [
        # Each takes some seconds: `make test` runs one of each kind.
        pytest.param(feature, marks=[] if feature in IN_EVERY_RUN else pytest.mark.faults)
        for feature in FEATURES
    ],
)
def test_features(spark: SparkSession, frame: Frame, table: Path, feature: str) -> None:
    engine, clause, itself = FEATURES[feature]
    create(spark, table, clause)
    before = frame(put("a", 1), put("b", 2), put("c", 3)).drop("delta", "initial")
    before.createOrReplaceTempView("before")
    names = ", ".join(before.columns)
    spark.sql(f"INSERT INTO delta.`{table}` ({names}) SELECT {names} FROM before")
    if feature == "deletion vectors":
        spark.sql(f"DELETE FROM delta.`{table}` WHERE key = 'c'")
        assert any((table).glob("deletion_vector*"))
    merge(frame(put("a", 4), delete("b", 5), put("d", 6)), str(table))
    written = DeltaTable(table).history(1)[0]["engineInfo"]
    assert written.startswith("Apache-Spark") == (engine != "delta-rs")
    rows = spark.read.format("delta").load(str(table)).select("key", "revision").collect()
    kept = [] if feature == "deletion vectors" else [("c", 3)]
    assert sorted(map(tuple, rows)) == [("a", 4), *kept, ("d", 6)]
    if feature == "change data feed":
        feed = spark.read.format("delta").options(readChangeFeed="true", startingVersion=2)
        changes = feed.load(str(table)).select("_change_type", "key", "revision").collect()
        assert sorted(map(tuple, changes)) == [
            ("delete", "b", 2),
            ("insert", "d", 6),
            ("update_postimage", "a", 4),
            ("update_preimage", "a", 1),
        ]
    if engine == "spark":
        with pytest.raises(ConfigurationError, match=r"engine='delta-rs': (the table|column)"):
            merge(frame(put("e", 7)), str(table), engine="delta-rs")
    if itself == "refuses":
        # A new feature that the list of this package does not have fails as one of these.
        with pytest.raises(Exception, match="Unsupported table features") as refused:
            DeltaTable(table).delete("key = 'a'")
        assert is_unsupported(str(refused.value))


@pytest.mark.parametrize("vectors", ["true", "false"])
def test_shallow_clone_is_changed_by_spark(
    spark: SparkSession, frame: Frame, tmp_path: Path, vectors: str
) -> None:
    """Its log has the paths of its source's files and vectors, which delta-rs does not open."""
    source, clone = tmp_path / "source", tmp_path / "clone"
    create(spark, source, f"TBLPROPERTIES (delta.enableDeletionVectors = {vectors})")
    merge(frame(put("a", 1), put("b", 1), put("c", 1)), source, engine="spark")
    spark.sql(f"DELETE FROM delta.`{source}` WHERE key = 'b'")
    assert any(source.glob("deletion_vector*")) == (vectors == "true")
    spark.sql(f"CREATE TABLE delta.`{clone}` SHALLOW CLONE delta.`{source}`")
    with pytest.raises(ConfigurationError, match=r"source/part-.* is outside of the table"):
        merge(frame(put("a", 2)), clone, engine="delta-rs")
    with pytest.raises(ConfigurationError, match=r"source/part-.* is outside of the table"):
        maintain(spark, clone, engine="delta-rs")
    merge(frame(put("a", 2), put("d", 2)), clone)
    maintain(spark, clone)
    for table, expected in (
        (clone, [("a", 2), ("c", 1), ("d", 2)]),
        (source, [("a", 1), ("c", 1)]),
    ):
        rows = spark.read.format("delta").load(str(table)).select("key", "revision").collect()
        assert sorted(map(tuple, rows)) == expected
    # Once all files are its own, the driver changes it, beside the source's vectors in the log.
    spark.sql(f"UPDATE delta.`{clone}` SET value = NULL")
    merge(frame(put("a", 3)), clone, engine="delta-rs")
    maintain(spark, clone, engine="delta-rs")


def test_rows_of_table_with_deletion_vectors(
    spark: SparkSession, frame: Frame, table: Path
) -> None:
    """``reconcile`` reads them with delta-rs; the pyarrow reader of deltalake refuses them."""
    create(spark, table, FEATURES["deletion vectors"][1])
    merge(frame(put("a", 1), put("b", 2), put("c", 3)), str(table), engine="spark")
    spark.sql(f"DELETE FROM delta.`{table}` WHERE key = 'c'")
    storage = TableStorage("table", str(table))
    target = CopyOnWriteTable(storage, DeltaTable(table), BatchCollector(), LimitCheck(NO_LIMITS))
    found = target.rows("fleet", "remove")
    assert sorted(found["key"].to_pylist()) == ["a", "b"]


def test_types_of_two_implementations_are_equal(spark: SparkSession, table: Path) -> None:
    columns = (
        "s STRUCT<a: INT NOT NULL, b: ARRAY<STRING>>, m MAP<STRING, ARRAY<BIGINT>>, "
        "d DECIMAL(10, 2), t TIMESTAMP, n TIMESTAMP_NTZ, day DATE, y TINYINT, f FLOAT, "
        "k STRING NOT NULL"
    )
    spark.sql(f"CREATE TABLE delta.`{table}` ({columns}) USING delta")
    assert schema_of(DeltaTable(table)) == spark.read.format("delta").load(str(table)).schema


IN_STATISTICS = "has a TIMESTAMP before 1678 or after 2261"
IN_FOOTER = "has TIMESTAMPs of Parquet's type INT96 and no statistics"
# The type of column `until`, the expression of its value, the table's properties, the refusal.
WRONGLY_READ = {
    "late": ("TIMESTAMP", "TIMESTAMP'9999-12-31 00:00:00Z'", "", IN_STATISTICS),
    "early": ("TIMESTAMP", "TIMESTAMP'1200-01-01 00:00:00Z'", "", IN_STATISTICS),
    "struct": (
        "STRUCT<at: TIMESTAMP>",
        "named_struct('at', TIMESTAMP'1200-01-01 00:00:00Z')",
        "",
        IN_STATISTICS,
    ),
    "array": ("ARRAY<TIMESTAMP>", "array(TIMESTAMP'1200-01-01 00:00:00Z')", "", IN_FOOTER),
    "map": (
        "MAP<STRING, STRUCT<at: TIMESTAMP>>",
        "map('k', named_struct('at', TIMESTAMP'1200-01-01 00:00:00Z'))",
        "",
        IN_FOOTER,
    ),
    "without statistics": (
        "TIMESTAMP",
        "TIMESTAMP'1200-01-01 00:00:00Z'",
        "TBLPROPERTIES (delta.dataSkippingNumIndexedCols = 7)",
        IN_FOOTER,
    ),
    "column mapping": (
        "TIMESTAMP",
        "TIMESTAMP'1200-01-01 00:00:00Z'",
        "TBLPROPERTIES (delta.columnMapping.mode = 'name')",
        IN_STATISTICS,
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in ("late", "array") else pytest.mark.faults)
        for case in WRONGLY_READ
    ],
)
def test_timestamps_that_delta_rs_reads_wrongly_stay(
    spark: SparkSession, frame: Frame, table: Path, case: str
) -> None:
    """Spark writes INT96. delta-rs reads it as nanoseconds in 64 bits, which wrap."""
    kind, value, properties, refusal = WRONGLY_READ[case]
    spark.sql(f"CREATE TABLE delta.`{table}` ({COLUMNS}, until {kind}) USING delta {properties}")
    merge(frame(put("a", 1), put("b", 1)), str(table), engine="spark")
    spark.sql(f"UPDATE delta.`{table}` SET until = {value}")
    merge(frame(put("a", 2)), str(table))
    rows = spark.read.format("delta").load(str(table))
    kept = rows.where(f"to_json(struct(until)) = to_json(struct({value} AS until))")
    assert sorted((row.key, row.revision) for row in kept.collect()) == [("a", 2), ("b", 1)]
    with pytest.raises(ConfigurationError, match=f"'until(.at)?' {refusal}"):
        merge(frame(put("a", 3)), str(table), engine="delta-rs")


def test_timestamps_without_statistics_that_delta_rs_reads(
    spark: SparkSession, frame: Frame, table: Path
) -> None:
    """Of INT96 it merges nulls only; of Spark's other type, and its own, any value."""
    create(spark, table, "until ARRAY<TIMESTAMP>")
    merge(frame(put("a", 1), put("b", 1)), str(table), engine="spark")
    merge(frame(put("a", 2)), str(table), engine="delta-rs")
    early = "array(TIMESTAMP'1200-01-01 00:00:00Z')"
    with temporary_setting(spark, "spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS"):
        spark.sql(f"UPDATE delta.`{table}` SET until = {early}")
    merge(frame(put("a", 3)), str(table), engine="delta-rs")
    merge(frame(put("a", 4)), str(table), engine="delta-rs")
    kept = spark.read.format("delta").load(str(table)).where(f"until = {early}")
    assert sorted((row.key, row.revision) for row in kept.collect()) == [("a", 4), ("b", 1)]


def test_merge_on_read_keeps_timestamps_that_delta_rs_reads_wrongly(
    spark: SparkSession, frame: Frame, table: Path
) -> None:
    """It reads them with pyarrow; the compaction of `maintain`, which delta-rs does, is refused."""
    create(spark, table, "until ARRAY<TIMESTAMP>")
    spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ({DELETION_VECTORS} = true)")
    merge(frame(put("a", 1), put("b", 1)), str(table), engine="spark")
    early = "array(TIMESTAMP'1200-01-01 00:00:00Z')"
    spark.sql(f"UPDATE delta.`{table}` SET until = {early}")
    compact_at_once = Upkeep(compact_files=1)
    merge(frame(put("a", 2)), str(table), engine="delta-rs", upkeep=compact_at_once)
    assert DeltaTable(table).history(1)[0]["operation"] == "OPTIMIZE"
    spark.sql(f"UPDATE delta.`{table}` SET until = {early} WHERE key = 'a'")
    with pytest.raises(ConfigurationError, match=f"'until' {IN_FOOTER}"):
        maintain(spark, str(table), engine="delta-rs")
    maintain(spark, str(table))
    kept = spark.read.format("delta").load(str(table)).where(f"until = {early}")
    assert sorted((row.key, row.revision) for row in kept.collect()) == [("a", 2), ("b", 1)]


def test_partitions_by_timestamp_are_right_in_any_time_zone(
    spark: SparkSession, frame: Frame, table: Path
) -> None:
    """delta-rs writes the partition's value in UTC, Spark reads it in the session's zone."""
    create(spark, table, "PARTITIONED BY (stream_created)")
    merge(frame(put("a", 1)), str(table))
    assert DeltaTable(table).history(1)[0]["engineInfo"].startswith("Apache-Spark")
    with pytest.raises(ConfigurationError, match="partition column 'stream_created' is a TIMEST"):
        merge(frame(put("a", 3)), str(table), engine="delta-rs")


LAYOUT = (
    '{"scd_type":1,"keys":["id"],"sequence":"bigint","order":["seq"],"deletes":"remove",'
    '"times":false,"table_id":""}'
)


def create_for_events(
    spark: SparkSession, table: Path, columns: str, after: str = "", deletes: str = "remove"
) -> None:
    """Create a table for events with the key ``id`` and the sequence ``seq``."""
    layout = LAYOUT.replace("remove", deletes)
    spark.sql(
        f"CREATE TABLE delta.`{table}` ({columns}) USING delta {after} "
        f"TBLPROPERTIES ('nats_stream_source.cdc' = '{layout}')"
    )


@pytest.mark.parametrize("engine", ["auto", "spark", "delta-rs"])
def test_key_of_type_char_is_refused(
    spark: SparkSession, frame: Frame, tmp_path: Path, engine: Engine
) -> None:
    """Spark stores 'a' with spaces and finds it without them: two merges would make two rows."""
    error = r"'(key|id)'.* CHAR\(5\)"
    entries, events = tmp_path / "entries", tmp_path / "events"
    columns = COLUMNS.replace("key STRING", "key CHAR(5)")
    spark.sql(f"CREATE TABLE delta.`{entries}` ({columns}) USING delta")
    with pytest.raises(ConfigurationError, match=error):
        merge(frame(put("a", 1)), entries, engine=engine)
    create_for_events(spark, events, "id CHAR(5), seq BIGINT")
    batch = spark.sql("SELECT 'a' AS id, 1L AS seq")
    with pytest.raises(ConfigurationError, match=error):
        merge(batch, events, keys="id", sequence_by="seq", engine=engine)
    assert [DeltaTable(path).version() for path in (entries, events)] == [0, 0]


@pytest.mark.parametrize("kind", ["CHAR(5)", "VARCHAR(5)", "STRUCT<a: VARCHAR(5)>"])
def test_length_of_texts_is_left_to_spark(
    spark: SparkSession, frame: Frame, table: Path, kind: str
) -> None:
    create(spark, table, f"n {kind}")
    text = F.lit("ab") if kind[0] != "S" else F.struct(F.lit("ab").alias("a"))
    with pytest.raises(ConfigurationError, match=r"column 'n' has the length of .*CHAR\(5\)"):
        merge(frame(put("a", 1)).withColumn("n", text), table, engine="delta-rs")
    if kind == "CHAR(5)":
        merge(frame(put("a", 1)).withColumn("n", text), table)
        assert [row.n for row in spark.read.format("delta").load(str(table)).collect()] == ["ab   "]


@pytest.mark.parametrize("engine", ["auto", "spark", "delta-rs"])
def test_partition_of_type_binary_is_refused(
    spark: SparkSession, frame: Frame, tmp_path: Path, engine: Engine
) -> None:
    """Spark and merge-on-read write its bytes as UTF-8, delta-rs as the text of escapes."""
    entries, events = tmp_path / "entries", tmp_path / "events"
    create(spark, entries, "PARTITIONED BY (value)")
    with pytest.raises(ConfigurationError, match="partition column 'value' is a BINARY"):
        merge(frame(put("a", 1)), entries, engine=engine)
    create_for_events(spark, events, "id BINARY, seq BIGINT", "PARTITIONED BY (id)")
    batch = spark.sql("SELECT X'FF01' AS id, 1L AS seq")
    with pytest.raises(ConfigurationError, match="partition column 'id' is a BINARY"):
        merge(batch, events, keys="id", sequence_by="seq", engine=engine)
    assert [DeltaTable(path).version() for path in (entries, events)] == [0, 0]


@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("kind", ["DOUBLE", "FLOAT"])
def test_partition_of_floating_numbers(
    spark: SparkSession, table: Path, kind: str, vectors: bool
) -> None:
    """delta-rs names a directory by all digits, which are too many for a file system."""
    create_for_events(spark, table, f"id {kind}, seq BIGINT", "PARTITIONED BY (id)")
    rules: dict[str, Any] = {"keys": "id", "sequence_by": "seq", "engine": "delta-rs"}
    batches = [spark.sql(f"SELECT CAST('1e30' AS {kind}) AS id, {n}L AS seq") for n in (1, 2)]
    if vectors:
        spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ({DELETION_VECTORS} = true)")
        for batch in batches:
            merge(batch, table, **rules)
        assert spark.read.format("delta").load(str(table)).collect() == batches[1].collect()
    for change in (
        lambda: merge(batches[0], table, **rules, deletion_vectors=False),
        lambda: maintain(spark, table, engine="delta-rs"),
    ):
        with pytest.raises(ConfigurationError, match=f"partition column 'id' is a {kind}"):
            change()


@pytest.mark.parametrize("engine", ENGINES)
def test_column_not_null_of_marked_rows_is_refused(
    spark: SparkSession, frame: Frame, tmp_path: Path, engine: str
) -> None:
    entries, events = tmp_path / "entries", tmp_path / "events"
    columns = COLUMNS.replace("value BINARY", "value BINARY NOT NULL") + ", deleted BOOLEAN"
    spark.sql(f"CREATE TABLE delta.`{entries}` ({columns}) USING delta")
    error = "deletes='mark': column '(value|n)' is NOT NULL, and null in the row of a deleted key"
    with pytest.raises(ConfigurationError, match=error):
        merge(frame(put("a", 1)), entries, deletes="mark", **ENGINES[engine])
    columns = "id INT, seq BIGINT, n INT NOT NULL, deleted BOOLEAN"
    create_for_events(spark, events, columns, deletes="mark")
    rules: dict[str, Any] = {"keys": "id", "sequence_by": "seq", "deletes": "mark"}
    with pytest.raises(ConfigurationError, match=error):
        merge(spark.sql("SELECT 1 AS id, 1L AS seq, 1 AS n"), events, **rules, **ENGINES[engine])
    assert [DeltaTable(path).version() for path in (entries, events)] == [0, 0]


@pytest.mark.parametrize("engine", ENGINES)
def test_field_not_null_that_is_null_is_refused(
    spark: SparkSession, frame: Frame, tmp_path: Path, engine: str
) -> None:
    entries, events = tmp_path / "entries", tmp_path / "events"
    vectors = f"TBLPROPERTIES ({DELETION_VECTORS} = true)"
    create(spark, entries, "n STRUCT<x: INT NOT NULL>")
    create_for_events(spark, events, "id INT, seq BIGINT, n STRUCT<x: INT NOT NULL>")
    rules: dict[str, Any] = {"keys": "id", "sequence_by": "seq"}
    for table in (entries, events) if engine == "merge-on-read" else ():
        spark.sql(f"ALTER TABLE delta.`{table}` SET {vectors}")
    before = [DeltaTable(path).version() for path in (entries, events)]
    for value in ("named_struct('x', CAST(NULL AS INT))", "CAST(NULL AS STRUCT<x: INT>)"):
        error = "a part of column 'n' that is NOT NULL in the table can be null in the batch"
        with pytest.raises(ConfigurationError, match=error):
            merge(frame(put("a", 1)).withColumn("n", F.expr(value)), entries, **ENGINES[engine])
        batch = spark.sql(f"SELECT 1 AS id, 1L AS seq, {value} AS n")
        with pytest.raises(ConfigurationError, match=error):
            merge(batch, events, **rules, **ENGINES[engine])
    assert [DeltaTable(path).version() for path in (entries, events)] == before
    field = F.expr("named_struct('x', 7)")
    merge(frame(put("a", 1)).withColumn("n", field), entries, **ENGINES[engine])
    row = spark.read.format("delta").load(str(entries)).select("n.x").first()
    assert row == (7,)


@pytest.mark.faults  # as the features above
@pytest.mark.parametrize("clause", ["PARTITIONED BY (operation)", "NOT NULL"])
def test_spark_widens_column_by_overwrite_that_keeps_table(
    spark: SparkSession, frame: Frame, table: Path, clause: str
) -> None:
    create(spark, table, clause)
    spark.sql(f"ALTER TABLE delta.`{table}` ADD COLUMN n INT")
    spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ('mine' = '1')")
    merge(frame(put("a", 1)).withColumn("n", F.lit(1)), str(table), engine="spark")
    wide = frame(put("b", 2)).withColumn("n", F.lit(1 << 40))
    if clause == "NOT NULL":  # an overwrite would lose it
        with pytest.raises(ConfigurationError, match=r"'n'.* the column 'key', which is NOT NULL"):
            merge(wide, str(table), engine="spark")
        assert spark.read.format("delta").load(str(table)).count() == 1
        return
    before = DeltaTable(table).metadata()
    merge(wide, str(table), engine="spark")
    after = DeltaTable(table).metadata()
    assert (after.id, after.partition_columns) == (before.id, ["operation"])
    assert after.configuration == before.configuration
    rows = spark.read.format("delta").load(str(table)).select("key", "n").collect()
    assert sorted(map(tuple, rows)) == [("a", 1), ("b", 1 << 40)]
