"""Batches whose columns change: new and missing columns, other types, structs that grow."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from deltalake import DeltaTable
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery

from nats_stream_source.delta import merge, merge_changes
from nats_stream_source.errors import ConfigurationError
from tests.faults.delta.cdc.commits import Commits
from tests.integration.delta.merge_model import Merge, by_driver, spark_in_faults, versions
from tests.support.cdc.events import RULES
from tests.support.delta import rows_of

pytestmark = pytest.mark.delta
EventsOf = Callable[..., DataFrame]


@pytest.fixture
def events(spark: SparkSession) -> EventsOf:
    """Function that builds a DataFrame of events from a schema and rows."""
    return lambda schema, *rows: spark.createDataFrame(list(rows), f"key STRING, seq INT, {schema}")


KEYED: dict[str, Any] = {"keys": ["key"], "sequence_by": "seq"}


@by_driver
def test_new_column_of_invalid_batch_is_not_added(
    events: EventsOf, table: Path, merge: Merge
) -> None:
    rules = {**KEYED, "stored_as_scd_type": 2}
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


@spark_in_faults
def test_table_created_by_other_writer_with_other_rules_is_refused(
    events: EventsOf, table: Path, monkeypatch: pytest.MonkeyPatch, merge: Merge
) -> None:
    """Another writer creates the table just before the merge does."""
    batch = events("a INT", ("k", 1, 5))
    commits = Commits(
        monkeypatch,
        0,
        lambda: merge(batch, str(table), **{**KEYED, "keys": ["key", "a"]}, engine="driver"),
    )
    with pytest.raises(ConfigurationError, match="created with keys"):
        commits.run(lambda: merge(events("a INT", ("k", 2, 1)), str(table), **KEYED))
    assert commits.happened
    assert [row["seq"] for row in rows_of(DeltaTable(table))] == [1]


NARROW = "i INT, s STRUCT<x: FLOAT>, d DECIMAL(4,1), t DATE, n SMALLINT, m MAP<STRING, INT>"
WIDE = "i BIGINT, s STRUCT<y: INT, x: DOUBLE>, d DECIMAL(9,2), t TIMESTAMP_NTZ, n DOUBLE, "
WIDE += "m MAP<STRING, BIGINT>"
DAY, TIME = date(2026, 1, 1), datetime(2026, 1, 2, 3)


@pytest.mark.parametrize(("scd_type", "vectors"), [(1, False), (2, None)])
def test_wider_types_widen_columns_for_every_reader(
    spark: SparkSession, events: EventsOf, table: Path, scd_type: int, vectors: bool | None
) -> None:
    rules: dict[str, Any] = {**RULES, "stored_as_scd_type": scd_type, "engine": "driver"}
    rules["deletion_vectors"] = vectors
    narrow = (1, (0.5,), Decimal("1.5"), DAY, 7, {"k": 1})
    wide = (1 << 40, (3, 0.1), Decimal("10.25"), TIME, 0.25, {"k": 1 << 40})
    first = [(key, seq, *narrow, "U") for seq, key in enumerate("abcd", start=1)]
    merge(events(f"{NARROW}, op STRING", *first), str(table), **rules)
    merge(events(f"{NARROW}, op STRING", ("d", 5, *narrow, "D")), str(table), **rules)
    old = DeltaTable(table)
    merge(events(f"{WIDE}, op STRING", ("b", 7, *wide, "U")), str(table), **rules)
    merge(events(f"{NARROW}, op STRING", ("c", 8, *narrow, "D")), str(table), **rules)

    widened = (1, {"x": 0.5, "y": None}, Decimal("1.50"), datetime(2026, 1, 1), 7.0, [("k", 1)])
    of_b = (1 << 40, {"x": 0.1, "y": 3}, *wide[2:5], [("k", 1 << 40)])
    expected = {("a", 1): widened, ("b", 7): of_b}
    if scd_type == 2:
        expected |= {(key, seq): widened for seq, key in enumerate("bcd", start=2)}
    rows = rows_of(DeltaTable(table))
    assert {(r["key"], r["seq"]): tuple(r[c] for c in "isdtnm") for r in rows} == expected
    polars = pl.scan_delta(str(table)).select("key", "seq", *"isdtn").collect()
    assert {(r[0], r[1]): r[2:] for r in polars.rows()} == {k: v[:5] for k, v in expected.items()}
    by_spark = spark.read.format("delta").load(str(table)).select("key", "seq", *"isdtn").collect()
    assert {(r[0], r[1]): (r[2], r[3].asDict(), *r[4:]) for r in by_spark} == {
        key: v[:5] for key, v in expected.items()
    }
    # A reader that has begun before goes on with its version.
    assert {r["i"] for r in rows_of(old)} == {1}
    assert old.schema().to_json() != DeltaTable(table).schema().to_json()


@pytest.mark.faults
def test_new_column_whose_type_requires_feature_of_table(events: EventsOf, table: Path) -> None:
    """By Spark; tests/integration/delta/driver/test_columns.py has the driver's."""
    merge(events("a INT", ("k", 1, 1)), str(table), **KEYED, engine="spark")
    time = datetime(2026, 1, 1)
    columns = "t STRUCT<n: TIMESTAMP_NTZ>"
    merge(events(columns, ("k", 2, (time,))), str(table), **KEYED, engine="spark")
    assert [row["t"] for row in rows_of(DeltaTable(table))] == [{"n": time}]
    assert "timestampNtz" in (DeltaTable(table).protocol().reader_features or ())


@pytest.mark.parametrize(
    ("schema", "values"),
    [("a INT", (1,)), ("a INT, c INT", (1, None))],
    ids=["other columns", "new column"],
)
def test_columns_of_other_writer_that_batch_lacks_make_versions(
    events: EventsOf, table: Path, schema: str, values: tuple[Any, ...]
) -> None:
    """The driver's tables are open with their earlier columns when the batch is merged."""
    rules: dict[str, Any] = {**RULES, "stored_as_scd_type": 2, "engine": "driver"}
    merger = merge_changes(str(table), **rules)
    merger(events("op STRING, a INT", ("x", 1, "U", 1), ("x", 2, "U", 1), ("y", 1, "U", 1)))
    later = [("y", 20, "U", 1, 2), ("y", 23, "U", 1, None), ("y", 26, "D", None, None)]
    merge(events("op STRING, a BIGINT, n INT", *later), str(table), **rules)
    merger(events(f"op STRING, {schema}", ("x", 1, "U", *values), ("y", 5, "D", *values)))
    rows = [row for row in rows_of(DeltaTable(table)) if row["key"] == "y"]
    versions = sorted((row["__START_AT"], row["__END_AT"], row["n"]) for row in rows)
    assert versions == [(1, 5, None), (20, 23, 2), (23, 26, None)]


@pytest.mark.faults
def test_streaming_read_of_table_stops_once_at_new_column(
    spark: SparkSession, events: EventsOf, table: Path, tmp_path: Path
) -> None:
    rules: dict[str, Any] = {**KEYED, "engine": "driver"}
    merge(events("a INT", ("k", 1, 1)), str(table), **rules)
    read: list[dict[str, Any]] = []

    def start() -> StreamingQuery:
        writer = spark.readStream.format("delta").load(str(table)).writeStream
        writer = writer.foreachBatch(lambda rows, _: read.extend(rows.toArrow().to_pylist()))
        return writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()

    query = start()
    query.processAllAvailable()
    assert read == [{"key": "k", "seq": 1, "a": 1}]
    merge(events("a INT, b INT", ("l", 2, 3, 4)), str(table), **rules)
    with pytest.raises(StreamingQueryException, match=r"(?i)schema"):
        query.processAllAvailable()
    query = start()
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    assert read[1:] == [{"key": "l", "seq": 2, "a": 3, "b": 4}]
