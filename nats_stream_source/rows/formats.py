"""The formats ``nats_kv``, the entries of a bucket (ADR-8), and ``nats_stream``, the messages.

The stream of a subject is looked up on the server (ADR-15, "Stream lookup") once: a query keeps its
stream.

A stream's configuration lists the subjects that it accepts. A mirror, a stream with sources or with
a subject transform holds messages of other subjects, and any stream may hold messages from before
its subjects were changed. So a filter that matches none of the subjects is rejected only if the
stream also has no message that it matches, and a filter that matches all of them is still sent to
the server.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nats_stream_source.errors import (
    ConfigurationError,
    NoMatchingStreamError,
    StreamNotFoundError,
    UnsupportedStreamError,
)
from nats_stream_source.jetstream.kv.bucket import Bucket, bucket_stream_info
from nats_stream_source.jetstream.kv.codec import SkippedEntries
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.subjects import bucket_of, covers, overlap, stream_of
from nats_stream_source.options import DeliverPolicy, KvOptions, StartPosition, StreamOptions
from nats_stream_source.options.converters import START_OPTIONS
from nats_stream_source.rows.base import FormatAdapter, ReadScope, Split, UserTerms

if TYPE_CHECKING:
    import pyarrow as pa

    # Spark pickles the reader in a process that does not connect, which need not load nats-py.
    from nats_stream_source.jetstream.api import JetStream
    from nats_stream_source.wire.consumer.deliveries import Deliveries


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
        own = {DeliverPolicy.ALL: "includeHistory", DeliverPolicy.NEW: "updatesOnly"}
        self.start_option = (own | START_OPTIONS).get(options.start_position.policy)

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


# Settings of a stream that store messages of subjects other than its own.
_OTHER_ORIGINS = ("mirror", "sources", "subject_transform")


class StreamFormat(FormatAdapter):
    """A query of a stream, from its options."""

    options: StreamOptions
    terms = UserTerms(
        sequence="sequence",
        stream_option="options 'stream' and 'subject'",
        filter_option="filterSubjects",
        retention_hint="larger limits of the stream, such as max_age or max_bytes, keep messages "
        "longer",
    )

    def __init__(self, options: StreamOptions) -> None:
        self.options = options
        self.user_filters = options.filter_subjects
        self.requires_all_messages = not self.last_per_subject
        self.headers_only = options.headers_only
        self.min_last_seq = options.min_last_sequence
        self.stream_set = options.streams
        policy = options.start_position.policy
        if policy is not DeliverPolicy.ALL:
            self.start_option = START_OPTIONS.get(policy, "deliverPolicy")
        if options.stream is None and options.streams is None:
            self.terms = replace(self.terms, filter_option="subject")

    async def stream_name(self, jetstream: JetStream) -> str:
        """The option ``stream``, or the one stream that has the option ``subject``."""
        if self.options.stream is not None:
            return self.options.stream
        (subject,) = self.options.filter_subjects
        streams = await jetstream.stream_names_by_subject(subject)
        if len(streams) != 1:
            observed = f"{len(streams)} streams have it" if streams else "no stream has it"
            listed = f" ({', '.join(sorted(streams))})" if streams else ""
            raise NoMatchingStreamError(
                f"could not look up the stream of subject {subject!r}: {observed}{listed}, "
                f"expected one; name the stream with the option 'stream' and its subjects with "
                f"'filterSubjects'"
            )
        return streams[0]

    async def stream_info(self, jetstream: JetStream, stream: str) -> StreamInfo:
        """The stream as its leader reports it."""
        try:
            return await jetstream.stream_info(stream)
        except StreamNotFoundError as error:
            raise StreamNotFoundError(
                f"could not read stream {stream!r}: it does not exist on "
                f"{jetstream.connection.settings.server_list}; check the options 'stream', "
                f"'servers' and 'domain'"
            ) from error

    async def verify_filters(self, jetstream: JetStream, info: StreamInfo) -> None:
        """Verify that the stream accepts each filter subject, or has a message of it."""
        for subject_filter in self.user_filters:
            jetstream.connection.control_line.validate_name(subject_filter)
        accepted = _accepted_subjects(info)
        for subject_filter in self.user_filters if accepted else ():
            if any(overlap(subject_filter, subject) for subject in accepted):
                continue
            if await jetstream.message(info.name, last_by_subj=subject_filter) is None:
                raise ConfigurationError(
                    f"could not read {subject_filter!r} of stream {info.name}: the stream has no "
                    f"subject that it matches, expected a filter within {', '.join(accepted)}; "
                    f"change the option {self.terms.filter_option!r}"
                )

    def read_scope(self, info: StreamInfo) -> ReadScope:
        """The messages of the filter subjects."""
        retention = info.config.get("retention", "limits")
        if retention != "limits":
            raise UnsupportedStreamError(
                f"could not read stream {info.name!r}: retention is {retention!r}, expected "
                f"'limits', since a range of removed messages cannot be read again; read a copy, "
                f"a stream with limits retention that has this one as its source (docs/streams.md, "
                f"Work queues)"
            )
        accepted = _accepted_subjects(info)
        return ReadScope(
            filters=self.user_filters,
            covers_stream=bool(accepted)
            and all(any(covers(f, subject) for f in self.user_filters) for subject in accepted),
            history=info.config.get("max_msgs_per_subject", -1),
        )

    def record_batch(self, frames: Deliveries, split: Split) -> pa.RecordBatch:
        """Rows of ``nats_stream``, in the order of ``frames``."""
        from nats_stream_source.rows.arrow import stream_batch  # deferred, as above

        return stream_batch(frames, split, self.options)


def format_adapter(options: KvOptions | StreamOptions) -> FormatAdapter:
    """The query of options."""
    return KvFormat(options) if isinstance(options, KvOptions) else StreamFormat(options)


def _accepted_subjects(info: StreamInfo) -> tuple[str, ...]:
    """The subjects that a stream accepts; empty where it also stores messages of others."""
    if any(info.config.get(origin) for origin in _OTHER_ORIGINS):
        return ()
    return tuple(info.config.get("subjects") or ())
