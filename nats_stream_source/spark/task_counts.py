"""Takes the counts of tasks to the driver's process, by an accumulator.

Spark sends the updates of accumulators with the end of each task, also for Python data sources, if
these were registered by the driver's process: :func:`counted_source` gives the registered class the
accumulator of the process, and the class passes it to its readers and writers. A format that Spark
has found by its module name lacks it, and so does a session over Spark Connect: then the counts are
only in the executors' log lines.

Only tasks of streaming queries are counted, and only those that succeed: the counts of a failed
attempt are lost with its worker.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

from pyspark import TaskContext
from pyspark.accumulators import Accumulator, AccumulatorParam

from nats_stream_source.metrics import active_recorder
from nats_stream_source.metrics.table import Counts, take
from nats_stream_source.spark.session import is_connect

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSource


T = TypeVar("T")

QUERY_ID = "sql.streaming.queryId"
"""The property of a task, or of the thread that runs a micro-batch."""

_Sums = Accumulator[Counts]


class _Sum(AccumulatorParam[Counts]):
    def zero(self, value: Counts) -> Counts:
        return Counter()

    def addInPlace(self, value1: Counts, value2: Counts) -> Counts:
        # A new object: another thread may read the earlier one.
        return value1 + value2


class TaskCounts:
    """What tasks count; pickled to them with the reader or writer."""

    def __init__(self, accumulator: _Sums) -> None:
        self._accumulator = accumulator

    def counted(self, rows: Iterator[T]) -> Iterator[T]:
        """Yield ``rows``, then add what this process counted meanwhile."""
        take()
        yield from rows
        self.add()

    def add(self) -> None:
        """Add what this process has counted since the last call, for the query of the task."""
        context = TaskContext.get()
        query = context.getLocalProperty(QUERY_ID) if context is not None else None
        counts = take()
        if query and counts:
            self._accumulator.add(Counter({(query, *key): n for key, n in counts.items()}))


_lock = threading.Lock()
_accumulators: weakref.WeakKeyDictionary[SparkContext, _Sums] = weakref.WeakKeyDictionary()
_passed_on: weakref.WeakKeyDictionary[SparkContext, Counts] = weakref.WeakKeyDictionary()


def counted_source(spark: SparkSession, source: type[DataSource]) -> type[DataSource]:
    """The class to register for ``source``: with the accumulator of the session's process."""
    if is_connect(spark):
        return source
    context = spark.sparkContext
    if context not in _accumulators:
        _accumulators[context] = context.accumulator(Counter(), _Sum())

    # A local class is pickled by value, with its attribute.
    class Counted(source):  # type: ignore[valid-type,misc]
        task_counts = TaskCounts(_accumulators[context])

    return Counted


def pass_on_task_counts() -> None:
    """Pass to the recorder what tasks have counted since the last call."""
    active = active_recorder()
    if active is None:
        return
    with _lock:  # several exporters may read at a time
        for context, accumulator in list(_accumulators.items()):
            passed = _passed_on.setdefault(context, Counter())
            for key, total in accumulator.value.items():
                query, *counted = key
                label, new = active.label(query), total - passed[key]
                if label is not None and new > 0:
                    passed[key] = total
                    active.add_counts(Counter({tuple(counted): new}), label, "executor")
