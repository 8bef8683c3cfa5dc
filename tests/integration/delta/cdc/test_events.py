"""``merge`` with events: changing columns, all rules, and the history of a bucket's entries."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession, functions as F
from pyspark.sql.streaming.query import StreamingQuery

from nats_stream_source.delta import Engine, Upkeep, maintain, merge, merge_changes
from nats_stream_source.errors import ConfigurationError
from tests.faults.delta.cdc.commits import Commits
from tests.integration.delta.merge_model import (
    Entry,
    EventFrame,
    Frame,
    Merge,
    by_driver,
    columns_of,
    delete,
    history_of,
    put,
    spark_in_faults,
    versions,
)
from tests.support.cdc.events import RULES, Event
from tests.support.delta import rows_of
from tests.support.delta_readers import by_deltalake, by_polars
from tests.support.paths import ROOT

pytestmark = pytest.mark.delta


# The second event changes nothing but the sequence, the third one `a`, and the fourth one `b`.
FORMS = [("k", 1, 1, "U", 1, "x"), ("k", 1, 2, "U", 1, "x"), ("k", 2, 1, "U", 2, "x")]
FORMS += [("k", 2, 3, "U", 2, "y"), ("gone", 1, 1, "U", 1, "x"), ("gone", 1, 2, "D", 5, "z")]


@pytest.fixture
def batch(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame(FORMS, "key STRING, high INT, low INT, op STRING, a INT, b STRING")


def _numbers(sequence: Any) -> list[int]:
    if not isinstance(sequence, dict):
        return [sequence]
    return [number for part in sequence.values() for number in _numbers(part)]


def versions_of(table: Path) -> list[tuple[Any, ...]]:
    """The numbers of the start, and the values, of each version of the key k."""
    rows = [row for row in rows_of(DeltaTable(table)) if row["key"] == "k"]
    return sorted((*_numbers(row["__START_AT"]), row["a"], row["b"]) for row in rows)


STARTS, ALL = [(1, 1), (2, 1), (2, 3)], ["key", "high", "low", "a"]


@pytest.mark.parametrize(
    ("sequence", "starts", "selected", "stored"),
    [
        (lambda: ["high", "low"], STARTS, ["low", "a", "key"], [2, 3]),
        (lambda: [F.col("HIGH"), F.col("low").cast("long")], STARTS, ALL, [2, 3]),
        (lambda: "struct(high, low)", STARTS, ALL, [2, 3]),
        (lambda: F.struct("high", F.struct("low")), STARTS, ALL, [2, 3]),
        # A column from which a sequence is computed can be a payload with the values.
        (lambda: "high * 10 + low", [(11,), (12,), (21,), (23,)], ["a", "key"], [23]),
    ],
    ids=["names", "Columns", "struct", "struct of Columns", "computed"],
)
@spark_in_faults
def test_columns_of_sequence_make_no_versions_and_are_stored_if_not_selected(
    batch: DataFrame,
    table: Path,
    merge: Merge,
    sequence: Callable[[], Any],
    starts: list[tuple[int, ...]],
    selected: list[str],
    stored: list[int],
) -> None:
    rules = {"keys": "key", "apply_as_deletes": F.col("op") == "D", "sequence_by": sequence()}
    history = table.with_name("history")
    merge(batch, str(history), stored_as_scd_type=2, **rules)
    values = [(1, "x")] * (len(starts) - 2) + [(2, "x"), (2, "y")]
    assert versions_of(history) == [(*of, *row) for of, row in zip(starts, values, strict=True)]

    rules["column_list"] = selected
    merge(batch.where("high = 1 AND op = 'U'"), str(table), **rules)
    for _repeat in range(2):
        merge(batch, str(table), **rules)
        assert DeltaTable(table).version() == 2
    names = DeltaTable(table).schema().to_arrow().names
    assert names == [*(name for name in batch.columns if name in selected), "__SEQUENCE"]
    ((key, found, a),) = columns_of(table, "key", "__SEQUENCE", "a")
    assert (key, _numbers(found), a) == ("k", stored, 2)


@by_driver
def test_excepted_column_makes_no_version(batch: DataFrame, table: Path, merge: Merge) -> None:
    rules = {"keys": ["key"], "apply_as_deletes": "op = 'D'", "sequence_by": ["high", "low"]}
    rules |= {"stored_as_scd_type": 2, "track_history_except_column_list": ["b"]}
    merge(batch, str(table), **rules)
    assert versions_of(table) == [(1, 1, 1, "x"), (2, 1, 2, "y")]


ONE = [Event("a", 1, "U", 1, "x")]


@by_driver
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"sequence_by": "nothing + 1"}, "sequence_by or apply_as_deletes is invalid"),
        ({"apply_as_deletes": "seq + 1"}, "apply_as_deletes is invalid .*BIGINT"),
    ],
)
def test_rules_that_do_not_fit_batch_are_refused(
    merge_events: Merge, table: Path, arguments: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigurationError, match=error):
        merge_events(ONE, **arguments)
    assert not table.exists()


@by_driver
def test_excluded_column_can_have_reserved_name(
    event_frame: EventFrame, table: Path, merge: Merge
) -> None:
    batch = event_frame(ONE).withColumnRenamed("op", "__delete")
    arguments = {**RULES, "apply_as_deletes": "__delete = 'D'", "except_column_list": ["__delete"]}
    merge(batch, str(table), **arguments)
    assert columns_of(table, "key", "a") == [("a", 1)]


@spark_in_faults
def test_null_in_first_batch_leaves_no_tables_and_in_later_one_changes_nothing(
    event_frame: EventFrame, merge: Merge, merge_events: Merge, table: Path
) -> None:
    null: Any = None
    bad = [Event("b", null, "U", 2, "y"), Event("b", 6, "U", 2, "y")]
    error = "1 events have a null .* has key='b', .*None"
    with pytest.raises(ConfigurationError, match=error):
        merge_events(bad, stored_as_scd_type=2)
    assert list(table.parent.iterdir()) == []
    merge_events(ONE, stored_as_scd_type=2)
    before = versions(table)
    batch = event_frame([Event("a", 2, "U", 2, "y"), *bad]).withColumn("new", F.lit(1))
    with pytest.raises(ConfigurationError, match=error):
        merge(batch, str(table), **RULES, stored_as_scd_type=2)
    assert versions(table) == before
    assert columns_of(table, "key", "seq") == [("a", 1)]


@pytest.mark.parametrize("scd_type", [1, 2])
@spark_in_faults
def test_equal_sequences_with_other_values_are_counted_and_warned_of_once(
    event_frame: EventFrame,
    table: Path,
    caplog: pytest.LogCaptureFixture,
    engine: Any,
    scd_type: int,
) -> None:
    rules = {**RULES, "engine": engine, "stored_as_scd_type": scd_type}
    merger = merge_changes(str(table), **rules)
    one, other, less = (Event("a", 1, "U", a, "x") for a in (1, 2, 0))
    for batch, counted in (([one, one], 0), ([one, other], 1), ([less], 2)):
        merger(event_frame(batch))
        assert merger.contradictions == counted
    assert columns_of(table, "key", "a") == [("a", 2)]
    warning = "events of one key and sequence have different values"
    assert caplog.text.count(warning) == 1


PAGE = (ROOT / "docs" / "delta.md").read_text()
TUESDAY, CHANGES = re.findall(r'history\.execute\("""\n(.*?)"""\)', PAGE, re.DOTALL)


def as_of(table: Path, time: datetime) -> dict[str, bytes]:
    """Return the values at a time, by the query of the documentation."""
    query = TUESDAY.replace("2026-11-24T12:00:00Z", time.strftime("%Y-%m-%dT%H:%M:%S.%fZ"))
    assert query != TUESDAY
    rows = QueryBuilder().register("fleet", DeltaTable(table)).execute(query)
    return {row["key"]: row["value"].encode() for row in pa.table(rows).to_pylist()}


@spark_in_faults
def test_history_has_versions_with_times_of_entries(table: Path, merge_entries: Merge) -> None:
    first, same, second = put("a", 1), put("a", 3, value=b"a@1"), put("a", 5)
    removed, again = delete("a", 7), put("a", 9, value=b"a@5")
    other = put("b", 2)
    log: list[list[Entry]] = [[first, other], [same, second], [removed], [again, first, same]]
    for batch in log:
        merge_entries(*batch, stored_as_scd_type=2)
    assert history_of(table, "valid_from", "valid_to") == [
        ("a", b"a@1", 1, 5, first.created, second.created),
        ("a", b"a@5", 5, 7, second.created, removed.created),
        ("a", b"a@5", 9, None, again.created, None),
        ("b", b"b@2", 2, None, other.created, None),
    ]
    assert as_of(table, second.created) == {"a": b"a@5", "b": b"b@2"}
    assert as_of(table, removed.created) == {"b": b"b@2"}
    day, next_day = (f"{first.created.date() + timedelta(days)}" for days in (0, 1))
    query = CHANGES.replace("2026-11-24", day).replace("2026-11-25", next_day)
    changed = QueryBuilder().register("fleet", DeltaTable(table)).execute(query)
    assert len(pa.table(changed)) == 4


@spark_in_faults
def test_maintain_compacts_table_and_state(
    spark: SparkSession, frame: Frame, table: Path, engine: Engine
) -> None:
    state = table.with_name("fleet__cdc_state")
    for number in range(1, 5):
        batch = [put(f"key {number}", number), delete(f"gone {number}", number)]
        merge(frame(*batch), str(table), stored_as_scd_type=2, upkeep=None, engine=engine)
    rows, recorded = history_of(table), rows_of(DeltaTable(state))
    assert len(DeltaTable(state).file_uris()) == len(recorded) == 4
    result = maintain(spark, str(table), engine=engine, upkeep=Upkeep(retention_hours=1000))
    assert (result.compacted, result.written) == (8, 2)
    assert len(DeltaTable(table).file_uris()) == len(DeltaTable(state).file_uris()) == 1
    assert history_of(table) == rows


EventsOf = Callable[..., DataFrame]


@pytest.fixture
def events(spark: SparkSession) -> EventsOf:
    """Function that builds a DataFrame of events from a schema and rows."""
    return lambda schema, *rows: spark.createDataFrame(list(rows), f"key STRING, seq INT, {schema}")


KEYED: dict[str, Any] = {"keys": ["key"], "sequence_by": "seq"}


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
    by_spark = spark.read.format("delta").load(str(table)).collect()
    for rows, columns in (
        (by_deltalake(table), "isdtnm"),
        (by_polars(table), "isdtn"),
        ([row.asDict(recursive=True) for row in by_spark], "isdtn"),
    ):
        found = {(row["key"], row["seq"]): tuple(row[c] for c in columns) for row in rows}
        assert found == {key: values[: len(columns)] for key, values in expected.items()}
    # A reader that has begun before goes on with its version.
    assert {r["i"] for r in rows_of(old)} == {1}
    assert old.schema().to_json() != DeltaTable(table).schema().to_json()


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
