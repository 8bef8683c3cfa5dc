"""The rows of both formats: record batches from the frames of messages, and their Arrow schemas.

Rows are built as columns from frames, without a Python object per message; only the few messages
with unusual headers are parsed one by one.
"""

from __future__ import annotations

import functools

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nats_stream_source.jetstream.kv.codec import KvCodec, OnUndecodable, SkippedEntries
from nats_stream_source.jetstream.subjects import bucket_of
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.options import KvOptions, StreamOptions
from nats_stream_source.rows.base import Split
from nats_stream_source.rows.columns import read_columns
from nats_stream_source.wire.codec import decode_key, decode_value, each
from nats_stream_source.wire.columns import entry_operations, header_blocks, payloads, subjects
from nats_stream_source.wire.consumer.deliveries import Deliveries
from nats_stream_source.wire.header_columns import HEADERS, header_maps, origins

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


def kv_batch(
    frames: Deliveries, split: Split, options: KvOptions, skipped: SkippedEntries
) -> pa.RecordBatch:
    """The rows of ``nats_kv``, in the order of ``frames``; see :meth:`KvFormat.record_batch`."""
    count = len(frames)
    bucket, key = bucket_of(split.range.stream), subjects(frames, after=split.range.prefix)
    value = pa.nulls(count, pa.binary()) if options.meta_only else payloads(frames)
    kept, operation = None, _constant_column("PUT", pa.string(), count)
    if (marked := entry_operations(frames)) is not None:
        operation, put = marked, pc.equal(marked, "PUT")
        value = pc.if_else(put, value, pa.scalar(None, pa.binary()))
        kept = put if options.ignore_deletes else None
    raw_key = key
    if options.codec:
        key, value, kept = _decoded(
            options.codec, skipped, bucket, raw_key, value, frames.stream_seq, kept
        )
    columns = [
        _constant_column(bucket, pa.string(), count),
        key,
        value,
        _integer_column(frames.stream_seq),
        _timestamp_column(frames.time),
        operation,
        _integer_column(frames.pending),
        _initial_column(frames.stream_seq, split.initial_through),
        _created_column(split.range.known.created, count),
    ]
    columns += _header_columns(frames, options.added_columns)
    if "includeRawKey" in options.added_columns:
        columns.append(raw_key)
    schema = arrow_schema("nats_kv", options.added_columns)
    rows = pa.RecordBatch.from_arrays(columns, schema=schema)
    return rows if kept is None else rows.filter(kept)


def stream_batch(frames: Deliveries, split: Split, options: StreamOptions) -> pa.RecordBatch:
    """The rows of ``nats_stream``, in the order of ``frames``."""
    count = len(frames)
    columns = [
        _constant_column(split.range.stream, pa.string(), count),
        # A server accepts any bytes; one such message must not make a stream unreadable.
        subjects(frames, replace=True),
        pa.nulls(count, pa.binary()) if options.headers_only else payloads(frames),
        _integer_column(frames.stream_seq),
        _timestamp_column(frames.time),
        _created_column(split.range.known.created, count),
    ]
    columns += _header_columns(frames, options.added_columns)
    schema = arrow_schema("nats_stream", options.added_columns)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _header_columns(frames: Deliveries, added: frozenset[str]) -> list[pa.Array]:
    maps = [header_maps(header_blocks(frames))] if "includeHeaders" in added else []
    return [*maps, *(origins(header_blocks(frames)) if "includeOrigin" in added else ())]


def _decoded(
    codec: KvCodec,
    skipped: SkippedEntries,
    bucket: str,
    raw_keys: pa.Array,
    raw_values: pa.Array,
    revisions: NDArray[np.int64],
    kept: pa.Array | None,
) -> tuple[pa.Array, pa.Array, pa.Array | None]:
    """Keys, values, and which rows are kept (None for all), by ``onUndecodable``."""
    keys = each(decode_key, codec.key, raw_keys) if codec.key else raw_keys
    values = each(decode_value, codec.value, raw_values) if codec.value else raw_values
    if codec.on_undecodable is OnUndecodable.NULL or (
        not keys.null_count and values.null_count == raw_values.null_count
    ):
        return keys, values, kept
    good = pc.and_(keys.is_valid(), pc.equal(values.is_valid(), raw_values.is_valid()))
    bad = pc.invert(good) if kept is None else pc.and_not(kept, good)
    if (first := pc.index(bad, True).as_py()) < 0:
        return keys, values, kept
    entry = (bucket, raw_keys[first].as_py(), int(revisions[first]))
    if codec.on_undecodable is OnUndecodable.FAIL:
        raise codec.undecodable(*entry)
    skipped.add(*entry, count=pc.sum(bad).as_py())
    return keys, values, good if kept is None else pc.and_(kept, good)


@functools.lru_cache(maxsize=16)
def _constant_column(value: str | int | bool, kind: pa.DataType, count: int) -> pa.Array:
    """``value`` in each of ``count`` rows; cached, since most batches repeat value and length."""
    return pa.repeat(pa.scalar(value, kind), count)


@functools.lru_cache(maxsize=16)
def _created_column(stream_created: str, count: int) -> pa.Array:
    """The column ``stream_created`` (given as RFC 3339), floored to microseconds."""
    return _constant_column(nanoseconds(stream_created) // 1000, _TIMESTAMP, count)


def _timestamp_column(timestamp_ns: NDArray[np.int64]) -> pa.Array:
    """Nanoseconds since 1970 as Spark timestamps, floored to microseconds."""
    return _integer_column(timestamp_ns // 1000, _TIMESTAMP)


def _integer_column(values: NDArray[np.int64], kind: pa.DataType = _INT64) -> pa.Array:
    """Integers as a column of 64 bits, without a copy and without nulls."""
    # pa.array() costs several times as much for a batch: it searches NumPy's and pandas' types.
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(kind, values.size, [None, buffer], null_count=0)


def _initial_column(sequences: NDArray[np.int64], initial_through: int) -> pa.Array:
    """Whether each sequence is at most ``initial_through``; usually all or none are."""
    count = sequences.size
    if count and sequences.max() <= initial_through:
        return _constant_column(True, pa.bool_(), count)
    if count and sequences.min() > initial_through:
        return _constant_column(False, pa.bool_(), count)
    return pa.array(sequences <= initial_through)
