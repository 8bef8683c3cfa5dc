"""``merge`` with user columns, shared tables, catalog tables, and tables that do not match."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from deltalake import DeltaTable, Schema
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from nats_stream_source.delta import Deletes, Engine, merge_changes
from nats_stream_source.delta import merge as merge_batch
from nats_stream_source.delta.cdc.rules import ScdType
from nats_stream_source.delta.driver.storage import schema_of
from nats_stream_source.errors import (
    ConfigurationError,
)
from tests.integration.delta.cdc.conftest import ENGINES
from tests.integration.delta.merge_model import (
    RECREATED,
    Entry,
    Frame,
    Merge,
    delete,
    put,
    spark_in_faults,
)
from tests.integration.delta.table_content import stored, version

pytestmark = pytest.mark.delta


def test_columns_of_user(frame: Frame, table: Path, merge: Merge) -> None:
    """Parsed and dropped columns, a column name with a hyphen, and a column of the table only."""

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


# Metadata of columns with the value 1, as tables have them that a batch is read from.
METADATA: dict[str, dict[str, str]] = {
    "default": {"CURRENT_DEFAULT": "5", "EXISTS_DEFAULT": "5"},
    "generated": {"delta.generationExpression": "revision + 1"},
    "invariant": {"delta.invariants": '{"expression":{"expression":"invariant > 5"}}'},
    "char": {"__CHAR_VARCHAR_TYPE_STRING": "char(3)"},
    "mapped": {"delta.columnMapping.physicalName": "col-x"},
    "described": {"comment": "of the batch"},
}


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize(
    "name", ["merge-on-read", "copy-on-write", pytest.param("spark", marks=pytest.mark.faults)]
)
def test_table_gets_only_comments_of_column_metadata(
    spark: SparkSession, frame: Frame, table: Path, name: str, existing: bool
) -> None:
    """The rest would be rules of another table, with which this one could not be read."""
    options = ENGINES[name]
    fields = [
        F.lit("1" if column == "char" else 1).alias(column, metadata=values)
        for column, values in METADATA.items()
    ]
    if existing:
        merge_batch(frame(put("a", 1)), table, **options)
    for revision in (2, 3):
        batch = frame(put("a", revision)).select("*", *fields, F.struct(*fields).alias("nested"))
        merge_batch(batch, table, **options)
    schema = schema_of(DeltaTable(table))
    for columns in (schema, schema["nested"].dataType):
        assert isinstance(columns, StructType)
        of_column = {field.name: field.metadata for field in columns if field.name in METADATA}
        assert of_column == {
            column: values if column == "described" else {} for column, values in METADATA.items()
        }
    rows = spark.read.format("delta").load(str(table)).select("revision", *METADATA, "nested.*")
    assert [[str(value) for value in row] for row in rows.collect()] == [["3", *["1"] * 12]]


def test_buckets_that_share_table(frame: Frame, table: Path, merge: Merge) -> None:
    merge(frame(put("a", 1), put("a", 9, bucket="yard")), str(table))
    assert [(row["bucket"], row["revision"]) for row in stored(table)] == [
        ("fleet", 1),
        ("yard", 9),
    ]
    merge(frame(put("a", 2), delete("a", 3)), str(table))
    assert [(row["bucket"], row["revision"]) for row in stored(table)] == [("yard", 9)]


@pytest.mark.parametrize("engine", ["auto"])
def test_table_in_catalog(spark: SparkSession, frame: Frame, engine: Engine) -> None:
    spark.sql("CREATE DATABASE IF NOT EXISTS lake")
    for _ in range(2):
        merge_changes("lake.fleet", engine=engine)(frame(put("a", 1)), 0)
    assert [row.key for row in spark.table("lake.fleet").collect()] == ["a"]
    spark.sql("DROP TABLE lake.fleet")


@pytest.mark.parametrize("engine", ["spark"], indirect=True)
def test_table_of_other_format_is_not_replaced(
    spark: SparkSession, frame: Frame, merge: Merge
) -> None:
    spark.sql("CREATE TABLE plain (key STRING) USING parquet")
    with pytest.raises(Exception, match=r"(?i)not a delta table"):
        merge(frame(put("a", 1)), "plain")
    spark.sql("DROP TABLE plain")


@pytest.mark.parametrize("engine", ["delta-rs"], indirect=True)
@pytest.mark.parametrize("column", ["key", "revision", "operation", "stream_created"])
def test_column_required_is_missing(frame: Frame, table: Path, column: str, merge: Merge) -> None:
    with pytest.raises(
        ConfigurationError, match=f"could not merge the batch: it has no column '{column}'"
    ):
        merge(frame(put("a", 1)).drop(column), str(table))
    assert not table.exists()


@pytest.mark.parametrize("scd_type", [1, 2])
@pytest.mark.parametrize(
    ("column", "kind", "expected"),
    [
        ("revision", "STRING", "BIGINT, another integer or DECIMAL"),
        ("revision", "FLOAT", "BIGINT"),
        ("revision", "DECIMAL(20,2)", "BIGINT"),
        ("stream_created", "DATE", "TIMESTAMP or TIMESTAMP_NTZ"),
        ("stream_created", "STRING", "TIMESTAMP"),
        ("operation", "INT", "STRING"),
    ],
)
def test_column_of_order_has_type_that_is_not_exact(
    frame: Frame, table: Path, column: str, kind: str, expected: str, scd_type: ScdType
) -> None:
    batch = frame(put("a", 1)).withColumn(column, F.lit(None).cast(kind))
    error = f"column '{column}' is {re.escape(kind)}, expected {expected}.*; keep the column"
    for arguments in ENGINES.values():
        with pytest.raises(ConfigurationError, match=error):
            merge_changes(str(table), stored_as_scd_type=scd_type, **arguments)(batch)
    assert not table.exists()
    if scd_type == 1:
        schema = to_arrow_schema(batch.drop("delta", "initial").schema, timezone="UTC")
        DeltaTable.create(str(table), Schema.from_arrow(schema))
        for arguments in ENGINES.values():
            with pytest.raises(ConfigurationError, match=f"use table .* column '{column}' is"):
                merge_changes(str(table), **arguments)(frame(put("a", 1)))
        assert version(table) == 0


@pytest.mark.parametrize(
    "engine", [*list(ENGINES)[:2], pytest.param("spark", marks=pytest.mark.faults)]
)
@pytest.mark.parametrize(
    ("column", "kind"),
    [
        ("revision", "SMALLINT"),
        ("revision", "DECIMAL(20,0)"),
        ("stream_created", "TIMESTAMP_NTZ"),
    ],
)
def test_column_of_order_has_other_type_that_is_exact(
    frame: Frame, table: Path, column: str, kind: str, engine: str
) -> None:
    for entry in (put("a", 10), put("a", 9), put("a", 8, RECREATED)):
        batch = frame(entry).withColumn(column, F.col(column).cast(kind))
        merge_changes(str(table), **ENGINES[engine])(batch)
    assert [(row["key"], row["revision"]) for row in stored(table)] == [("a", 8)]


@spark_in_faults
def test_tables_that_do_not_fit(
    spark: SparkSession, frame: Frame, tmp_path: Path, merge: Merge
) -> None:
    batch = frame(put("a", 1))
    removed, marked, other = (str(tmp_path / name) for name in ("removed", "marked", "other"))
    merge(batch, removed)
    merge(batch, marked, deletes="mark")
    spark.range(1).write.format("delta").save(other)
    refused: list[tuple[DataFrame, str, Deletes, str]] = [
        (batch, removed, "mark", "deletes='mark': it has no column 'deleted'.*deletes='remove'"),
        (batch, marked, "remove", "deletes='remove': it has a column 'deleted'.*deletes='mark'"),
        (batch, other, "remove", "table .* the table has no column 'key'"),
        (batch.withColumn("deleted", F.lit(1)), marked, "mark", "its own column 'deleted'"),
        (batch.withColumn("VALUE", F.lit(1)), removed, "remove", "'VALUE' and .* 'value' differ"),
        (batch.drop("bucket"), removed, "remove", "no column 'bucket'"),
        (
            batch.withColumn("value", F.col("revision")),
            removed,
            "remove",
            "'value' is BIGINT in the batch, expected BINARY as in the table; cast the column",
        ),
        (
            batch.withColumn("created", F.col("created").cast("timestamp_ntz")),
            removed,
            "remove",
            "'created' is TIMESTAMP_NTZ in the batch, expected TIMESTAMP",
        ),
        (batch.withColumn("key", F.lit(None)), removed, "remove", "null in one of"),
        (batch.withColumn("operation", F.lit("put")), removed, "remove", "other than PUT"),
        (batch, removed, "drop", "deletes is 'drop'"),
    ]
    for frame_, table, deletes, message in refused:
        before = [version(Path(one)) for one in (removed, marked, other)]
        with pytest.raises(ConfigurationError, match=message):
            merge(frame_, table, deletes=deletes)
        assert [version(Path(one)) for one in (removed, marked, other)] == before
    with pytest.raises(ConfigurationError, match="expected 'remove' or 'mark'"):
        merge_changes(removed, deletes="drop")


def test_path_with_other_files_is_refused(
    spark: SparkSession, frame: Frame, tmp_path: Path, merge: Merge
) -> None:
    plain = tmp_path / "plain"
    spark.range(3).write.parquet(str(plain))
    before = sorted(plain.iterdir())
    with pytest.raises(
        ConfigurationError, match="the directory has files and is not a Delta table"
    ):
        merge(frame(put("a", 1)), str(plain))
    assert sorted(plain.iterdir()) == before


def test_session_in_other_time_zone(
    spark: SparkSession, frame: Frame, table: Path, merge: Merge
) -> None:
    """The order of entries and the stored instants do not depend on the session."""
    merge(frame(put("a", 5), put("b", 6)), str(table))
    expected = stored(table)
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        merge(frame(put("a", 5), put("b", 4)), str(table))
        assert stored(table) == expected
        merge(frame(put("c", 7)), str(table))
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert stored(table) == [*expected, put("c", 7).stored("remove")]


@spark_in_faults
def test_smaller_numbers_become_those_of_table(frame: Frame, table: Path, merge: Merge) -> None:
    merge(frame(put("a", 1)).withColumn("n", F.lit(1).cast("bigint")), str(table))
    merge(frame(put("a", 2)).withColumn("n", F.lit(2).cast("int")), str(table))
    assert [row["n"] for row in stored(table)] == [2]
