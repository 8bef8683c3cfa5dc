"""Streaming reads: connects Spark's stream reader interface to the planner and the split readers.

Spark creates the stream reader twice: in the planner's process, where it requests offsets and
partitions, and for the tasks, to which it pickles the reader and calls only ``read``. So a
connection is opened only when it is needed, and the planner's state is not pickled. Spark also
starts a process only to find the format, and one to request its columns: planner and readers are
imported where they are used, so that those processes do not load them.

How Spark requests the end of a micro-batch depends on its version: with the start and a limit since
4.2 (``spark.stream_reader_v42``), without both before (``spark.stream_reader_v40``). This module
has the common part.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from nats_stream_source.rows.base import Split
from nats_stream_source.rows.offsets import Offset
from nats_stream_source.spark.tasks import NatsInputPartition, exempt_modules

if TYPE_CHECKING:
    import pyarrow as pa

    from nats_stream_source.rows.base import FormatAdapter
    from nats_stream_source.spark.planning.query_planner import QueryPlanner
    from nats_stream_source.spark.runner import Runner
    from nats_stream_source.spark.task_counts import TaskCounts

T = TypeVar("T")


class StreamReader(DataSourceStreamReader):
    """Offsets and splits on the driver, rows on the executors; everything but ``latestOffset``."""

    def __init__(self, adapter: FormatAdapter, task_counts: TaskCounts | None = None) -> None:
        self._adapter = adapter
        self._task_counts = task_counts
        self._runner: Runner | None = None
        self._planner: QueryPlanner | None = None
        self._planned = False  # a micro-batch with rows

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_runner": None, "_planner": None}

    def _plan(self, call: Callable[[QueryPlanner], Awaitable[T]]) -> T:
        """Run ``call`` with the planner; retry while the server is unavailable.

        For at most ``connectTimeout`` until a call has succeeded, then for ``outageTimeout``: so a
        wrong address is an error at once, and a running query continues after an outage.
        """
        if self._runner is None or self._planner is None:
            from nats_stream_source.spark.planning.query_planner import QueryPlanner
            from nats_stream_source.spark.runner import Runner

            self._runner = Runner(self._adapter.options.connection)
            self._planner = QueryPlanner(self._adapter, self._runner.connection)
        planner, runner = self._planner, self._runner
        result = runner.plan(lambda: call(planner))
        if runner.connection.outage is None:
            runner.wait_for_outages(self._adapter.options.common.outage_timeout)
        return result

    def initialOffset(self) -> dict[str, Any]:
        """The start position of a query without a checkpoint."""
        return self._plan(lambda planner: planner.initial_offset()).to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The splits of a micro-batch."""
        first, last = Offset.parse(start), Offset.parse(end)
        tasks = self._plan(lambda planner: planner.tasks(first, last))
        running, self._planned = self._planned, self._planned or bool(tasks)
        return [NatsInputPartition(splits, running) for splits in tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of the splits of one task."""
        from nats_stream_source.spark.reading.split_reader import read_splits

        exempt_modules()
        assert isinstance(partition, NatsInputPartition)
        timeout = self._adapter.options.common.outage_timeout
        splits = [split for split in partition.splits if isinstance(split, Split)]
        rows = read_splits(splits, self._adapter, timeout, running=partition.running)
        rows = self._adapter.reported(rows)
        return rows if self._task_counts is None else self._task_counts.counted(rows)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: the server does not keep state of a query."""

    def stop(self) -> None:
        """Close the planner's connection."""
        if self._runner is not None:
            self._runner.close()
            self._runner = self._planner = None
