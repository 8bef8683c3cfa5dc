"""`follow`: which logs the query has, its bad input, and the session's settings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from nats_stream_source import configure
from nats_stream_source.delta import follow
from nats_stream_source.errors import ConfigurationError
from nats_stream_source.spark import session
from tests.integration.delta.merge_model import Bucket, live, version
from tests.support.log_fields import parse_fields
from tests.support.spark.streaming_query import begin
from tests.support.wait import wait_until

Follow = Callable[..., StreamingQuery]
LOGGER = "nats_stream_source.delta.spark.follow"
ASYNC, SYNC = "AsyncProgressTrackingMicroBatchExecution", "MicroBatchExecution"


@pytest.fixture
def changes(spark: SparkSession, bucket: Bucket) -> DataFrame:
    """Streaming DataFrame of the bucket."""
    source = spark.readStream.format("nats_kv").options(servers=bucket.url, bucket=bucket.name)
    return source.load()


@pytest.fixture
def followed(changes: DataFrame, table: Path) -> Iterator[Follow]:
    """``follow`` with the test's DataFrame, table and checkpoint; stops the queries at the end."""
    queries = []

    def run(frame: DataFrame = changes, path: Path = table, **arguments: Any) -> StreamingQuery:
        arguments = {"checkpoint": f"{table}-checkpoint", **arguments}
        queries.append(begin(lambda: follow(frame, str(path), **arguments)))
        return queries[-1]

    yield run
    for query in queries:
        query.stop()


def execution(query: StreamingQuery) -> str:
    """The class that runs the query in the JVM."""
    return str(query._jsq.streamingQuery().getClass().getSimpleName())


def wait_for(table: Path, expected: dict[str, int], query: StreamingQuery) -> None:
    def alive() -> None:
        assert query.isActive, query.exception()

    def reached() -> bool:
        return (table / "_delta_log").exists() and live(table) == expected

    wait_until(reached, f"the table to be {expected}", 180, alive=alive)


def test_logs_change_from_synchronous_to_asynchronous_and_back(
    bucket: Bucket, followed: Follow, table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    bucket.write(("a", "PUT"), ("b", "PUT"))
    query = followed(once=True)
    assert query.awaitTermination(180)
    assert live(table) == {"a": 1, "b": 2}

    for revisions in ((3,), (4,), (5, 6, 7)):  # each a micro-batch
        query = followed()
        assert execution(query) == ASYNC
        for revision in revisions:
            bucket.write(("a", "PUT"))
            wait_for(table, {"a": revision, "b": 2}, query)
        bucket.write(("c", "PUT"), ("c", "DEL")) if revision == 7 else None
        query.stop()
    for name, least in (("offsets", 6), ("commits", 5)):  # the last one may not be committed
        written = Path(f"{table}-checkpoint", name).glob("[0-9]*")
        batches = sorted(int(one.name) for one in written)
        assert len(batches) >= least
        assert batches == list(range(len(batches)))

    query = followed(async_progress=False)
    assert execution(query) == SYNC
    wait_for(table, {"a": 7, "b": 2}, query)
    bucket.write(("b", "DEL"))
    wait_for(table, {"a": 7}, query)
    query.stop()
    before = version(table)
    assert followed(once=True).awaitTermination(180)
    assert version(table) == before
    logs = [parse_fields(record.getMessage()) for record in caplog.records if record.name == LOGGER]
    assert [(one["logs"], one.get("reason")) for one in logs] == [
        ("synchronous", "once=True"),
        *[("asynchronous", None)] * 3,
        ("synchronous", "async_progress=False"),
        ("synchronous", "once=True"),
    ]
    assert {one["table"] for one in logs} == {str(table)}


def test_query_with_state_has_synchronous_logs(
    changes: DataFrame,
    bucket: Bucket,
    followed: Follow,
    table: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    bucket.write(("a", "PUT"))
    query = followed(changes.dropDuplicates(["key", "revision"]))
    wait_for(table, {"a": 1}, query)
    (line,) = (one.getMessage() for one in caplog.records if one.name == LOGGER)
    assert parse_fields(line)["reason"] == "the query has state"


def test_invalid_input_is_named_before_query_starts(
    spark: SparkSession, bucket: Bucket, changes: DataFrame, table: Path
) -> None:
    batch = spark.read.format("nats_kv").options(servers=bucket.url, bucket=bucket.name).load()
    for frame, arguments, error in (
        (batch, {}, r"the DataFrame is a batch.*spark\.readStream"),
        (changes.drop("revision"), {}, "it has no column 'revision'"),
        (changes, {"engine": "duckdb"}, "duckdb"),
    ):
        with pytest.raises(ConfigurationError, match=error):
            follow(frame, str(table), checkpoint="unused", **arguments)


def test_missing_setting_is_logged_once_with_its_line(
    bucket: Bucket,
    followed: Follow,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "_warned", False)
    for _ in range(2):
        bucket.write(("a", "PUT"))
        assert followed(once=True).awaitTermination(180)
    (record,) = (one for one in caplog.records if one.name == "nats_stream_source.spark.session")
    for name, value in configure(SparkSession.Builder())._options.items():
        assert f"{name} {value}" in record.getMessage()
