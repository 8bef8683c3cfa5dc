"""Batches whose columns change: new and missing columns, other types, structs that grow."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from nats_stream_source.delta import merge, merge_changes
from nats_stream_source.errors import ConfigurationError
from tests.integration.delta.cdc.conftest import ENGINES
from tests.support.cdc.changing_columns import (
    STREAM_CREATED,
    Batch,
    Generator,
    Model,
    Rules,
    normalized,
)
from tests.support.delta import rows_of

pytestmark = pytest.mark.delta
EVENTS: dict[str, Any] = {
    "keys": ["key"],
    "sequence_by": "seq",
    "apply_as_deletes": "op = 'D'",
    "except_column_list": ["op"],
}
ARGUMENTS: dict[Rules, dict[str, Any]] = {
    "entries": {},
    "entries-mark": {"deletes": "mark"},
    "scd1": EVENTS,
    "scd1-mark": {**EVENTS, "deletes": "mark"},
    "scd2": {**EVENTS, "stored_as_scd_type": 2},
}
EventsOf = Callable[..., DataFrame]


@pytest.fixture
def events(spark: SparkSession) -> EventsOf:
    """Function that builds a DataFrame of events from a schema and rows."""
    return lambda schema, *rows: spark.createDataFrame(list(rows), f"key STRING, seq INT, {schema}")


@pytest.mark.parametrize("seed", range(10))
def test_random_columns_give_rows_of_rules(spark: SparkSession, tmp_path: Path, seed: int) -> None:
    run_schedule(spark, tmp_path, seed, ["merge-on-read", "copy-on-write"])


@pytest.mark.parametrize("seed", [1002, 1004])
def test_random_columns_give_rows_of_rules_with_every_engine(
    spark: SparkSession, tmp_path: Path, seed: int
) -> None:
    run_schedule(spark, tmp_path, seed, list(ENGINES), batches=4)


@pytest.mark.faults
@pytest.mark.parametrize("part", range(10))
def test_many_random_columns_give_rows_of_rules(
    spark: SparkSession, tmp_path: Path, part: int
) -> None:
    for seed in range(2000 + part * 50, 2050 + part * 50):
        engines = list(ENGINES) if seed // 5 % 5 == 0 else ["merge-on-read", "copy-on-write"]
        run_schedule(spark, tmp_path / str(seed), seed, engines)


EVERY_ENGINE = pytest.mark.parametrize("engine", ENGINES)


@EVERY_ENGINE
def test_new_column_of_invalid_batch_is_not_added(
    events: EventsOf, table: Path, engine: str
) -> None:
    rules = {"keys": ["key"], "sequence_by": "seq", "stored_as_scd_type": 2, **ENGINES[engine]}
    merge(events("a INT", ("k", 1, 1)), str(table), **rules)
    before = versions(table)
    with pytest.raises(ConfigurationError, match="null in a key"):
        merge(events("a INT, b INT", ("k", None, 1, 2)), str(table), **rules)
    with pytest.raises(ConfigurationError, match="'A' and the table's column 'a' differ in case"):
        merge(events("A INT, b INT", ("k", 2, 1, 2)), str(table), **rules)
    other = events("a INT, b INT", ("k", 2, 1, 2)).withColumn("seq", F.lit(2).cast("long"))
    with pytest.raises(ConfigurationError, match="a sequence_by of type 'int'"):
        merge(other, str(table), **rules)
    assert versions(table) == before


@EVERY_ENGINE
def test_wider_type_is_refused_where_table_cannot_have_it(
    events: EventsOf, table: Path, engine: str
) -> None:
    rules = {"keys": ["key"], "sequence_by": "seq", **ENGINES[engine]}
    merge(events("a INT, s STRUCT<x: FLOAT>", ("k", 1, 1, (0.5,))), str(table), **rules)
    before = versions(table)
    for schema, row, types in (
        ("a BIGINT, s STRUCT<x: FLOAT>", (1, (0.5,)), "'a' is BIGINT in the batch, expected INT"),
        ("a INT, s STRUCT<x: DOUBLE>", (1, (0.5,)), "'s' is STRUCT<X:DOUBLE> .*STRUCT<X:FLOAT>"),
    ):
        with pytest.raises(ConfigurationError, match=f"{types}.*enableTypeWidening"):
            merge(events(schema, ("k", 2, *row)), str(table), **rules)
    assert versions(table) == before


@pytest.mark.parametrize("scd_type", [1, 2])
def test_spark_widens_types_of_table_with_type_widening(
    spark: SparkSession, events: EventsOf, table: Path, scd_type: int
) -> None:
    rules = {"keys": ["key"], "sequence_by": "seq", "stored_as_scd_type": scd_type}
    merge(events("a INT, d DECIMAL(4,1)", ("k", 1, 1, None)), str(table), **rules)
    spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ('delta.enableTypeWidening'='true')")
    wide = 1 << 40
    merge(events("a BIGINT, d DECIMAL(9,2)", ("k", 3, wide, None)), str(table), **rules)
    merge(events("a SMALLINT", ("k", 2, 7), ("l", 4, 8)), str(table), **rules)
    rows = spark.read.format("delta").load(str(table)).orderBy("key", "seq")
    assert dict(rows.dtypes)["a"] == "bigint"
    assert dict(rows.dtypes)["d"] == "decimal(9,2)"
    versions = [1, 7, wide, 8] if scd_type == 2 else [wide, 8]
    assert [row.a for row in rows.collect()] == versions


@EVERY_ENGINE
def test_new_column_whose_type_requires_feature_of_table(
    events: EventsOf, table: Path, engine: str
) -> None:
    rules = {"keys": ["key"], "sequence_by": "seq", **ENGINES[engine]}
    merge(events("a INT", ("k", 1, 1)), str(table), **rules)
    time = datetime(2026, 1, 1)
    merge(events("t STRUCT<n: TIMESTAMP_NTZ>", ("k", 2, (time,))), str(table), **rules)
    assert [row["t"] for row in rows_of(DeltaTable(table))] == [{"n": time}]
    assert "timestampNtz" in (DeltaTable(table).protocol().reader_features or ())


def test_new_fields_are_read_by_other_readers_in_old_and_new_rows(
    spark: SparkSession, events: EventsOf, table: Path
) -> None:
    """A reader that goes on is a streaming query of Spark, and polars scans both kinds of rows."""
    rules = {"keys": ["key"], "sequence_by": "seq"}
    merge(events("s STRUCT<x: INT>", ("k", 1, (1,))), str(table), **rules)
    old = DeltaTable(table)
    merge(events("n INT, s STRUCT<y: INT, x: INT>", ("l", 2, 5, (3, 4))), str(table), **rules)
    assert [row["s"] for row in rows_of(old)] == [{"x": 1}]
    rows = spark.read.format("delta").load(str(table)).orderBy("key").collect()
    assert [(row.n, row.s.asDict()) for row in rows] == [
        (None, {"x": 1, "y": None}),
        (5, {"x": 4, "y": 3}),
    ]


def run_schedule(
    spark: SparkSession, directory: Path, seed: int, engines: list[str], batches: int = 8
) -> None:
    rng = random.Random(seed)
    rules = list(ARGUMENTS)[seed % len(ARGUMENTS)]
    table = directory / "fleet"
    arguments = ARGUMENTS[rules]
    mergers = {name: merge_changes(str(table), **arguments, **ENGINES[name]) for name in engines}
    generator, model, seen = Generator(rng, 4), Model(rules), list[Batch]()
    for _ in range(batches):
        batch = rng.choice(seen) if seen and rng.random() < 0.2 else generator.batch()
        seen.append(batch)
        engine = rng.choice(engines)
        if len(seen) > 1 and rng.random() < 0.3:
            refused(spark, rules, table, mergers[engine], batch)
        mergers[engine](frame(spark, rules, batch))
        model.merge(batch)
        assert stored(table, rules, model) == sorted(model.rows()), (seed, engine)


def refused(spark: SparkSession, rules: Rules, table: Path, merger: Any, batch: Batch) -> None:
    """A batch with a column of another type changes nothing."""
    columns = [field.name for field in DeltaTable(table).schema().fields]
    known = [f for f in batch.fields if f.name in columns and f.name in batch.columns]
    if not known:
        return
    bad = frame(spark, rules, batch).withColumn(known[0].name, F.lit(b"x"))
    before = versions(table)
    with pytest.raises(ConfigurationError, match=r"BINARY in the batch, expected .* as in the"):
        merger(bad)
    assert versions(table) == before


def versions(table: Path) -> list[int]:
    state = table.with_name(f"{table.name}__cdc_state")
    return [DeltaTable(one).version() for one in (table, state) if one.exists()]


def frame(spark: SparkSession, rules: Rules, batch: Batch) -> DataFrame:
    entries = rules.startswith("entries")
    own = [StructField("key", StringType())]
    if entries:
        own += [StructField("revision", LongType()), StructField("operation", StringType())]
        own += [StructField("stream_created", TimestampType())]
    else:
        own += [StructField("seq", LongType()), StructField("op", StringType())]
    rows = []
    for change in batch.changes:
        operation = ("DEL" if change.delete else "PUT") if entries else "UD"[change.delete]
        created = (STREAM_CREATED,) if entries else ()
        rows.append((change.key, change.seq, operation, *created, *change.values.values()))
    return spark.createDataFrame(rows, StructType([*own, *batch.fields]))


def stored(table: Path, rules: Rules, model: Model) -> list[tuple[Any, ...]]:
    sequence = "revision" if rules.startswith("entries") else "seq"
    return sorted(
        (
            row["key"],
            row[sequence],
            row.get("__START_AT"),
            row.get("__END_AT"),
            row.get("deleted", False),
            *(normalized(row[name]) for name in model.columns),
        )
        for row in rows_of(DeltaTable(table))
    )
