"""A batch read without Spark: a batch reader and its tasks, run one after another.

As in Spark, the reader and its partitions pass through pickle on their way to a task.
:data:`BATCHES` are the batch reads of the fault tests, each of a :class:`RecordedStream`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from pyspark.sql.types import StructType

from nats_stream_source.spark.datasource import NatsKvDataSource, NatsStreamDataSource
from nats_stream_source.spark.readers import BatchReader, NatsInputPartition
from nats_stream_source.spark.reading.latest_values import CatchUpReader
from nats_stream_source.spark.runner import close_cached_runners
from tests.support.oracle.row_check import Row as OracleRow, rows_of
from tests.support.query_driver.driver import Each, texts
from tests.support.recorded_stream import RecordedStream

Row = dict[str, Any]


def batch_reader(url: str, **options: Any) -> BatchReader:
    """Return the reader of ``nats_kv`` with an option of buckets, else that of ``nats_stream``."""
    strings, of_buckets = texts(url, options)
    source = NatsKvDataSource if of_buckets else NatsStreamDataSource
    reader = source(strings).reader(StructType())
    assert isinstance(reader, BatchReader)
    unpickled: BatchReader = pickle.loads(pickle.dumps(reader))
    return unpickled


def tasks_of(reader: BatchReader) -> list[NatsInputPartition]:
    """Plan the batch; return its partitions, one per task."""
    tasks: list[NatsInputPartition] = pickle.loads(pickle.dumps(list(reader.partitions())))
    return tasks


def rows_of_task(reader: BatchReader, task: NatsInputPartition) -> Iterator[Row]:
    for batch in reader.read(task):
        yield from batch.to_pylist()


def read_batch(url: str, **options: Any) -> list[Row]:
    reader = batch_reader(url, **options)
    return [row for task in tasks_of(reader) for row in rows_of_task(reader, task)]


def planned_batch(url: str, **options: Any) -> Callable[[], Iterator[Row]]:
    """Plan a batch of one task, which each call of the result reads."""
    reader = batch_reader(url, **options)
    (task,) = tasks_of(reader)
    return partial(rows_of_task, reader, task)


def skip_catch_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read no message after the planned range, as when writers are too fast for it."""
    monkeypatch.setattr(CatchUpReader, "first_messages", lambda *_, **__: iter(()))


def revisions(rows: list[Row]) -> list[int]:
    return [row["revision"] for row in rows]


# -- batches of a recorded stream ----------------------------------------------------------------

BATCHES = ("now", "as of", "all", "stream")
"""Batch reads: the bucket now, the bucket as of a sequence, its whole history, and a stream."""


def recorded_kind(batch: str) -> str:
    """Return the kind of the recorded stream that a batch reads."""
    return "stream" if batch == "stream" else "kv"


def batch_options(recorded: RecordedStream, batch: str) -> dict[str, str]:
    """Return the options that read all acknowledged messages, in several tasks where possible."""
    if batch == "stream":
        return {"stream": recorded.name, "minPartitions": "4"}
    options = {
        "as of": {"asOfSequence": str(recorded.last)},
        "all": {"includeHistory": "true", "minPartitions": "4"},
    }
    return {"bucket": recorded.name, **options.get(batch, {})}


def read_sorted(
    url: str,
    options: dict[str, str],
    planned: Callable[[], object] | None = None,
    each: Each | None = None,
    *,
    keep_connection: bool = False,
) -> list[OracleRow]:
    """Plan and read a batch; return its rows, sorted by sequence.

    Args:
        keep_connection: keep the connection for the next read, as a Python worker of Spark does.
    """
    try:
        reader = batch_reader(url, **options)
        tasks = tasks_of(reader)
        if planned is not None:
            planned()
        rows: list[OracleRow] = []
        for task in tasks:
            for batch in reader.read(task):
                rows += rows_of(batch)
                if each is not None:
                    each(len(rows))
        return sorted(rows, key=lambda row: row.seq)
    finally:
        if not keep_connection:
            close_cached_runners()
