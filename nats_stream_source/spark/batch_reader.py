"""Batch reads: connects Spark's batch reader interface to the batch planner and the readers.

Spark creates the reader on the driver and requests its partitions, once; then it pickles the
reader, and each task calls ``read``, again when an attempt fails. The reader does not keep state
between these calls, and imports planner and readers where they are used (see
``spark.stream_reader``).

Once means once per DataFrame, not per query (Spark 4.1 to 4.3): every query on one ``load()`` reads
the partitions that were planned for it last. That is why the reader does not take filters
(``pushFilters``): a query with a filter plans again, and Spark then reads these partitions for
queries without the filter too, without a call of Python in between
(docs/internals/measurements.md, Spark).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from nats_stream_source.rows.base import BatchSplit
from nats_stream_source.spark.tasks import NatsInputPartition, exempt_modules

if TYPE_CHECKING:
    import pyarrow as pa

    from nats_stream_source.rows.base import FormatAdapter


class BatchReader(DataSourceReader):
    """Splits on the driver, rows on the executors."""

    def __init__(self, adapter: FormatAdapter) -> None:
        self._adapter = adapter

    def partitions(self) -> Sequence[InputPartition]:
        """The splits of the batch, by the task that reads them."""
        from nats_stream_source.spark.planning.batch_planner import BatchPlanner
        from nats_stream_source.spark.runner import Runner

        runner = Runner(self._adapter.options.connection)
        try:
            planner = BatchPlanner(self._adapter, runner.connection)
            return [NatsInputPartition(splits) for splits in runner.plan(planner.tasks)]
        finally:
            runner.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of the splits of one task."""
        from nats_stream_source.spark.reading.batch import batch_rows

        exempt_modules()
        if not isinstance(partition, NatsInputPartition):
            return iter(())  # Spark replaces an empty list by a partition of its own
        return batch_rows(
            [split for split in partition.splits if isinstance(split, BatchSplit)], self._adapter
        )
