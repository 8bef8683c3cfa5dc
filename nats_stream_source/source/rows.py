"""Frames of a stream to rows: Arrow record batches of ADR-8's Entry, or of a stream's messages.

Everything is columns: no Python object per message, except for the few whose headers must be looked
at one by one.
"""

from __future__ import annotations

import functools

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.errors import ProtocolError
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.wire.columns import ack_tokens, header_blocks, payloads, subjects
from nats_stream_source.wire.frames import Frames
from nats_stream_source.wire.header_columns import HEADERS, header_maps
from nats_stream_source.wire.headers import operations

_TIME = pa.timestamp("us", tz="UTC")

KV_SCHEMA = pa.schema(
    [
        ("bucket", pa.string()),
        ("key", pa.string()),
        ("value", pa.binary()),
        ("revision", pa.int64()),
        ("created", _TIME),
        ("operation", pa.string()),
        ("delta", pa.int64()),
        ("initial", pa.bool_()),
        ("stream_created", _TIME),
    ]
)

STREAM_SCHEMA = pa.schema(
    [
        ("stream", pa.string()),
        ("subject", pa.string()),
        ("data", pa.binary()),
        ("sequence", pa.int64()),
        ("timestamp", _TIME),
        ("stream_created", _TIME),
    ]
)

_HEADERS = pa.field("headers", HEADERS)
KV_HEADERS_SCHEMA = KV_SCHEMA.append(_HEADERS)
STREAM_HEADERS_SCHEMA = STREAM_SCHEMA.append(_HEADERS)


def kv_rows(
    frames: Frames,
    *,
    bucket: str,
    prefix: str,
    stream_created: str,
    initial_through: int,
    meta_only: bool,
    ignore_deletes: bool,
    include_headers: bool = False,
) -> pa.RecordBatch:
    """Rows of ``nats_kv``, in the order of ``frames``.

    The schema is :data:`KV_SCHEMA`, or :data:`KV_HEADERS_SCHEMA`.

    Args:
        frames: deliveries of the bucket's stream.
        prefix: what stands before the key in every subject.
        stream_created: RFC 3339; times are floored to microseconds.
        initial_through: entries up to this revision are initial values.
        meta_only: ``value`` is null in every row.
        ignore_deletes: leave DEL and PURGE markers out.
        include_headers: with the column ``headers``, null where a message has no header block.

    Raises:
        ProtocolError: a subject does not begin with ``prefix``.
    """
    tokens = ack_tokens(frames)
    count = len(frames)
    try:
        key = subjects(frames, after=prefix)
    except ValueError:
        raise ProtocolError(
            f"a subject of bucket {bucket!r} does not begin with {prefix!r}"
        ) from None
    value = pa.nulls(count, pa.binary()) if meta_only else payloads(frames)
    put, operation = None, _constant("PUT", pa.string(), count)
    blocks = None
    if (frames.payload_begin > frames.header_begin).any():
        blocks = header_blocks(frames)
        operation = operations(blocks)
        put = pc.equal(operation, "PUT")
        if not pc.all(put).as_py():
            value = pc.if_else(put, value, pa.scalar(None, pa.binary()))
    columns = [
        _constant(bucket, pa.string(), count),
        key,
        value,
        pa.array(tokens.stream_seq),
        _times(tokens.timestamp_ns // 1000),
        operation,
        pa.array(tokens.pending),
        pa.array(tokens.stream_seq <= initial_through),
        _constant(nanoseconds(stream_created) // 1000, _TIME, count),
    ]
    schema = KV_SCHEMA
    if include_headers:
        columns.append(pa.nulls(count, HEADERS) if blocks is None else header_maps(blocks))
        schema = KV_HEADERS_SCHEMA
    rows = pa.RecordBatch.from_arrays(columns, schema=schema)
    return rows.filter(put) if ignore_deletes and put is not None else rows


def stream_rows(
    frames: Frames,
    *,
    stream: str,
    stream_created: str,
    headers_only: bool,
    include_headers: bool = False,
) -> pa.RecordBatch:
    """Rows of ``nats_stream``, in the order of ``frames``.

    The schema is :data:`STREAM_SCHEMA`, or :data:`STREAM_HEADERS_SCHEMA`.

    Args:
        stream_created: RFC 3339; times are floored to microseconds.
        headers_only: ``data`` is null in every row.
        include_headers: with the column ``headers``, null where a message has no header block.
    """
    tokens = ack_tokens(frames)
    count = len(frames)
    columns = [
        _constant(stream, pa.string(), count),
        # A server takes any bytes; one such message must not make a stream unreadable.
        subjects(frames, replace=True),
        pa.nulls(count, pa.binary()) if headers_only else payloads(frames),
        pa.array(tokens.stream_seq),
        _times(tokens.timestamp_ns // 1000),
        _constant(nanoseconds(stream_created) // 1000, _TIME, count),
    ]
    if not include_headers:
        return pa.RecordBatch.from_arrays(columns, schema=STREAM_SCHEMA)
    columns.append(header_maps(header_blocks(frames)))
    return pa.RecordBatch.from_arrays(columns, schema=STREAM_HEADERS_SCHEMA)


@functools.lru_cache(maxsize=16)
def _constant(value: str | int, kind: pa.DataType, count: int) -> pa.Array:
    # Kept, since nearly all batches have the same values and length.
    return pa.repeat(pa.scalar(value, kind), count)


def _times(microseconds: np.ndarray[tuple[int], np.dtype[np.int64]]) -> pa.Array:
    return pa.array(microseconds, pa.int64()).view(_TIME)
