"""What a bucket or stream is written, and the rows that are read, whatever their format."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import pyarrow as pa

from tests.support.nats import buckets


class Marker(Enum):
    """A removal of a key: what is written instead of a value."""

    DEL = "DEL"
    PURGE = "PURGE"


Value = bytes | Marker
Written = tuple[str, Value]
"""A key, and what is written to it."""

_HEADERS = {Marker.DEL: buckets.DEL, Marker.PURGE: buckets.PURGE}


def message(prefix: str, written: Written) -> buckets.Message:
    """The message that writes it."""
    key, content = written
    if isinstance(content, Marker):
        return prefix + key, b"", _HEADERS[content]
    return prefix + key, content, None


@dataclass(frozen=True, slots=True)
class Row:
    """A row, whatever the format calls its columns."""

    seq: int
    key: str
    value: bytes | None
    operation: str = "PUT"
    created: Any = None

    @property
    def written(self) -> tuple[str, Value | None]:
        """What was written, as this row has it; a marker's value must be null."""
        if self.operation == "PUT" or self.value is not None:
            return self.key, self.value
        return self.key, Marker(self.operation)


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    columns = batch.to_pydict()
    if "key" in columns:
        names = ("revision", "key", "value", "operation", "stream_created")
        return [Row(*values) for values in zip(*(columns[name] for name in names), strict=True)]
    rows = zip(
        columns["sequence"],
        columns["subject"],
        columns["data"],
        columns["stream_created"],
        strict=True,
    )
    return [Row(seq, subject.split(".", 1)[1], data, created=at) for seq, subject, data, at in rows]
