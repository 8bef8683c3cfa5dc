"""The format ``nats_kv``: the entries of a bucket (ADR-8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nats_stream_source.jetstream.kv.bucket import Bucket, bucket_stream_info
from nats_stream_source.jetstream.kv.codec import SkippedEntries
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.subjects import bucket_of, stream_of
from nats_stream_source.options import DeliverPolicy, KvOptions, StartPosition
from nats_stream_source.rows.base import FormatAdapter, ReadScope, UserTerms

if TYPE_CHECKING:
    import pyarrow as pa

    # Spark pickles the reader in a process that does not connect, which need not load nats-py.
    from nats_stream_source.jetstream.api import JetStream
    from nats_stream_source.rows.splits import Split
    from nats_stream_source.wire.consumer.deliveries import Deliveries

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

    async def completed(self, jetstream: JetStream, info: StreamInfo) -> StreamInfo:
        """``info`` with the origin of a mirror of a mirror."""
        # Deferred import: it loads nats-py.
        from nats_stream_source.jetstream.kv.requests import with_origin

        return await with_origin(jetstream, info)

    async def verify_filters(self, jetstream: JetStream, info: StreamInfo) -> None:
        """Accept every filter whose keys can be sent: a bucket accepts any key."""
        for subject in self.read_scope(info).filters:
            jetstream.connection.control_line.validate_name(subject)

    def read_scope(self, info: StreamInfo) -> ReadScope:
        """The entries that the option ``keys`` selects."""
        bucket = Bucket.of(info)
        return ReadScope(
            filters=bucket.filter_subjects(self.options.keys),
            match_all=f"{bucket.prefix}>",
            prefix=bucket.prefix,
            history=bucket.history,
            silent_removals=bucket.unmarked_removals,
        )

    def record_batch(self, frames: Deliveries, split: Split) -> pa.RecordBatch:
        """Rows of ``nats_kv``, in the order of ``frames``.

        With ``ignoreDeletes`` the batch does not contain markers.
        """
        # Deferred import: the planner's process would load modules of Arrow that only rows need.
        from nats_stream_source.rows.arrow import kv_batch

        return kv_batch(frames, split, self.options, self._skipped)

    def finish(self) -> None:
        """Log the number of rows that ``onUndecodable=skip`` has left out."""
        self._skipped.report()
