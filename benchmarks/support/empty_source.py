"""A Python source that does no work: measures Spark's part of a micro-batch.

A batch starts when the file ``path`` has grown; each batch yields the same prepared Arrow
record batch, with the columns of ``nats_kv``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from nats_stream_source.spark.formats.columns import ddl
from nats_stream_source.spark.formats.rows import arrow_schema

_ROW = {
    "bucket": "bench",
    "key": "key.1",
    "value": b"v" * 128,
    "revision": 1,
    "created": 1_700_000_000_000_000,
    "operation": "PUT",
    "delta": 0,
    "initial": False,
    "stream_created": 1_700_000_000_000_000,
}
_PREPARED = pa.RecordBatch.from_pylist([_ROW], schema=arrow_schema("nats_kv"))


class EmptySource(DataSource):
    """``format("empty_bench")``; option ``path``."""

    @classmethod
    def name(cls) -> str:
        """The name for ``format()``."""
        return "empty_bench"

    def schema(self) -> str:
        """The columns of ``nats_kv``."""
        return ddl("nats_kv")

    def streamReader(self, schema: StructType) -> EmptyReader:
        """The stream reader."""
        return EmptyReader(self.options["path"])


@dataclass
class WholeRange(InputPartition):
    """The only split."""

    value: None = None


class EmptyReader(DataSourceStreamReader):
    """Offsets are sizes of the file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def initialOffset(self) -> dict[str, Any]:
        """Before the first batch."""
        return {"size": 0}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The file's size now."""
        return {"size": os.path.getsize(self._path)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """A single split."""
        return [WholeRange()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The prepared row."""
        yield _PREPARED
