"""The rows of ``nats_kv``: record batches from the frames of a bucket's entries (ADR-8)."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nats_stream_source.errors import ProtocolError
from nats_stream_source.jetstream.kv.codec import KvCodec, OnUndecodable, SkippedEntries
from nats_stream_source.jetstream.subjects import bucket_of
from nats_stream_source.options import KvOptions
from nats_stream_source.rows.arrow import (
    arrow_schema,
    constant_column,
    created_column,
    initial_column,
    integer_column,
    timestamp_column,
)
from nats_stream_source.rows.splits import Split
from nats_stream_source.wire.codec import decode_key, decode_value, each
from nats_stream_source.wire.columns import entry_operations, header_blocks, payloads, subjects
from nats_stream_source.wire.consumer.deliveries import Deliveries
from nats_stream_source.wire.header_columns import header_maps, origins


def record_batch(
    frames: Deliveries, split: Split, options: KvOptions, skipped: SkippedEntries
) -> pa.RecordBatch:
    """The rows of ``frames``, in their order; see :meth:`KvFormat.record_batch`."""
    count = len(frames)
    bucket = bucket_of(split.range.stream)
    try:
        key = subjects(frames, after=split.prefix)
    except ValueError:
        raise ProtocolError(
            f"could not read a key of bucket {bucket!r}: a subject does not start with "
            f"{split.prefix!r}"
        ) from None
    value = pa.nulls(count, pa.binary()) if options.meta_only else payloads(frames)
    kept, operation = None, constant_column("PUT", pa.string(), count)
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
        constant_column(bucket, pa.string(), count),
        key,
        value,
        integer_column(frames.stream_seq),
        timestamp_column(frames.time),
        operation,
        integer_column(frames.pending),
        initial_column(frames.stream_seq, split.initial_through),
        created_column(split.range.known.created, count),
    ]
    if options.common.include_headers:
        columns.append(header_maps(header_blocks(frames)))
    if options.common.include_origin:
        columns += origins(header_blocks(frames))
    if options.include_raw_key:
        columns.append(raw_key)
    schema = arrow_schema("nats_kv", options.added_columns)
    rows = pa.RecordBatch.from_arrays(columns, schema=schema)
    return rows if kept is None else rows.filter(kept)


def _decoded(
    codec: KvCodec,
    skipped: SkippedEntries,
    bucket: str,
    raw_keys: pa.Array,
    raw_values: pa.Array,
    revisions: NDArray[np.int64],
    kept: pa.Array | None,
) -> tuple[pa.Array, pa.Array, pa.Array | None]:
    """Decode keys and values, and apply ``onUndecodable``.

    Args:
        kept: which rows are kept; None for all.

    Returns:
        keys, values, and which rows are kept.
    """
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
