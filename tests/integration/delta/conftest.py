"""Fixtures of the Delta tests: a table's path, DataFrames of entries, buckets, an object store."""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from nats_stream_source.delta import Engine, ReconcileResult, merge as merge_batch, reconcile
from tests.integration.delta.merge_model import (
    ENGINES,
    SCHEMA,
    Bucket,
    Entry,
    EventFrame,
    Frame,
    Merge,
    Reconciled,
)
from tests.support.cdc import events
from tests.support.object_store import BUCKET, ObjectStore, object_store


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Path of a table that does not exist yet."""
    return tmp_path / "fleet"


@pytest.fixture
def path(table: Path) -> Path:
    """The same, for tests in which the table is an object."""
    return table


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    """S3-compatible object store of the module."""
    with object_store() as server:
        yield server


@pytest.fixture
def uri() -> str:
    """URI of a table in the object store that does not exist yet."""
    return f"s3://{BUCKET}/{uuid.uuid4()}"


@pytest.fixture
def frame(spark: SparkSession) -> Frame:
    """Function that builds a DataFrame, with the columns of ``nats_kv``, from entries."""

    def make(*entries: Entry) -> DataFrame:
        return spark.createDataFrame([entry.row() for entry in entries], SCHEMA)

    return make


@pytest.fixture
def event_frame(spark: SparkSession) -> EventFrame:
    """Function that builds a DataFrame from events."""
    return lambda batch: spark.createDataFrame(list(batch), events.SCHEMA)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Any:
    """Engine that changes the tables, or "alternating" for each in turn."""
    return request.param


@pytest.fixture
def next_engine(engine: Any) -> Callable[[], Engine]:
    """Function that returns the engine of the next change."""
    turns = itertools.cycle(ENGINES if engine == "alternating" else [engine])
    return lambda: next(turns)


@pytest.fixture
def merge(next_engine: Callable[[], Engine]) -> Merge:
    """``merge`` with the engine of the test."""

    def run(*arguments: Any, **keywords: Any) -> None:
        merge_batch(*arguments, **{"engine": next_engine(), **keywords})

    return run


@pytest.fixture
def merge_entries(frame: Frame, table: Path, merge: Merge) -> Merge:
    """Function that merges entries into the test's table."""
    return lambda *entries, **arguments: merge(frame(*entries), str(table), **arguments)


@pytest.fixture
def merge_events(event_frame: EventFrame, table: Path, merge: Merge) -> Merge:
    """Function that merges events into the test's table, by key and sequence."""

    def run(batch: Iterable[events.Event], **arguments: Any) -> None:
        merge(event_frame(batch), str(table), **{**events.RULES, **arguments})

    return run


@pytest.fixture
def bucket(url: str, request: pytest.FixtureRequest) -> Bucket:
    """Bucket named after the test, on the server of the module; its values can expire."""
    name = re.sub(r"\W", "_", request.node.name)
    return Bucket(url, name).create(allow_msg_ttl=True)


@pytest.fixture
def reconciled(
    spark: SparkSession, table: Path, bucket: Bucket, next_engine: Callable[[], Engine]
) -> Reconciled:
    """``reconcile`` with the test's table and bucket as defaults."""

    def run(**arguments: Any) -> ReconcileResult:
        given = {"bucket": bucket.name, "servers": bucket.url, "engine": next_engine()}
        return reconcile(spark, str(table), **{**given, **arguments})

    return run
