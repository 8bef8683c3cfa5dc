"""Fixtures of change data: events as DataFrames, and merges with an engine of the test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from nats_stream_source.delta import merge
from tests.support.cdc.events import RULES, SCHEMA, Event
from tests.support.delta import rows_of

ENGINES: dict[str, dict[str, Any]] = {
    "merge-on-read": {"engine": "delta-rs"},
    "copy-on-write": {"engine": "delta-rs", "deletion_vectors": False},
    "spark": {"engine": "spark"},
}
# A merge by Spark takes seconds: `make test-faults` has those of all situations.
spark_in_faults = pytest.mark.parametrize(
    "engine", ["merge-on-read", "copy-on-write", pytest.param("spark", marks=pytest.mark.faults)]
)
EventFrame = Callable[[Iterable[Event]], DataFrame]
MergeEvents = Callable[..., None]


@pytest.fixture
def event_frame(spark: SparkSession) -> EventFrame:
    """Function that builds a DataFrame from events."""
    return lambda events: spark.createDataFrame(list(events), SCHEMA)


@pytest.fixture(
    params=[
        "merge-on-read",
        "copy-on-write",
        pytest.param("spark", marks=pytest.mark.faults),
        pytest.param("alternating", marks=pytest.mark.faults),
    ]
)
def engine_options(request: pytest.FixtureRequest) -> Callable[[], dict[str, Any]]:
    """Function that returns the arguments of the next merge's engine."""
    names = list(ENGINES) if request.param == "alternating" else [request.param]
    turns = itertools.cycle(names)
    return lambda: ENGINES[next(turns)]


@pytest.fixture
def merge_events(
    event_frame: EventFrame, table: Path, engine_options: Callable[[], dict[str, Any]]
) -> MergeEvents:
    """Function that merges events into the test's table, by key and sequence."""

    def run(events: Iterable[Event], **arguments: Any) -> None:
        merge(event_frame(events), str(table), **{**engine_options(), **RULES, **arguments})

    return run


def columns_of(table: Path, *columns: str) -> list[tuple[Any, ...]]:
    """Return columns of the table's rows, sorted by the first two."""
    rows = rows_of(DeltaTable(table))
    return sorted((tuple(row[c] for c in columns) for row in rows), key=lambda row: row[:2])
