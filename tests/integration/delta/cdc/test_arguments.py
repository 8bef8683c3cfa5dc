"""The forms of the arguments: columns by name, as Column and in expressions; lists of columns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from nats_stream_source.delta import merge
from tests.integration.delta.cdc.conftest import ENGINES, columns_of, spark_in_faults
from tests.support.delta import rows_of

pytestmark = pytest.mark.delta
# The second event changes nothing but the sequence, the third one `a`, and the fourth one `b`.
EVENTS = [("k", 1, 1, "U", 1, "x"), ("k", 1, 2, "U", 1, "x"), ("k", 2, 1, "U", 2, "x")]
EVENTS += [("k", 2, 3, "U", 2, "y"), ("gone", 1, 1, "U", 1, "x"), ("gone", 1, 2, "D", 5, "z")]
RULES: dict[str, Any] = {"keys": ["key"], "apply_as_deletes": "op = 'D'"}
SEQUENCES: dict[str, Callable[[], Any]] = {
    "names": lambda: ["high", "low"],
    "Columns": lambda: [F.col("HIGH"), F.col("low").cast("long")],
    "struct": lambda: "struct(high, low)",
    "struct of Columns": lambda: F.struct("high", F.struct("low")),
}
by_sequence = pytest.mark.parametrize("sequence", SEQUENCES)


@pytest.fixture
def batch(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame(
        EVENTS, "key STRING, high INT, low INT, op STRING, a INT, b STRING"
    )


def starts(table: Path) -> list[tuple[Any, ...]]:
    """Return key, the numbers of the start, and values of each version."""
    rows = rows_of(DeltaTable(table))
    return sorted((row["key"], *_numbers(row["__START_AT"]), row["a"], row["b"]) for row in rows)


def _numbers(sequence: Any) -> list[int]:
    if not isinstance(sequence, dict):
        return [sequence]
    return [number for part in sequence.values() for number in _numbers(part)]


@by_sequence
def test_columns_of_sequence_do_not_make_versions(
    batch: DataFrame, table: Path, sequence: str
) -> None:
    merge(
        batch,
        str(table),
        **RULES,
        sequence_by=SEQUENCES[sequence](),
        stored_as_scd_type=2,
    )
    assert starts(table) == [
        ("gone", 1, 1, 1, "x"),
        ("k", 1, 1, 1, "x"),
        ("k", 2, 1, 2, "x"),
        ("k", 2, 3, 2, "y"),
    ]


def test_excepted_columns_do_not_make_versions(batch: DataFrame, table: Path) -> None:
    arguments = {"stored_as_scd_type": 2, "track_history_except_column_list": ["b"]}
    merge(batch, str(table), **RULES, **arguments, sequence_by=["high", "low"])
    assert starts(table) == [("gone", 1, 1, 1, "x"), ("k", 1, 1, 1, "x"), ("k", 2, 1, 2, "y")]


def test_column_of_computed_sequence_makes_versions(batch: DataFrame, table: Path) -> None:
    """A column from which a sequence is computed can be a payload with the values."""
    merge(batch, str(table), **RULES, sequence_by="high * 10 + low", stored_as_scd_type=2)
    assert [start for key, start, *_ in starts(table) if key == "k"] == [11, 12, 21, 23]


@by_sequence
@spark_in_faults
def test_sequence_that_is_not_of_plain_columns_is_stored(
    batch: DataFrame, table: Path, engine: str, sequence: str
) -> None:
    selected = ["key", "low", "a"] if sequence == "names" else ["key", "high", "low", "a"]
    rules = {
        **RULES,
        **ENGINES[engine],
        "sequence_by": SEQUENCES[sequence](),
        "column_list": selected,
    }
    merge(batch.where("high = 1 AND op = 'U'"), str(table), **rules)
    merge(batch, str(table), **rules)
    assert DeltaTable(table).schema().to_arrow().names == [*selected, "__SEQUENCE"]
    ((key, stored, a),) = columns_of(table, "key", "__SEQUENCE", "a")
    assert (key, _numbers(stored), a) == ("k", [2, 3], 2)
    before = DeltaTable(table).version()
    merge(batch, str(table), **rules)
    assert DeltaTable(table).version() == before


@spark_in_faults
def test_column_list_and_condition_as_column(batch: DataFrame, table: Path, engine: str) -> None:
    rules = {**ENGINES[engine], "keys": "key", "column_list": ["b", "key"]}
    condition, sequence = F.col("op") == "D", F.col("high") * 10 + F.col("low")
    merge(batch, str(table), **rules, apply_as_deletes=condition, sequence_by=sequence)
    assert DeltaTable(table).schema().to_arrow().names == ["key", "b", "__SEQUENCE"]
    assert columns_of(table, "key", "b", "__SEQUENCE") == [("k", "y", 23)]
