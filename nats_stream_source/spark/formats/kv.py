"""The format ``nats_kv``: the entries of a bucket (ADR-8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nats_stream_source.errors import ProtocolError
from nats_stream_source.jetstream.kv.bucket import Bucket, bucket_stream_info
from nats_stream_source.jetstream.kv.codec import OnUndecodable, SkippedEntries
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.subjects import bucket_of, stream_of
from nats_stream_source.options import DeliverPolicy, KvOptions, StartPosition
from nats_stream_source.spark.formats.base import FormatAdapter, ReadScope, UserTerms
from nats_stream_source.spark.formats.rows import (
    arrow_schema,
    constant_column,
    created_column,
    initial_column,
    integer_column,
    timestamp_column,
)
from nats_stream_source.spark.formats.splits import Split
from nats_stream_source.wire.codec.columns import decode_keys, decode_values
from nats_stream_source.wire.columns import entry_operations, header_blocks, payloads, subjects
from nats_stream_source.wire.consumer.ack_subject import ack_tokens
from nats_stream_source.wire.framing.frames import Frames
from nats_stream_source.wire.header_columns import header_maps, origins

if TYPE_CHECKING:
    # Spark pickles the reader in a process that does not connect, which need not load nats-py.
    from nats_stream_source.jetstream.api import JetStream

_START_OPTIONS = {
    DeliverPolicy.ALL: "includeHistory",
    DeliverPolicy.NEW: "updatesOnly",
    DeliverPolicy.BY_START_SEQUENCE: "startSequence",
    DeliverPolicy.BY_START_TIME: "startTime",
}


class KvFormat(FormatAdapter):
    """A query of a bucket, from its options."""

    options: KvOptions
    terms = UserTerms(
        sequence="revision",
        stream_option="option 'bucket'",
        filter_option="keys",
        retention_hint="a deeper history keeps revisions longer; option 'includeHistory' requires "
        "all of them",
    )

    def __init__(self, options: KvOptions) -> None:
        self.options = options
        self.user_filters = options.keys
        self.requires_all_messages = options.include_history
        self.headers_only = options.meta_only
        self.min_last_seq = options.min_last_revision
        self.stream_set = options.buckets
        self._skipped = SkippedEntries()
        self.start_option = _START_OPTIONS.get(options.start_position.policy)

    async def stream_name(self, jetstream: JetStream) -> str:
        """The name of the bucket's stream."""
        assert self.options.bucket is not None
        return stream_of(self.options.bucket)

    def stream_of(self, name: str) -> str:
        """The stream of a bucket."""
        return stream_of(name)

    def selects(self, stream: str) -> bool:
        """Whether the query reads the bucket of a stream; False for a stream without a bucket."""
        bucket = bucket_of(stream)
        return bucket != stream and super().selects(bucket)

    def start_of(self, stream: str) -> StartPosition:
        """The start position of the bucket of a stream."""
        return super().start_of(bucket_of(stream))

    async def stream_info(self, jetstream: JetStream, stream: str) -> StreamInfo:
        """The bucket's stream; BucketNotFoundError if it does not exist."""
        return await bucket_stream_info(jetstream, bucket_of(stream))

    async def verify_filters(self, jetstream: JetStream, info: StreamInfo) -> None:
        """Accept every filter whose keys can be sent: a bucket accepts any key."""
        for subject in self.read_scope(info).filters:
            jetstream.connection.control_line.validate_name(subject)

    def read_scope(self, info: StreamInfo) -> ReadScope:
        """The entries that the option ``keys`` selects."""
        bucket = Bucket.from_stream_config(bucket_of(info.name), info.config)
        return ReadScope(
            filters=bucket.filter_subjects(self.options.keys),
            match_all=f"{bucket.prefix}>",
            prefix=bucket.prefix,
            history=bucket.history,
            silent_removals=bucket.unmarked_removals,
        )

    def record_batch(self, frames: Frames, split: Split) -> pa.RecordBatch:
        """Rows of ``nats_kv``, in the order of ``frames``.

        With ``ignoreDeletes`` the batch does not contain markers.

        Raises:
            UndecodableError: a key or value is not decodable, with ``onUndecodable=fail``.
            ProtocolError: a subject does not start with ``split.prefix``.
        """
        options = self.options
        tokens = ack_tokens(frames)
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
            key, value, kept = self._decoded(bucket, raw_key, value, tokens.stream_seq, kept)
        columns = [
            constant_column(bucket, pa.string(), count),
            key,
            value,
            integer_column(tokens.stream_seq),
            timestamp_column(tokens.timestamp_ns),
            operation,
            integer_column(tokens.pending),
            initial_column(tokens.stream_seq, split.initial_through),
            created_column(split.range.created, count),
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
        self,
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
        codec = self.options.codec
        keys = decode_keys(codec.key, raw_keys) if codec.key else raw_keys
        values = decode_values(codec.value, raw_values) if codec.value else raw_values
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
        self._skipped.add(*entry, count=pc.sum(bad).as_py())
        return keys, values, good if kept is None else pc.and_(kept, good)

    def finish(self) -> None:
        """Log the number of rows that ``onUndecodable=skip`` has left out."""
        self._skipped.report()
