"""The situations that AUTO CDC of Spark ran, merged by each engine and by all in turn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from nats_stream_source.delta import merge
from tests.integration.delta.cdc.conftest import ENGINES, MergeEvents, columns_of
from tests.support.cdc.events import SITUATIONS, Event, events_of

pytestmark = pytest.mark.delta
UNIQUE = [name for name, situation in SITUATIONS.items() if not situation["ties"]]


@pytest.mark.parametrize(
    ("column", "arguments"),
    [
        ("scd1", {}),
        ("scd2_track_a_b", {"stored_as_scd_type": 2}),
        (
            "scd2_track_a",
            {"stored_as_scd_type": 2, "track_history_column_list": ["a"]},
        ),
    ],
)
def test_situations_give_rows_of_auto_cdc(
    table: Path, merge_events: MergeEvents, column: str, arguments: dict[str, Any]
) -> None:
    # A merge by Spark takes seconds: all situations share a batch, each with its own key.
    bounds = ("__START_AT", "__END_AT") if column != "scd1" else ()
    for turn in range(max(len(SITUATIONS[name]["batches"]) for name in UNIQUE)):
        batch, expected = [], []
        for name in UNIQUE:
            batches = events_of(name)
            batch += batches[turn] if turn < len(batches) else []
            after = SITUATIONS[name]["after"][min(turn, len(batches) - 1)]
            expected += [(name, *row) for row in after[column]]
        merge_events(batch, **arguments)
        rows = columns_of(table, "key", *bounds, "seq", "a", "b")
        assert rows == sorted(expected, key=lambda row: row[:2])


def test_greater_values_of_one_sequence_go_on_with_version_before(
    table: Path, merge_events: MergeEvents
) -> None:
    """The version that the lesser values opened is joined with the one that ends there."""
    merge_events([Event("k", 1, "U", 2, "x"), Event("k", 5, "U", 1, "x")], stored_as_scd_type=2)
    merge_events([Event("k", 5, "U", 2, "x")], stored_as_scd_type=2)
    rows = columns_of(table, "key", "__START_AT", "__END_AT", "seq", "a")
    assert rows == [("k", 1, None, 5, 2)]


@pytest.mark.parametrize(
    "engines",
    [
        ("merge-on-read", "merge-on-read"),
        ("copy-on-write", "copy-on-write"),
        ("merge-on-read", "spark"),
        pytest.param(("spark", "merge-on-read"), marks=pytest.mark.faults),
        pytest.param(("spark", "spark"), marks=pytest.mark.faults),
    ],
)
def test_keys_of_zero_with_either_sign_are_one(
    spark: SparkSession, table: Path, engines: tuple[str, str]
) -> None:
    """In one batch and in two, as Spark compares them; so are the texts of NaN."""
    batches = [[(0.0, 1), (-0.0, 2), (math.nan, 1)], [(0.0, 3), (math.nan, 3), (math.nan, 2)]]
    for engine, batch in zip(engines, batches, strict=True):
        rows = spark.createDataFrame(batch, "id DOUBLE, seq INT")
        merge(rows, table, keys="id", sequence_by="seq", **ENGINES[engine])
    assert [seq for (seq,) in columns_of(table, "seq")] == [3, 3]
