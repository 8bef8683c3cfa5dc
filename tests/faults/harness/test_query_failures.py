"""Classification of query failures by their last exception, with the texts that Spark produces."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from nats_stream_source import errors
from tests.support.oracle.query_failures import (
    DATA_LOSS,
    UNEXPECTED,
    WORKER_START,
    kind_of,
    last_raised,
)
from tests.support.spark.streaming_query import begin


def raising(last: Callable[[], Exception]) -> Callable[[], None]:
    """A function that raises ``last`` while it handles a ConnectError."""

    def fail() -> None:
        try:
            raise errors.ConnectError("no server of nats://127.0.0.1:1")
        except errors.ConnectError:
            error = last()
            if isinstance(error, errors.ConnectError) and not error.args:
                raise
            raise error  # noqa: B904  (the test requires an implicit exception context)

    return fail


FAILURES: dict[str, tuple[Callable[[], Exception], str]] = {
    "transient": (lambda: errors.ConnectError(""), "ConnectError"),
    "loss": (lambda: errors.DataLossError("gone"), DATA_LOSS),
    "bug": (lambda: KeyError("Nats-Stream"), UNEXPECTED),
    "bug that names an error": (lambda: ValueError("DataLossError: ConnectError: x"), UNEXPECTED),
    "bug that quotes Spark": (lambda: ValueError("failed to connect back"), UNEXPECTED),
    "no leader": (lambda: errors.ApiError("X: no leader (code 503, err_code 10008)"), "ApiError"),
    "refused": (lambda: errors.ApiError("X: bad (code 400, err_code 10003)"), UNEXPECTED),
    "password": (lambda: errors.AuthorizationError("no"), UNEXPECTED),
    "of two lines": (lambda: errors.ConnectError("one\nKeyError: two"), "ConnectError"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_last_exception_determines_kind(name: str) -> None:
    last, kind = FAILURES[name]
    try:
        raising(last)()
    except Exception:
        text = traceback.format_exc()
    assert "ConnectError" in text
    assert kind_of(text) == kind
    query = "\n=== Streaming Query ===\nTraceback (most recent call last):\nKeyError: 1\n"
    assert kind_of(text + query) == kind


@pytest.mark.parametrize(
    "text",
    [
        "Job aborted due to stage failure: Task 0 in stage 5.0 failed 3 times, most recent: "
        "org.apache.spark.SparkException: Python worker failed to connect back.\n\tat org.apache",
        "An exception was raised by the Python Proxy. Return Message: "
        "Traceback (most recent call last):\n"
        '  File "x.py", line 1, in call\n    raise e\n'
        "pyspark.errors.exceptions.base.PySparkRuntimeError: [CANNOT_OPEN_SOCKET] Can not open",
    ],
)
def test_worker_start_timeout_of_spark(text: str) -> None:
    assert kind_of(text) == WORKER_START


def test_jvm_error_is_unexpected() -> None:
    text = "java.lang.OutOfMemoryError: nats_stream_source.errors.ConnectError: x"
    assert last_raised(text).name == "java.lang.OutOfMemoryError"
    assert kind_of(text) == UNEXPECTED


def failing_source(fail: Callable[[], None]) -> type[DataSource]:
    """A data source whose tasks fail. As a local class it is pickled by value."""

    class Reader(DataSourceStreamReader):
        def initialOffset(self) -> dict[str, int]:
            return {"n": 0}

        def latestOffset(self) -> dict[str, int]:  # type: ignore[override]
            return {"n": 1}

        def partitions(self, start: Any, end: Any) -> list[InputPartition]:
            return [InputPartition(0)]

        def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
            fail()
            yield (1,)

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return "fails"

        def schema(self) -> str:
            return "number INT"

        def streamReader(self, schema: Any) -> DataSourceStreamReader:
            return Reader()

    return Source


@pytest.mark.parametrize("name", ["loss", "bug"])
def test_kind_of_failed_task_in_text_of_spark(
    spark: SparkSession, tmp_path: Path, name: str
) -> None:
    last, kind = FAILURES[name]
    spark.dataSource.register(failing_source(raising(last)))
    writer = spark.readStream.format("fails").load().writeStream.format("noop")
    query = begin(writer.option("checkpointLocation", str(tmp_path)).start)
    with pytest.raises(StreamingQueryException):
        assert query.awaitTermination(600), "the query does not fail"
    text = str(query.exception())
    assert kind_of(text) == kind, text
