"""``merge`` with columns of the user, and in the catalog."""

from __future__ import annotations

from pathlib import Path

import pytest
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


def test_table_in_catalog(spark: SparkSession, frame: Frame) -> None:
    spark.sql("CREATE DATABASE IF NOT EXISTS lake")
    for _ in range(2):
        merge_changes("lake.fleet")(frame(put("a", 1)), 0)
    assert [row.key for row in spark.table("lake.fleet").collect()] == ["a"]
    spark.sql("DROP TABLE lake.fleet")
