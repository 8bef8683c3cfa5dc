"""Batch reads: the thin layer between Spark's interface and the planner of a batch.

Spark makes the reader on the driver, lets it push filters down and asks it for the tasks, once;
then it is pickled, and each task calls ``read``, again when an attempt fails. Nothing is kept
between these, and planner and readers are imported where they are used (see ``source.streaming``).

Once is not once a query, it is once a DataFrame (Spark 4.1 to 4.3): whatever is made of one
``load()`` reads the tasks that were planned for it last. Another filter plans anew, also for those
who do not have it. So filters are pushed only where the option ``filterPushdown`` says that there
is one filter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from nats_stream_source.options import KvOptions, StreamOptions
from nats_stream_source.source.batch_plan import BatchPlan, What
from nats_stream_source.source.query import query_of
from nats_stream_source.source.spark_api import check_pushdown

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter

    from nats_stream_source.source.pushdown import Narrowed


@dataclass
class BatchSplit(InputPartition):
    """What one Spark task reads."""

    task: BatchPlan

    def __repr__(self) -> str:
        plan = self.task.plan
        return f"BatchSplit({plan.stream} {self.task.what.value} ({plan.start}, {plan.end}])"


class BatchReader(DataSourceReader):
    """Tasks on the driver, rows on the executors."""

    def __init__(self, options: KvOptions | StreamOptions) -> None:
        self._options = options
        self._narrowed: Narrowed | None = None  # what the query's filters leave

    def partitions(self) -> Sequence[InputPartition]:
        """The tasks of the read."""
        from nats_stream_source.source.batch_planner import BatchPlanner
        from nats_stream_source.source.runtime import Runner

        runner = Runner(self._options.connection)
        try:
            planner = BatchPlanner(self._options, runner.link, narrowed=self._narrowed)
            return [BatchSplit(plan) for plan in runner.plan(planner.plans)]
        finally:
            runner.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        from nats_stream_source.source.as_of import read_as_of
        from nats_stream_source.source.current import read_current
        from nats_stream_source.source.reader import read_split

        if not isinstance(partition, BatchSplit):
            return iter(())  # Spark's own partition, in place of none at all
        task, query = partition.task, query_of(self._options)
        if task.what is What.CURRENT:
            return read_current(task, query)
        if task.what is What.AS_OF:
            return read_as_of(task, query)
        return read_split(task.plan, query)


class FilteredReader(BatchReader):
    """The same for a filtered DataFrame: it reads what the filters leave.

    A class of its own, since Spark refuses a reader that has ``pushFilters`` while its setting
    ``spark.sql.python.filterPushdown.enabled`` is off, as it is unless somebody sets it.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Note what ``filters`` leave to read; Spark looks at all of them again."""
        from nats_stream_source.source.pushdown import narrowed

        self._narrowed = narrowed(self._options, filters)
        return filters


def batch_reader(options: KvOptions | StreamOptions) -> BatchReader:
    """The reader for ``options``.

    Raises:
        OptionError: ``filterPushdown``, and this Spark has none.
    """
    check_pushdown(options.reading)
    return FilteredReader(options) if options.reading.filter_pushdown else BatchReader(options)
