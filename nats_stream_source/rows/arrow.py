"""The Arrow schemas of both formats, and the columns that their rows have in common.

Rows are built as columns from frames, without a Python object per message; only the few messages
with unusual headers are parsed one by one.
"""

from __future__ import annotations

import functools

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.rows.columns import read_columns
from nats_stream_source.wire.header_columns import HEADERS

_INT64 = pa.int64()
_TIMESTAMP = pa.timestamp("us", tz="UTC")

_ARROW_TYPES = {
    "STRING": pa.string(),
    "BINARY": pa.binary(),
    "BIGINT": _INT64,
    "BOOLEAN": pa.bool_(),
    "TIMESTAMP": _TIMESTAMP,
    "MAP<STRING, ARRAY<STRING>>": HEADERS,
}
"""The Arrow types of the DDL types of columns, exactly as Spark converts them."""


@functools.lru_cache
def arrow_schema(format_name: str, added: frozenset[str] = frozenset()) -> pa.Schema:
    """The Arrow schema of the rows of a format; ``added`` as in ``columns.read_columns``."""
    columns = read_columns(format_name, added)
    return pa.schema([(name, _ARROW_TYPES[kind]) for name, kind in columns.items()])


@functools.lru_cache(maxsize=16)
def constant_column(value: str | int | bool, kind: pa.DataType, count: int) -> pa.Array:
    """``value`` in each of ``count`` rows; cached, since most batches repeat value and length."""
    return pa.repeat(pa.scalar(value, kind), count)


@functools.lru_cache(maxsize=16)
def created_column(stream_created: str, count: int) -> pa.Array:
    """The column ``stream_created`` (given as RFC 3339), floored to microseconds."""
    return constant_column(nanoseconds(stream_created) // 1000, _TIMESTAMP, count)


def timestamp_column(timestamp_ns: NDArray[np.int64]) -> pa.Array:
    """Nanoseconds since 1970 as Spark timestamps, floored to microseconds."""
    return integer_column(timestamp_ns // 1000, _TIMESTAMP)


def integer_column(values: NDArray[np.int64], kind: pa.DataType = _INT64) -> pa.Array:
    """Integers as a column of 64 bits, without a copy and without nulls."""
    # pa.array() costs several times as much for a batch: it searches NumPy's and pandas' types.
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(kind, values.size, [None, buffer], null_count=0)


def initial_column(sequences: NDArray[np.int64], initial_through: int) -> pa.Array:
    """Whether each sequence is at most ``initial_through``; usually all or none are."""
    count = sequences.size
    if count and sequences.max() <= initial_through:
        return constant_column(True, pa.bool_(), count)
    if count and sequences.min() > initial_through:
        return constant_column(False, pa.bool_(), count)
    return pa.array(sequences <= initial_through)
