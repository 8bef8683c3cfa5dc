"""``merge`` with columns of the user, in the catalog, and with a session in another time zone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from nats_stream_source.delta import merge_changes
from tests.integration.delta.merge_model import (
    Entry,
    Frame,
    Merge,
    delete,
    put,
    spark_in_faults,
)
from tests.integration.delta.table_content import stored

pytestmark = pytest.mark.delta


@spark_in_faults
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
        ("b", None, None, None, True),
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


@spark_in_faults
@pytest.mark.parametrize("existing", [False, True])
def test_table_gets_only_comments_of_column_metadata(
    spark: SparkSession, frame: Frame, table: Path, merge: Merge, existing: bool
) -> None:
    """The rest would be rules of another table, with which this one could not be read."""
    fields = [
        F.lit("1" if column == "char" else 1).alias(column, metadata=values)
        for column, values in METADATA.items()
    ]
    if existing:
        merge(frame(put("a", 1)), table)
    for revision in (2, 3):
        batch = frame(put("a", revision)).select("*", *fields, F.struct(*fields).alias("nested"))
        merge(batch, table)
    fields_of_table = json.loads(DeltaTable(table).schema().to_json())["fields"]
    (nested,) = (one["type"]["fields"] for one in fields_of_table if one["name"] == "nested")
    for columns in (fields_of_table, nested):
        of_column = {one["name"]: one["metadata"] for one in columns if one["name"] in METADATA}
        assert of_column == {
            column: values if column == "described" else {} for column, values in METADATA.items()
        }
    rows = spark.read.format("delta").load(str(table)).select("revision", *METADATA, "nested.*")
    assert [[str(value) for value in row] for row in rows.collect()] == [["3", *["1"] * 12]]


def test_table_in_catalog(spark: SparkSession, frame: Frame) -> None:
    spark.sql("CREATE DATABASE IF NOT EXISTS lake")
    for _ in range(2):
        merge_changes("lake.fleet")(frame(put("a", 1)), 0)
    assert [row.key for row in spark.table("lake.fleet").collect()] == ["a"]
    spark.sql("DROP TABLE lake.fleet")


@spark_in_faults
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
