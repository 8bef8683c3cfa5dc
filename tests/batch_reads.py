"""What ``spark.read`` would give, without Spark: a batch reader's tasks, one after the other."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

from pyspark.sql.types import StructType

from nats_stream_source.source.batch import BatchReader, BatchSplit
from nats_stream_source.source.kv import NatsKvDataSource
from nats_stream_source.source.stream import NatsStreamDataSource

Row = dict[str, Any]


def batch_reader(url: str, **options: Any) -> BatchReader:
    """The reader of ``nats_kv``, or where an option names a stream, of ``nats_stream``.

    Pickled and back, as Spark does it between the driver and a task.
    """
    texts = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in {"servers": url, **options}.items()
    }
    source = NatsKvDataSource if "bucket" in texts else NatsStreamDataSource
    reader = source(texts).reader(StructType())
    assert isinstance(reader, BatchReader)
    made: BatchReader = pickle.loads(pickle.dumps(reader))
    return made


def tasks_of(reader: BatchReader) -> list[BatchSplit]:
    """Its tasks, pickled and back."""
    tasks: list[BatchSplit] = pickle.loads(pickle.dumps(list(reader.partitions())))
    return tasks


def rows_of_task(reader: BatchReader, task: BatchSplit) -> Iterator[Row]:
    """One attempt at one task."""
    for batch in reader.read(task):
        yield from batch.to_pylist()


def read_batch(url: str, **options: Any) -> list[Row]:
    """All rows, task by task."""
    reader = batch_reader(url, **options)
    return [row for task in tasks_of(reader) for row in rows_of_task(reader, task)]
