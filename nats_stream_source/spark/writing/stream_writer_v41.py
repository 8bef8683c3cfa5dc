"""The writer of a streaming query on Spark 4.1 and newer, which passes record batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceStreamArrowWriter

from nats_stream_source.spark.writing.writers import (
    NatsCommitMessage,
    StreamWriterBase,
    write_micro_batch,
)

if TYPE_CHECKING:
    import pyarrow as pa


class NatsStreamArrowWriter(StreamWriterBase, DataSourceStreamArrowWriter):
    """``df.writeStream`` with record batches."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> NatsCommitMessage:
        """Write the rows of one task; returns when each one has its PubAck."""
        return write_micro_batch(self._options, iterator)
