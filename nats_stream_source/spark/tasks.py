"""Tasks of Spark: the partition that each one reads; garbage collection in Spark's processes."""

from __future__ import annotations

import gc
from dataclasses import dataclass

from pyspark import TaskContext
from pyspark.sql.datasource import InputPartition

from nats_stream_source.rows.base import BatchSplit, Split


@dataclass
class NatsInputPartition(InputPartition):
    """The splits that one task reads, one after the other.

    Attributes:
        splits: of a micro-batch (:class:`Split`) or of a batch (:class:`BatchSplit`): one, or
            several where the query reads several streams.
        running: whether the query had an earlier micro-batch with rows since its start: then
            executors have reached the servers before.
    """

    splits: tuple[Split, ...] | tuple[BatchSplit, ...]
    running: bool = False

    def __repr__(self) -> str:
        more = f" and {len(self.splits) - 1} more" if len(self.splits) > 1 else ""
        return f"NatsInputPartition({self.splits[0]}{more})"


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
