"""Spark's writer interfaces: connects ``df.write`` and ``df.writeStream`` to the task.

Spark creates the writer on the driver, pickles it for the tasks, and calls ``commit`` or ``abort``
on the driver with the messages of the tasks. For a streaming query it creates one for the tasks and
another one for the commit of each micro-batch, so the query and the micro-batch come from the
task's properties. ``commit`` has nothing to do but to report: each row was stored by its task.

Spark 4.0 passes rows instead of record batches to the writer of a streaming query; they are
collected into record batches.
"""

from __future__ import annotations

import itertools
import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyspark.sql.datasource
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from nats_stream_source.logs import field_logger
from nats_stream_source.metrics.table import (
    SINK_ACKS,
    SINK_CONFLICTS,
    SINK_DUPLICATES,
    SINK_ROWS,
    count,
    take,
)
from nats_stream_source.options.writing import KvWriteOptions, StreamWriteOptions
from nats_stream_source.spark.readers import exempt_modules
from nats_stream_source.spark.task_counts import QUERY_ID, TaskCounts

if TYPE_CHECKING:
    import pyarrow as pa

    from nats_stream_source.spark.writing.task import TaskResult


log = field_logger(__name__)

STREAM_WRITER: Any = getattr(
    pyspark.sql.datasource, "DataSourceStreamArrowWriter", DataSourceStreamWriter
)
"""Spark's writer of streaming queries: since Spark 4.1, the one that passes record batches."""

_BATCH_ID = "streaming.sql.batchId"
_ROWS = 10_000  # of a record batch that is collected from rows, as Spark's own


@dataclass
class NatsCommitMessage(WriterCommitMessage):
    """What a task has written."""

    result: TaskResult


class NatsBatchWriter(DataSourceArrowWriter):
    """``df.write``: one job, whose tasks Spark may repeat."""

    def __init__(self, options: KvWriteOptions | StreamWriteOptions) -> None:
        self._options = options
        self._job = uuid.uuid4().hex[:16]

    def write(self, iterator: Iterator[pa.RecordBatch]) -> NatsCommitMessage:
        """Write the rows of one task; returns when each one has its PubAck."""
        return _write(self._options, iterator, self._job)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Report what the job has written."""
        _report(self._options, messages)


class NatsStreamWriter(STREAM_WRITER):  # type: ignore[misc]  # the base depends on Spark's version
    """``df.writeStream``: the micro-batches of a query, which a restart may repeat."""

    def __init__(
        self,
        options: KvWriteOptions | StreamWriteOptions,
        schema: StructType,
        task_counts: TaskCounts | None = None,
    ) -> None:
        self._options = options
        self._schema = schema
        self._task_counts = task_counts

    def write(self, iterator: Iterator[Any]) -> NatsCommitMessage:
        """Write the rows of one task; returns when each one has its PubAck."""
        context = TaskContext.get()
        assert context is not None, "Spark calls writers in tasks"
        query, batch = context.getLocalProperty(QUERY_ID), context.getLocalProperty(_BATCH_ID)
        # Without them (a vendor's Spark) the ids of a repeated micro-batch differ: rows are stored
        # twice, and none is lost.
        job = f"{query}.{batch}" if query and batch else uuid.uuid4().hex[:16]
        passes_rows = STREAM_WRITER is DataSourceStreamWriter
        batches = _record_batches(iterator, self._schema) if passes_rows else iterator
        if self._task_counts is None:
            return _write(self._options, batches, job)
        take()
        message = _write(self._options, batches, job)
        target, result = self._options.target, message.result
        count(SINK_ROWS, target, amount=result.stored + result.skipped)
        count(SINK_ACKS, target, amount=result.stored)
        count(SINK_DUPLICATES, target, amount=result.duplicates)
        count(SINK_CONFLICTS, target, amount=result.skipped)
        self._task_counts.add()
        return message

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Report what the micro-batch has written."""
        _report(self._options, messages, batch=batchId)


def _write(
    options: KvWriteOptions | StreamWriteOptions, batches: Iterator[pa.RecordBatch], job: str
) -> NatsCommitMessage:
    from nats_stream_source.spark.writing.task import write_task

    exempt_modules()
    context = TaskContext.get()
    assert context is not None, "Spark calls writers in tasks"
    return NatsCommitMessage(write_task(options, batches, job=job, partition=context.partitionId()))


def _record_batches(rows: Iterator[Any], schema: StructType) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema

    arrow_schema = to_arrow_schema(schema)
    while chunk := list(itertools.islice(rows, _ROWS)):
        columns = zip(*chunk, strict=True)
        arrays = [pa.array(c, f.type) for c, f in zip(columns, arrow_schema, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=arrow_schema)


def _report(
    options: KvWriteOptions | StreamWriteOptions,
    messages: Sequence[WriterCommitMessage | None],
    batch: int | None = None,
) -> None:
    done = [message.result for message in messages if isinstance(message, NatsCommitMessage)]
    skipped = sum(result.skipped for result in done)
    log.log(
        logging.WARNING if skipped else logging.DEBUG,
        "rows were skipped because of conflicts" if skipped else "rows were written",
        target=options.target,
        batch=batch,
        stored=sum(result.stored for result in done),
        duplicates=sum(result.duplicates for result in done),
        skipped=skipped,
    )
