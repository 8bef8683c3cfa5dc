"""The forms of the arguments: columns by name, as Column and in expressions; lists of columns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from nats_stream_source.delta import merge as merge_batch
from tests.integration.delta.merge_model import Merge, spark_in_faults
from tests.integration.delta.table_content import columns_of
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


VERSIONS = [("k", 1, 1, 1, "x"), ("k", 2, 1, 2, "x"), ("k", 2, 3, 2, "y")]


@pytest.mark.parametrize(
    ("sequence", "arguments", "expected"),
    [
        *((of, {}, VERSIONS) for of in SEQUENCES.values()),
        (
            SEQUENCES["names"],
            {"track_history_except_column_list": ["b"]},
            [("k", 1, 1, 1, "x"), ("k", 2, 1, 2, "y")],
        ),
        # A column from which a sequence is computed can be a payload with the values.
        (
            lambda: "high * 10 + low",
            {},
            [("k", 11, 1, "x"), ("k", 12, 1, "x"), ("k", 21, 2, "x"), ("k", 23, 2, "y")],
        ),
    ],
    ids=[*SEQUENCES, "excepted", "computed"],
)
def test_columns_of_sequence_and_excepted_ones_do_not_make_versions(
    batch: DataFrame,
    table: Path,
    sequence: Callable[[], Any],
    arguments: dict[str, Any],
    expected: list[tuple[Any, ...]],
) -> None:
    rules = {**RULES, "sequence_by": sequence(), "stored_as_scd_type": 2, **arguments}
    merge_batch(batch, str(table), engine="driver", **rules)
    assert [version for version in starts(table) if version[0] == "k"] == expected


@pytest.mark.parametrize("sequence", SEQUENCES)
@spark_in_faults
def test_sequence_that_is_not_of_plain_columns_is_stored(
    batch: DataFrame, table: Path, merge: Merge, sequence: str
) -> None:
    selected = ["key", "low", "a"] if sequence == "names" else ["key", "high", "low", "a"]
    rules = {**RULES, "sequence_by": SEQUENCES[sequence](), "column_list": selected}
    merge(batch.where("high = 1 AND op = 'U'"), str(table), **rules)
    merge(batch, str(table), **rules)
    assert DeltaTable(table).schema().to_arrow().names == [*selected, "__SEQUENCE"]
    ((key, stored, a),) = columns_of(table, "key", "__SEQUENCE", "a")
    assert (key, _numbers(stored), a) == ("k", [2, 3], 2)
    before = DeltaTable(table).version()
    merge(batch, str(table), **rules)
    assert DeltaTable(table).version() == before


@spark_in_faults
def test_column_list_and_condition_as_column(batch: DataFrame, table: Path, merge: Merge) -> None:
    rules: dict[str, Any] = {"keys": "key", "column_list": ["b", "key"]}
    condition, sequence = F.col("op") == "D", F.col("high") * 10 + F.col("low")
    merge(batch, str(table), **rules, apply_as_deletes=condition, sequence_by=sequence)
    assert DeltaTable(table).schema().to_arrow().names == ["key", "b", "__SEQUENCE"]
    assert columns_of(table, "key", "b", "__SEQUENCE") == [("k", "y", 23)]
