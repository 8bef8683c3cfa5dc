"""Rules and batches that are refused, with both tables unchanged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from nats_stream_source.delta import AutoLimits, merge, merge_changes
from nats_stream_source.errors import ConfigurationError
from tests.integration.delta.cdc.conftest import (
    ENGINES,
    EventFrame,
    columns_of,
    spark_in_faults,
)
from tests.integration.delta.merge_model import Frame, put
from tests.support.cdc.events import RULES, Event

pytestmark = pytest.mark.delta
HISTORY = {**RULES, "stored_as_scd_type": 2}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"column_list": ["a"], "except_column_list": ["b"]}, "column_list with except"),
        (
            {
                "stored_as_scd_type": 2,
                "track_history_column_list": ["a"],
                "track_history_except_column_list": ["b"],
            },
            "track_history_column_list with track_history_except",
        ),
        ({"track_history_column_list": ["a"]}, "with stored_as_scd_type=1"),
        ({"track_history_except_column_list": ["a"]}, "with stored_as_scd_type=1"),
        ({"stored_as_scd_type": 3}, "stored_as_scd_type is 3, expected 1 or 2"),
        ({"stored_as_scd_type": 2, "deletes": "mark"}, "deletes='mark' with stored_as_scd_type=2"),
        ({"keys": []}, "keys is empty"),
        ({"keys": ["a", "a"]}, "keys has 'a' twice"),
        ({"column_list": "a"}, "column_list is 'a', expected a list"),
        ({"sequence_by": []}, "sequence_by is \\[\\]"),
        ({"sequence_by": 5}, "sequence_by is 5"),
        ({"apply_as_deletes": ""}, "apply_as_deletes is ''"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        merge_changes("/lake/fleet", **arguments)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"keys": ["kei"]}, "keys has 'kei', which is not a column of it; did you mean 'key'"),
        ({"column_list": ["key", "c"], "except_column_list": None}, "column_list has 'c'"),
        ({"except_column_list": ["c"]}, "except_column_list has 'c'"),
        ({"except_column_list": ["key"]}, "the key 'key' is not a selected column"),
        ({**HISTORY, "track_history_column_list": ["x"]}, "track_history_column_list has 'x'"),
        ({**HISTORY, "track_history_except_column_list": ["x"]}, "except_column_list has 'x'"),
        ({**HISTORY, "track_history_except_column_list": ["op"]}, "not a selected column"),
        ({"column_list": ["a"], "except_column_list": None}, "the key 'key' is not a selected"),
        ({"keys": None}, "keys is missing"),
        ({"sequence_by": None}, "sequence_by is missing"),
        ({"sequence_by": "nothing + 1"}, "sequence_by or apply_as_deletes is invalid"),
        ({"sequence_by": "map(seq, seq)"}, "MAP<BIGINT,BIGINT>, which cannot be ordered"),
        ({"sequence_by": "array(seq)"}, "cannot be ordered"),
        ({"apply_as_deletes": "seq + 1"}, "apply_as_deletes is invalid .*BIGINT"),
    ],
)
def test_rules_that_do_not_fit_batch_are_refused(
    event_frame: EventFrame, table: Path, arguments: dict[str, Any], error: str
) -> None:
    batch = event_frame([Event("a", 1, "U", 1, "x")])
    with pytest.raises(ConfigurationError, match=error):
        merge(batch, str(table), **{**RULES, **arguments})
    assert not table.exists()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("__START_AT", HISTORY),
        ("__end_at", HISTORY),
        ("__Sequence", RULES),
        ("__delete", RULES),
        ("__TIME", RULES),
        ("__Unavailable", RULES),
        ("deleted", {**RULES, "deletes": "mark"}),
    ],
)
def test_reserved_column_is_refused(
    event_frame: EventFrame, table: Path, name: str, arguments: dict[str, Any]
) -> None:
    batch = event_frame([Event("a", 1, "U", 1, "x")]).withColumnRenamed("a", name)
    with pytest.raises(ConfigurationError, match=f"column '{name}'.* is reserved"):
        merge(batch, str(table), **arguments)
    assert not table.exists()


@pytest.mark.parametrize("name", ["valid_from", "Valid_To"])
def test_reserved_column_of_bucket_history_is_refused(frame: Frame, table: Path, name: str) -> None:
    batch = frame(put("a", 1)).withColumn(name, F.current_timestamp())
    with pytest.raises(ConfigurationError, match=f"column '{name}'.* is reserved"):
        merge(batch, str(table), stored_as_scd_type=2)
    assert not table.exists()


def test_reserved_column_that_is_excluded_is_accepted(event_frame: EventFrame, table: Path) -> None:
    batch = event_frame([Event("a", 1, "U", 1, "x")]).withColumnRenamed("op", "__delete")
    arguments = {**RULES, "apply_as_deletes": "__delete = 'D'", "except_column_list": ["__delete"]}
    merge(batch, str(table), **arguments)
    assert columns_of(table, "key", "a") == [("a", 1)]


@pytest.mark.parametrize("scd_type", [1, 2])
@spark_in_faults
def test_null_in_first_batch_leaves_no_tables(
    spark: SparkSession, table: Path, engine: str, scd_type: int
) -> None:
    rules = {
        **ENGINES[engine],
        "keys": ["key"],
        "sequence_by": ["high", "low"],
        "stored_as_scd_type": scd_type,
    }
    # A null in the second part of a sequence that is less than the other one of its key; in one
    # partition, which is reduced.
    rows = [("a", 5, None), ("a", 6, 1)]
    batch = spark.createDataFrame(rows, "key STRING, high INT, low INT").coalesce(1)
    with pytest.raises(ConfigurationError, match=r"1 events have a null .*='a', .*None"):
        merge(batch, str(table), **rules)
    assert not table.exists()
    assert not table.with_name("fleet__cdc_state").exists()
    merge(batch.dropna(), str(table), **{**rules, "sequence_by": "high"})
    assert columns_of(table, "key", "high") == [("a", 6)]


@pytest.mark.parametrize("valid", [False, pytest.param(True, marks=pytest.mark.faults)])
def test_first_batch_beyond_limits_creates_table_of_driver_if_it_is_valid(
    event_frame: EventFrame, table: Path, valid: bool
) -> None:
    null: Any = None
    batch = event_frame([Event("a", 1, "U", 1, "x"), Event("b", 2 if valid else null, "U", 1, "x")])
    arguments = {**RULES, "limits": AutoLimits(batch_rows=1)}
    if valid:
        merge(batch, str(table), **arguments)
        assert "deletionVectors" in (DeltaTable(table).protocol().reader_features or ())
        return
    with pytest.raises(ConfigurationError, match="1 events have a null"):
        merge(batch, str(table), **arguments)
    assert not table.exists()


@pytest.mark.parametrize("scd_type", [1, 2])
@spark_in_faults
def test_null_key_or_sequence_names_row_and_changes_nothing(
    event_frame: EventFrame, table: Path, engine: str, scd_type: int
) -> None:
    rules = {**RULES, **ENGINES[engine], "stored_as_scd_type": scd_type}
    merge(event_frame([Event("a", 1, "U", 1, "x")]), str(table), **rules)
    before = DeltaTable(table).version()
    null: Any = None
    for bad, row in (
        (Event("b", null, "U", 2, "y"), "key='b', .*None"),
        (Event(null, 3, "U", 2, "y"), "key=None, .*3"),
    ):
        with pytest.raises(ConfigurationError, match=f"1 events have a null .* has {row}"):
            merge(event_frame([Event("a", 2, "U", 2, "y"), bad]), str(table), **rules)
    assert DeltaTable(table).version() == before
    assert columns_of(table, "key", "seq") == [("a", 1)]


def test_other_rules_for_existing_table_are_refused(
    spark: SparkSession, event_frame: EventFrame, table: Path
) -> None:
    batch = event_frame([Event("a", 1, "U", 1, "x")])
    merge(batch, str(table), **RULES)
    before = DeltaTable(table).version()
    for arguments, error in (
        (HISTORY, "created with stored_as_scd_type 1, and this call has 2"),
        ({**RULES, "keys": ["key", "b"]}, "created with keys"),
        ({**RULES, "sequence_by": "cast(seq AS STRING)"}, "created with a sequence_by of type"),
        ({**RULES, "sequence_by": "seq + 1"}, "its sequence in columns"),
        ({**RULES, "deletes": "mark"}, "created with deletes 'remove'"),
    ):
        with pytest.raises(ConfigurationError, match=error):
            merge(batch, str(table), **arguments)
    entries = spark.createDataFrame(
        [("a", 1, "PUT", None)],
        "key STRING, revision BIGINT, operation STRING, stream_created TIMESTAMP",
    )
    with pytest.raises(ConfigurationError, match="rules of a bucket's newest entries"):
        merge(entries, str(table))
    assert DeltaTable(table).version() == before


@pytest.mark.parametrize("scd_type", [1, 2])
@spark_in_faults
def test_equal_sequences_with_other_values_are_counted_and_warned_of_once(
    event_frame: EventFrame,
    table: Path,
    caplog: pytest.LogCaptureFixture,
    engine: str,
    scd_type: int,
) -> None:
    rules = {**RULES, **ENGINES[engine], "stored_as_scd_type": scd_type}
    merger = merge_changes(str(table), **rules)
    one, other, less = (Event("a", 1, "U", a, "x") for a in (1, 2, 0))
    for batch, counted in (([one, one], 0), ([one, other], 1), ([less], 2)):
        merger(event_frame(batch))
        assert merger.contradictions == counted
    assert columns_of(table, "key", "a") == [("a", 2)]
    warning = "events of one key and sequence have different values"
    assert caplog.text.count(warning) == 1


def test_table_created_without_rules_is_refused(event_frame: EventFrame, table: Path) -> None:
    batch = event_frame([Event("a", 1, "U", 1, "x")])
    DeltaTable.create(str(table), batch.limit(0).toArrow().schema)
    with pytest.raises(ConfigurationError, match="not created with keys and sequence_by"):
        merge(batch, str(table), **RULES)


@pytest.mark.parametrize("damage", ["missing", "of another table"])
def test_state_table_of_other_table_is_refused(
    event_frame: EventFrame, table: Path, damage: str
) -> None:
    batch, state = event_frame([Event("a", 1, "U", 1, "x")]), table.with_name("fleet__cdc_state")
    merge(batch, str(table), **HISTORY)
    shutil.rmtree(state if damage == "missing" else table)
    error = "does not exist beside" if damage == "missing" else "belongs to another table"
    with pytest.raises(ConfigurationError, match=error):
        merge(batch, str(table), **HISTORY)
