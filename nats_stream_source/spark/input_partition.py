"""The partition that Spark pickles from the driver to a task."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql.datasource import InputPartition

from nats_stream_source.spark.formats.splits import BatchSplit, Split


@dataclass
class NatsInputPartition(InputPartition):
    """A split of a micro-batch (:class:`Split`) or of a batch (:class:`BatchSplit`).

    Attributes:
        running: whether the query had an earlier micro-batch with rows since its start: then
            executors have reached the servers before.
    """

    split: Split | BatchSplit
    running: bool = False

    def __repr__(self) -> str:
        return f"NatsInputPartition({self.split})"
