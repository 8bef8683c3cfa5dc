"""The rows of ``nats_stream``: record batches from the frames of a stream's messages."""

from __future__ import annotations

import pyarrow as pa

from nats_stream_source.options import StreamOptions
from nats_stream_source.rows.arrow import (
    arrow_schema,
    constant_column,
    created_column,
    integer_column,
    timestamp_column,
)
from nats_stream_source.rows.splits import Split
from nats_stream_source.wire.columns import header_blocks, payloads, subjects
from nats_stream_source.wire.consumer.deliveries import Deliveries
from nats_stream_source.wire.header_columns import header_maps, origins


def record_batch(frames: Deliveries, split: Split, options: StreamOptions) -> pa.RecordBatch:
    """The rows of ``frames``, in their order."""
    count = len(frames)
    columns = [
        constant_column(split.range.stream, pa.string(), count),
        # A server accepts any bytes; one such message must not make a stream unreadable.
        subjects(frames, replace=True),
        pa.nulls(count, pa.binary()) if options.headers_only else payloads(frames),
        integer_column(frames.stream_seq),
        timestamp_column(frames.time),
        created_column(split.range.known.created, count),
    ]
    if options.common.include_headers:
        columns.append(header_maps(header_blocks(frames)))
    if options.common.include_origin:
        columns += origins(header_blocks(frames))
    schema = arrow_schema("nats_stream", options.added_columns)
    return pa.RecordBatch.from_arrays(columns, schema=schema)
