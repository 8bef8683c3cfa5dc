"""Batch reads: connects Spark's batch reader interface to the batch planner and the readers.

Spark creates the reader on the driver, pushes filters down to it and requests its partitions, once;
then it pickles the reader, and each task calls ``read``, again when an attempt fails. The reader
does not keep state between these calls, and imports planner and readers where they are used (see
``spark.stream_reader``).

Once means once per DataFrame, not per query (Spark 4.1 to 4.3): every query on one ``load()`` reads
the partitions that were planned for it last. A query with another filter plans again, also for
queries without that filter. So filters are pushed only where the option ``filterPushdown`` declares
that the DataFrame is filtered in one way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from nats_stream_source.options import KvOptions, StreamOptions
from nats_stream_source.spark.compat import check_pushdown
from nats_stream_source.spark.formats.factory import format_adapter
from nats_stream_source.spark.formats.splits import BatchReadKind, BatchSplit
from nats_stream_source.spark.input_partition import NatsInputPartition

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter

    from nats_stream_source.spark.pushdown import PushedFilters


class BatchReader(DataSourceReader):
    """Splits on the driver, rows on the executors."""

    def __init__(self, options: KvOptions | StreamOptions) -> None:
        self._options = options
        self._pushed: PushedFilters | None = None

    def partitions(self) -> Sequence[InputPartition]:
        """The splits of the batch."""
        from nats_stream_source.spark.batch_planner import BatchPlanner
        from nats_stream_source.spark.reading.event_loop import Runner

        runner = Runner(self._options.connection)
        try:
            planner = BatchPlanner(self._options, runner.connection, pushed=self._pushed)
            return [NatsInputPartition(split) for split in runner.plan(planner.splits)]
        finally:
            runner.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one split."""
        from nats_stream_source.spark.reading.as_of import read_as_of
        from nats_stream_source.spark.reading.latest_values import read_latest_values
        from nats_stream_source.spark.reading.split_reader import read_split

        if not isinstance(partition, NatsInputPartition):
            return iter(())  # Spark replaces an empty list by a partition of its own
        split, adapter = partition.split, format_adapter(self._options)
        assert isinstance(split, BatchSplit)
        if split.kind is BatchReadKind.CURRENT:
            return read_latest_values(split, adapter)
        if split.kind is BatchReadKind.AS_OF:
            return read_as_of(split, adapter)
        return read_split(split.split, adapter)


class FilteredReader(BatchReader):
    """The batch reader of a filtered DataFrame: it reads what the filters select.

    A separate class, since Spark rejects a reader with ``pushFilters`` unless its setting
    ``spark.sql.python.filterPushdown.enabled`` is on, which is off by default.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Record ``filters`` for the plan; returns all, since Spark applies them to the rows."""
        from nats_stream_source.spark.pushdown import pushed_filters

        self._pushed = pushed_filters(self._options, filters)
        return filters


def batch_reader(options: KvOptions | StreamOptions) -> BatchReader:
    """The reader for ``options``.

    Raises:
        OptionError: ``filterPushdown`` on a Spark version that does not support it.
    """
    check_pushdown(options.common)
    return FilteredReader(options) if options.common.filter_pushdown else BatchReader(options)
