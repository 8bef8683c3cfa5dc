"""What the engines refuse: each row of the table of refusals is reached, and tables stay.

Where only the driver refuses, Spark merges with ``engine="auto"``.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession, functions as F

from nats_stream_source.delta import Engine, maintain, merge
from nats_stream_source.delta.refused import (
    COLUMN,
    FEATURE,
    FILE,
    PARTITION,
    PATH,
    PATH_CHARACTERS,
    PROPERTY,
    REFUSED,
    STORE,
    row,
)
from nats_stream_source.errors import ConfigurationError
from tests.integration.delta.merge_model import ENGINES, Frame, delete, put, version
from tests.support.delta import change_columns

pytestmark = pytest.mark.delta
COLUMNS = (
    "bucket STRING, key STRING, value BINARY, revision BIGINT, created TIMESTAMP, "
    "operation STRING, stream_created TIMESTAMP"
)
X = "PARTITIONED BY (x)"


def properties(text: str) -> str:
    return f"TBLPROPERTIES (delta.{text})"


def by_property(name: str, value: str, column: str = "") -> tuple[str, str, str, str]:
    return (PROPERTY, f"delta.{name}={value}", column, properties(f"{name} = '{value}'"))


# Kind and name of the row, a column of the table, and a clause of CREATE TABLE.
BY_DRIVER = [
    (FEATURE, "*", "", properties("enableRowTracking = true")),
    (FEATURE, "*", "", properties("enableInCommitTimestamps = true")),
    (FEATURE, "*", "", properties("enableTypeWidening = true")),
    (FEATURE, "*", "", properties("checkpointPolicy = 'v2'")),
    (FEATURE, "*", "", "CLUSTER BY (key)"),
    by_property("enableChangeDataFeed", "true"),
    by_property("columnMapping.mode", "id"),
    by_property("columnMapping.mode", "name", "`x y;` INT"),
    (PROPERTY, "delta.constraints.*", "", "CHECK"),
    (COLUMN, "delta.generationExpression", "x DATE GENERATED ALWAYS AS (DATE(created))", ""),
    (COLUMN, "delta.identity.step", "x BIGINT GENERATED ALWAYS AS IDENTITY", ""),
    (COLUMN, "delta.invariants", "x BIGINT", "INVARIANT"),
    (COLUMN, "CHAR, VARCHAR", "x CHAR(5)", ""),
    (COLUMN, "CHAR, VARCHAR", "x STRUCT<a: VARCHAR(5)>", ""),
    (COLUMN, "VARIANT, INTERVAL, …", "x VARIANT", ""),
    (PARTITION, "TIMESTAMP", "x TIMESTAMP", X),
    (PARTITION, "TIMESTAMP_NTZ", "x TIMESTAMP_NTZ", X),
    (PARTITION, "DOUBLE", "x DOUBLE", X),
    (PARTITION, "FLOAT", "x FLOAT", X),
]
IN_EVERY_RUN = ("delta.enableChangeDataFeed=true", "delta.generationExpression")
by_row = pytest.mark.parametrize(
    ("kind", "name", "column", "clause"),
    [
        # Each takes some seconds: `make test` runs one of each kind.
        pytest.param(*one, marks=[] if one[1] in IN_EVERY_RUN else pytest.mark.faults)
        for one in BY_DRIVER
    ],
)
# With rows of both engines: the columns of the table, a clause, the batch's column, and arguments.
BY_BOTH: dict[tuple[str, str], tuple[str, str, str, dict[str, Any]]] = {
    (PROPERTY, "delta.appendOnly=true"): (COLUMNS, properties("appendOnly = true"), "", {}),
    (COLUMN, "CHAR in a key"): (COLUMNS.replace("key STRING", "key CHAR(5)"), "", "", {}),
    (COLUMN, "VARIANT, … in a batch"): (COLUMNS, "", "parse_json('1')", {}),
    (COLUMN, "NOT NULL with deletes='mark'"): (
        COLUMNS.replace("BINARY", "BINARY NOT NULL") + ", deleted BOOLEAN",
        *("", "", {"deletes": "mark"}),
    ),
    (PARTITION, "BINARY"): (COLUMNS, "PARTITIONED BY (value)", "", {}),
}
ELSEWHERE = {
    (COLUMN, "wider type"),
    (PATH, PATH_CHARACTERS),
    (FILE, "outside of the table"),
    *((one.kind, one.name) for one in REFUSED if one.kind == STORE),
}


def test_rows_of_table_are_reached() -> None:
    rows = {(kind, name) for kind, name, *_ in BY_DRIVER} | BY_BOTH.keys() | ELSEWHERE
    assert rows == {(one.kind, one.name) for one in REFUSED}
    for kind, name, *_ in BY_DRIVER:
        assert row(kind, name).by == "driver"
    assert {key for key in rows if row(*key).by == "both"} == BY_BOTH.keys()


def create(spark: SparkSession, table: Path, columns: str, clause: str) -> None:
    extra = "" if clause in ("CHECK", "INVARIANT") else clause
    spark.sql(f"CREATE TABLE delta.`{table}` ({columns}) USING delta {extra}")
    if clause == "CHECK":
        spark.sql(f"ALTER TABLE delta.`{table}` ADD CONSTRAINT early CHECK (revision < 100)")
    if clause == "INVARIANT":
        rule = {"delta.invariants": '{"expression":{"expression":"x > 0 OR x IS NULL"}}'}
        for checksum in (table / "_delta_log").glob("*.crc"):  # they have the columns, too
            checksum.unlink()
        change_columns(table, lambda fields: fields["x"].update(metadata=rule))


def reason(kind: str, name: str) -> str:
    """A pattern of the text."""
    return re.sub(r"\\{0(!r)?\\}", ".*", re.escape(row(kind, name).reason))


@by_row
def test_driver_refuses_and_auto_takes_spark(
    spark: SparkSession, frame: Frame, table: Path, kind: str, name: str, column: str, clause: str
) -> None:
    create(spark, table, ", ".join(filter(None, (COLUMNS, column))), clause)
    before = version(table)
    error = f"engine='driver': {reason(kind, name)}; use engine='spark'"
    with pytest.raises(ConfigurationError, match=error):
        merge(frame(put("a", 1)), table, engine="driver")
    assert version(table) == before
    merge(frame(put("a", 1), put("b", 2), put("c", 3)), table)
    merge(frame(put("a", 4), delete("b", 5), put("d", 6)), table)
    assert DeltaTable(table).history(1)[0]["engineInfo"].startswith("Apache-Spark")
    rows = spark.read.format("delta").load(str(table)).select("key", "revision").collect()
    assert sorted(map(tuple, rows)) == [("a", 4), ("c", 3), ("d", 6)]
    if "ChangeDataFeed" in name:
        feed = spark.read.format("delta").options(readChangeFeed="true", startingVersion=2)
        changes = feed.load(str(table)).select("_change_type", "key", "revision").collect()
        assert sorted(map(tuple, changes)) == [
            ("delete", "b", 2),
            ("insert", "d", 6),
            ("update_postimage", "a", 4),
            ("update_preimage", "a", 1),
        ]


BOTH_REASONS = "append-only|CHAR|declared length|VARIANT|NOT NULL|BINARY"


@pytest.mark.parametrize("key", BY_BOTH, ids=[name for _, name in BY_BOTH])
def test_both_engines_refuse(
    spark: SparkSession, frame: Frame, table: Path, key: tuple[str, str]
) -> None:
    columns, clause, value, arguments = BY_BOTH[key]
    create(spark, table, columns, clause)
    batch = frame(put("a", 1))
    if value:
        batch = batch.withColumn("v", F.expr(value))
    for engine in (*ENGINES, "auto"):
        with pytest.raises(ConfigurationError, match=BOTH_REASONS):
            merge(batch, table, engine=engine, **arguments)
    assert version(table) == 0


def test_path_that_driver_does_not_take(frame: Frame, tmp_path: Path) -> None:
    """With the default engine Spark changes the table, its state table and maintains both."""
    table = tmp_path / "a%20b[c]\\d|e^f"
    with pytest.raises(ConfigurationError, match="'%20' in a path literally"):
        merge(frame(put("a", 1)), table, engine="driver")
    assert list(tmp_path.iterdir()) == []
    merge(frame(put("a", 1)), table, stored_as_scd_type=2, upkeep=None)
    maintain(frame().sparkSession, table)
    names = {table.name, f"{table.name}__cdc_state"}
    assert {path.name for path in tmp_path.iterdir()} == names
    versions = frame().sparkSession.read.format("delta").load(str(table))
    assert versions.select("revision").collect() == [(1,)]


@pytest.mark.parametrize("vectors", ["true", pytest.param("false", marks=pytest.mark.faults)])
def test_files_of_shallow_clone_are_outside_of_table(
    spark: SparkSession, frame: Frame, tmp_path: Path, vectors: str
) -> None:
    source, clone = tmp_path / "source", tmp_path / "clone"
    create(spark, source, COLUMNS, properties(f"enableDeletionVectors = {vectors}"))
    merge(frame(put("a", 1), put("b", 1), put("c", 1)), source, engine="driver")
    spark.sql(f"DELETE FROM delta.`{source}` WHERE key = 'b'")
    spark.sql(f"CREATE TABLE delta.`{clone}` SHALLOW CLONE delta.`{source}`")
    outside = r"source/.* is outside of the table"
    with pytest.raises(ConfigurationError, match=outside):
        merge(frame(put("a", 2)), clone, engine="driver")
    with pytest.raises(ConfigurationError, match=outside):
        maintain(spark, clone, engine="driver")
    merge(frame(put("a", 2), put("d", 2)), clone)
    # Once all files are its own, the driver changes it, beside the source's vectors in the log.
    spark.sql(f"UPDATE delta.`{clone}` SET value = NULL")
    merge(frame(put("a", 3)), clone, engine="driver")
    maintain(spark, clone, engine="driver")
    for table, expected in (
        (clone, [("a", 3), ("c", 1), ("d", 2)]),
        (source, [("a", 1), ("c", 1)]),
    ):
        rows = spark.read.format("delta").load(str(table)).select("key", "revision").collect()
        assert sorted(map(tuple, rows)) == expected


# Beside the table of refusals: what a batch must not have, one of each check of the rule.


@pytest.mark.parametrize("engine", [ENGINES[0], pytest.param("spark", marks=pytest.mark.faults)])
def test_batch_that_does_not_fit_table(frame: Frame, tmp_path: Path, engine: Engine) -> None:
    batch, table, new = frame(put("a", 1)), tmp_path / "table", tmp_path / "new"
    merge(batch, table, engine="driver")
    refused: list[tuple[DataFrame, Path, str]] = [
        (batch.drop("revision"), new, "it has no column 'revision'"),
        (batch.withColumn("revision", F.lit("1")), table, "is STRING, expected BIGINT"),
        (batch.withColumn("a b", F.lit(1)), new, "has ' ' in its name"),
        (batch.withColumn("operation", F.lit("put")), table, "other than PUT"),
    ]
    for one, path, message in refused:
        with pytest.raises(ConfigurationError, match=message):
            merge(one, path, engine=engine)
    assert version(table) == 1
    assert not new.exists()


def test_directory_that_is_not_table_of_rows(
    spark: SparkSession, frame: Frame, tmp_path: Path
) -> None:
    plain, other = tmp_path / "plain", tmp_path / "other"
    plain.mkdir()
    (plain / "rows.txt").write_text("mine")
    spark.range(1).write.format("delta").save(str(other))
    for engine in ENGINES:
        with pytest.raises(ConfigurationError, match="has files and is not a Delta table"):
            merge(frame(put("a", 1)), plain, engine=engine)
        with pytest.raises(ConfigurationError, match=r"table .* the table has no column 'key'"):
            merge(frame(put("a", 1)), other, engine=engine)
    assert [path.name for path in plain.iterdir()] == ["rows.txt"]
    spark.sql("CREATE TABLE plain (key STRING) USING parquet")
    with pytest.raises(Exception, match=r"(?i)not a delta table"):
        merge(frame(put("a", 1)), "plain")
    spark.sql("DROP TABLE plain")
    shutil.rmtree(plain)
