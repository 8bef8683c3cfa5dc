"""Reads: connects Spark's reader interfaces to the planners and the readers of splits.

**Processes.** Spark creates the stream reader twice: in the planner's process, where it requests
offsets and partitions, and for the tasks, to which it pickles the reader and calls only ``read``.
So a connection is opened only when it is needed, and the planner's state is not pickled. Spark also
starts a process only to find the format, and one to request its columns: planner and readers are
imported where they are used, so that those processes do not load them.

**Streaming.** How Spark requests the end of a micro-batch depends on its version: with the start
and a limit since 4.2 (:class:`AdmissionReader`), which then also reports the stream's end for the
lag, without both before (:class:`NoAdmissionReader`). The reader is chosen by what Spark has, so
that a vendor's Spark with other version numbers works too.

**Batches.** Spark creates the reader on the driver and requests its partitions, once; then it
pickles the reader, and each task calls ``read``, again when an attempt fails. The reader does not
keep state between these calls. Once means once per DataFrame, not per query (Spark 4.1 to 4.3):
every query on one ``load()`` reads the partitions that were planned for it last. That is why the
reader does not take filters (``pushFilters``): a query with a filter plans again, and Spark then
reads these partitions for queries without the filter too, without a call of Python in between
(docs/internals/measurements.md, Spark).
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import pyspark
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

from nats_stream_source.errors import OffsetError, OptionError
from nats_stream_source.metrics.table import Counts, take
from nats_stream_source.options.table import setting_of
from nats_stream_source.rows.base import FormatAdapter, Split
from nats_stream_source.rows.offsets import REPORT, Offset, PlannerReport
from nats_stream_source.spark.session import ADMISSION_CONTROL

if ADMISSION_CONTROL:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )

if TYPE_CHECKING:
    import pyarrow as pa

    from nats_stream_source.spark.planning.query_planner import QueryPlanner
    from nats_stream_source.spark.runner import Runner
    from nats_stream_source.spark.task_counts import TaskCounts


@dataclass
class NatsInputPartition(InputPartition):
    """The splits that one task reads, one after the other.

    Attributes:
        splits: one, or several where the query reads several streams.
        running: whether the query had an earlier micro-batch with rows since its start: then
            executors have reached the servers before.
    """

    splits: tuple[Split, ...]
    running: bool = False


# The second task finds the modules that the first one imported.
_FREEZING_TASKS = 2
_frozen = 0  # tasks at which the objects of this process were frozen


def exempt_modules() -> None:
    """Exempt the objects of a worker at its first tasks, mostly modules, from collection.

    After each task, Spark collects the garbage of a worker that it keeps. With the modules of
    Spark, Arrow, NumPy and this package, the collector searches 70,000 objects, which takes 35 ms:
    more than the read of a small micro-batch.

    It does nothing in a process that does not run a task. Garbage that exists already is kept.
    """
    # A counter, since `gc.get_freeze_count` walks all frozen objects: some milliseconds a task.
    global _frozen
    if _frozen < _FREEZING_TASKS and TaskContext.get() is not None:
        _frozen += 1
        gc.freeze()


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
            runner.connection.wait_for_outages(self._adapter.options.common.outage_timeout)
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
        rows = read_splits(partition.splits, self._adapter, timeout, running=partition.running)
        rows = self._adapter.reported(rows)
        return rows if self._task_counts is None else self._task_counts.counted(rows)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: the server does not keep state of a query."""

    def stop(self) -> None:
        """Close the planner's connection."""
        if self._runner is not None:
            self._runner.close()
            self._runner = self._planner = None


class BatchReader(DataSourceReader):
    """Splits on the driver, rows on the executors."""

    def __init__(self, adapter: FormatAdapter) -> None:
        self._adapter = adapter

    def partitions(self) -> Sequence[InputPartition]:
        """The splits of the batch, by the task that reads them."""
        from nats_stream_source.spark.planning.batch_planner import plan_batch

        return [NatsInputPartition(splits) for splits in plan_batch(self._adapter)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of the splits of one task."""
        from nats_stream_source.spark.reading.batch import batch_rows

        exempt_modules()
        if not isinstance(partition, NatsInputPartition):
            return iter(())  # Spark replaces an empty list by a partition of its own
        return batch_rows(partition.splits, self._adapter)


class NoAdmissionReader(StreamReader):
    """Reads without limits, and keeps the query's position: for Spark 4.0 and 4.1.

    The end depends on the start: it carries ``origin``, ``initial_through`` and ``epoch``, and data
    loss is detected by comparing the start with the stream. So the reader keeps the start itself.
    Spark (measured on 4.0.5 and 4.1.4) provides it in time:

    =============================  ==============================================================
    a new query                    ``latestOffset()``, ``initialOffset()``, ``partitions(I, E)``
    a query that resumes           ``partitions(S, S)``, ``latestOffset()``, ``partitions(S, E)``
    the last micro-batch failed    ``partitions(E, E)``, ``partitions(S, E)``, ``latestOffset()``
    the first micro-batch failed   ``partitions(E, E)``, ``initialOffset()``, ``partitions(I, E)``
    =============================  ==============================================================

    S is the end that was logged last; Spark calls ``partitions(S, S)`` to give a reader the query's
    position. A reader whose end is requested before that has a new query, and starts at the initial
    offset.

    An exception: with ``spark.sql.streaming.triggerAvailableNowWrapper.enabled`` (off by default,
    since by Spark's documentation it can lose data), ``Trigger.AvailableNow`` requests its end
    before it provides the query's position. Such an end is invalid, and ``partitions(S, S)``, which
    still comes before an offset is logged, rejects it.

    ``Trigger.AvailableNow`` is one micro-batch here, like ``Trigger.Once``; after a failure it is
    the failed micro-batch, and the next run reads the rest.
    """

    def __init__(self, adapter: FormatAdapter, task_counts: TaskCounts | None = None) -> None:
        for name in ("maxRowsPerTrigger", "maxBytesPerTrigger", "minRowsPerTrigger"):
            if getattr(adapter.options.common, setting_of(name)) is not None:
                raise OptionError(
                    f"could not limit micro-batches: option {name!r} needs Spark 4.2 or newer, "
                    f"found {pyspark.__version__}, which does not pass limits to a Python source; "
                    f"remove the option to read all available messages in each micro-batch, or "
                    f"use a newer Spark"
                )
        super().__init__(adapter, task_counts)
        self._position: Offset | None = None
        self._end_without_position: dict[str, Any] | None = None

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # 4.2 adds arguments
        """The end of the next micro-batch, which starts where the last one ended."""
        start = self._position or self._plan(lambda planner: planner.initial_offset())
        end = self._plan(lambda planner: planner.latest_offset(start, limited=False)).to_json()
        if self._position is None:
            self._end_without_position = end
        return end

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The splits of a micro-batch.

        Raises:
            OffsetError: Spark requested the micro-batch's end before it provided the position.
        """
        if (
            self._position is None
            and start == end
            and self._end_without_position not in (None, end)
        ):
            raise OffsetError(
                "could not plan this run: Spark requested its end before it provided the query's "
                "position, expected the reverse; set "
                "spark.sql.streaming.triggerAvailableNowWrapper.enabled=false (the default), or "
                "use Spark 4.2 or newer"
            )
        splits = super().partitions(start, end)
        # Only now: Spark may request the same end again, which must not change.
        self._position = Offset.parse(end)
        return splits

    def commit(self, end: dict[str, Any]) -> None:
        """Keep the query's position, also after a micro-batch of which Spark read no row."""
        self._position = Offset.parse(end)


STREAM_READER: type[StreamReader] = NoAdmissionReader
"""The stream reader for the installed version of Spark."""

if ADMISSION_CONTROL:

    class AdmissionReader(StreamReader, SupportsTriggerAvailableNow):
        """Reads under Spark's admission control.

        Spark detects the support by the arguments of ``latestOffset``.
        """

        def __init__(self, adapter: FormatAdapter, task_counts: TaskCounts | None = None) -> None:
            super().__init__(adapter, task_counts)
            self._counts: Counts = Counter()  # of the planner's process

        def getDefaultReadLimit(self) -> ReadLimit:
            """``maxRowsPerTrigger``, ``maxBytesPerTrigger`` or ``minRowsPerTrigger``, or no limit.

            Spark passes it back to :meth:`latestOffset`, unless the trigger overrides it. It
            carries whether the limits apply; the planner reads all values from the options, since a
            limit of Spark has only one.
            """
            options = self._adapter.options.common
            if options.max_rows_per_trigger is not None:
                return ReadMaxRows(options.max_rows_per_trigger)
            if options.max_bytes_per_trigger is not None:
                return ReadMaxBytes(options.max_bytes_per_trigger)
            if options.min_rows_per_trigger is not None:
                return ReadMinRows(options.min_rows_per_trigger)
            return ReadAllAvailable()

        def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
            """The end of the micro-batch that starts at ``start``."""
            offset = Offset.parse(start)
            # Trigger.Once requests all available messages, regardless of the options.
            limited = isinstance(limit, (ReadMaxRows, ReadMaxBytes, ReadMinRows))
            end = self._plan(lambda planner: planner.latest_offset(offset, limited=limited))
            return end.to_json()

        def reportLatestOffset(self) -> dict[str, Any] | None:
            """The stream's end, for the lag in the query's progress, and the planner's counts."""
            if self._planner is None or (latest := self._planner.stream_end) is None:
                return None
            self._counts.update(take())
            report = PlannerReport(self._counts, self._planner.bytes_behind).to_json()
            return latest.to_json() | ({REPORT: report} if report else {})

        def prepareForTriggerAvailableNow(self) -> None:
            """Fix the end of this run."""
            self._plan(lambda planner: planner.prepare_available_now())

    STREAM_READER = AdmissionReader
