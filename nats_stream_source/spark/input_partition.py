"""The partition that Spark pickles from the driver to a task."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql.datasource import InputPartition

from nats_stream_source.spark.formats.splits import BatchSplit, Split


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
