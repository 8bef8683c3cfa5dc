"""``merge`` against the model, and tables with columns of the user, and in the catalog."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from nats_stream_source.delta import Deletes, merge_changes
from tests.integration.delta.merge_model import (
    RECREATED,
    Entry,
    Frame,
    Merge,
    Model,
    both_modes,
    delete,
    purge,
    put,
    spark_in_faults,
)
from tests.integration.delta.table_content import stored, version

pytestmark = pytest.mark.delta
BATCHES: list[list[Entry]] = [
    [],
    [put("a", 3), put("a", 1), put("b", 2), put("c", 4), delete("d", 5), put("e", 6, value=b"")],
    [delete("a", 2), purge("b", 7), put("c", 8, value=None), put("d", 4), put("e", 6)],
    [put("b", 9), put("c", 7), put("a", 1, RECREATED)],
]


@both_modes
def test_entries_of_batches_are_merged(
    frame: Frame, table: Path, deletes: Deletes, merge: Merge
) -> None:
    """One way through each engine; tests/unit/delta/rules/test_entries.py has the cases."""
    model = Model(deletes)
    for number, batch in enumerate(BATCHES):
        for _ in range(2):  # a repeated batch makes no version
            merge(frame(*batch), str(table), deletes=deletes)
        model.merge(batch)
        assert stored(table) == model.stored()
        assert version(table) == number
    names = DeltaTable(table).schema().to_arrow().names
    assert set(names) == set(put("a", 1).stored(deletes))


def test_model_follows_rules() -> None:
    # Expected rows written by hand, so that the model does not repeat an error of the code.
    removed, marked = Model("remove"), Model("mark")
    for model in (removed, marked):
        model.merge([put("a", 1), put("a", 3), put("b", 2)])
        model.merge([delete("a", 4), put("b", 1), delete("c", 5)])
    assert list(removed.rows.values()) == [put("b", 2)]
    assert list(marked.rows.values()) == [delete("a", 4), put("b", 2), delete("c", 5)]


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
