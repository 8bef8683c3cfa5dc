"""A ``nats_kv`` query: a bucket's entries."""

from __future__ import annotations

import pyarrow as pa

from nats_stream_source.jetstream.api import JetStream, StreamInfo
from nats_stream_source.jetstream.bucket import Bucket, look_up
from nats_stream_source.jetstream.subjects import stream_of
from nats_stream_source.options import DeliverPolicy, KvOptions
from nats_stream_source.source.plan import Plan
from nats_stream_source.source.query import Content, Query, Words
from nats_stream_source.source.rows import kv_rows
from nats_stream_source.wire.frames import Frames


class KvQuery(Query):
    """A query of a bucket, by its options."""

    words = Words(
        sequence="revision",
        place="option 'bucket'",
        filters="keys",
        keeps="option 'includeHistory' asks for all of them; a deeper history keeps them",
    )

    def __init__(self, options: KvOptions) -> None:
        self.options = options
        self.connection = options.connection
        self.beginning = options.beginning
        self.reading = options.reading
        self.filter = options.keys
        self.every_message = options.include_history
        self.last_first = options.beginning.policy is DeliverPolicy.LAST_PER_SUBJECT
        self.headers_only = options.meta_only
        self.min_last_seq = options.min_last_revision

    async def stream(self, jetstream: JetStream) -> str:
        """The bucket's stream, by its name."""
        return stream_of(self.options.bucket)

    async def look(self, jetstream: JetStream, stream: str) -> StreamInfo:
        """The bucket's stream; BucketNotFoundError when there is none."""
        return await look_up(jetstream, self.options.bucket)

    async def check(self, jetstream: JetStream, info: StreamInfo) -> None:
        """Nothing is refused: a bucket takes any key."""

    def content(self, info: StreamInfo) -> Content:
        """The entries of the option ``keys``."""
        bucket = Bucket.of(self.options.bucket, info.config)
        return Content(
            filters=bucket.filters(self.options.keys),
            everything=f"{bucket.prefix}>",
            prefix=bucket.prefix,
            history=bucket.history,
            vanishing=bucket.vanishing,
        )

    def rows(self, frames: Frames, plan: Plan) -> pa.RecordBatch:
        """Rows of ``nats_kv``."""
        return kv_rows(
            frames,
            bucket=self.options.bucket,
            prefix=plan.prefix,
            stream_created=plan.created,
            initial_through=plan.initial_through,
            meta_only=self.options.meta_only,
            ignore_deletes=self.options.ignore_deletes,
            include_headers=self.reading.include_headers,
        )
