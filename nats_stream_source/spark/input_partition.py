"""The partition that Spark pickles from the driver to a task."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql.datasource import InputPartition

from nats_stream_source.spark.formats.splits import BatchSplit, Split


@dataclass
class NatsInputPartition(InputPartition):
    """A split of a micro-batch (:class:`Split`) or of a batch (:class:`BatchSplit`)."""

    split: Split | BatchSplit

    def __repr__(self) -> str:
        return f"NatsInputPartition({self.split})"
