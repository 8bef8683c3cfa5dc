"""The options of ``df.write`` and ``df.writeStream``, for both formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from nats_stream_source.connection.settings import ConnectionSettings
from nats_stream_source.errors import OptionError
from nats_stream_source.jetstream.kv.codec import NO_CODEC, KvCodec
from nats_stream_source.jetstream.kv.config import KeyValueConfig
from nats_stream_source.jetstream.publish import MAX_IN_FLIGHT
from nats_stream_source.jetstream.subjects import (
    validate_bucket,
    validate_stream,
    validate_subject_filters,
    validate_written_subject,
)
from nats_stream_source.options import converters
from nats_stream_source.options.advice import KV_WRITE_ADVICE, STREAM_WRITE_ADVICE
from nats_stream_source.options.connection import CONNECTION, connection_settings
from nats_stream_source.options.creation import CREATION, validate_creation
from nats_stream_source.options.hints import option_hints, option_names
from nats_stream_source.options.kv import CODECS
from nats_stream_source.options.table import Option, parse
from nats_stream_source.wire.publish.unsendable import Unsendable


class OnConflict(Enum):
    """What a row does whose ``expected_revision`` is not the key's."""

    FAIL = "fail"
    SKIP = "skip"


class MessageId(Enum):
    """Which messages get a ``Nats-Msg-Id``."""

    NONE = "none"
    AUTO = "auto"


_WRITING: tuple[Option, ...] = (
    Option(
        "ifMissing",
        converters.one_of("error", "create"),
        "What to do if the bucket or stream does not exist. {default}; `create` creates it with "
        "the options `replicas`, `storage`, `maxBytes`, `compression`, `placementCluster`, "
        "`placementTags`, `metadata`, `ttl` and `duplicateWindow`, a bucket also with `history` "
        "and `limitMarkerTtl`, a stream with `subjects`.",
        default="error",
    ),
    *CREATION,
    Option(
        "messageId",
        converters.one_of("none", "auto"),
        "Whether each message has a `Nats-Msg-Id` of the query, micro-batch, partition, row and "
        "content, so that a repeated task is stored once within the duplicate window. {default}.",
        default="none",
    ),
    Option(
        "asyncPersist",
        converters.one_of("warn", "fail"),
        "What to do if the bucket or stream acknowledges a message before it is stored "
        "(`persist_mode: async`, server 2.12): a crash of the server can lose written rows. "
        "{default}, a log line; `fail` refuses to write.",
        default="warn",
    ),
    Option(
        "invalidHeaders",
        converters.one_of("fail", "skip", "encode"),
        "What to do with a header that cannot be sent: its name has characters other than visible "
        "ASCII, or `:`; its value is null, begins with white space or has a line break. {default}; "
        "`skip` leaves it out, `encode` writes such characters as `%XX`, and both log the number.",
        default="fail",
    ),
    Option(
        "maxInFlight",
        converters.in_flight_count,
        "Maximum number of messages of a task that wait for their PubAcks. {default}; at most "
        "10,000, the number of messages that a stream buffers.",
        default=MAX_IN_FLIGHT,
    ),
)

KV_WRITE: tuple[Option, ...] = (
    Option(
        "bucket",
        converters.single_name,
        "Name of the bucket. Required.",
        advice="write the name of one bucket",
    ),
    Option(
        "onConflict",
        converters.one_of("fail", "skip"),
        "What a row does whose `expected_revision` is not the revision of its key. {default}; "
        "`skip` writes the other rows and logs the number of skipped ones.",
        default="fail",
    ),
    *CODECS,
    Option(
        "history",
        converters.history_depth,
        "Revisions per key of a bucket that is created. Default: 1; at most 64.",
    ),
    Option(
        "limitMarkerTtl",
        converters.long_duration,
        "Time that a created bucket keeps the marker of an expired key. Default: none, and rows "
        "cannot have a `ttl`. At least 1; requires server 2.11.",
    ),
    *_WRITING,
)

STREAM_WRITE: tuple[Option, ...] = (
    Option(
        "stream",
        converters.single_name,
        "Name of the stream that must store the rows. Required.",
        advice="write the name of one stream",
    ),
    Option("subject", converters.subject, "Subject of all rows. Default: the column `subject`."),
    Option(
        "subjects",
        converters.string_list.named("list of subject filters"),
        "Subjects of a stream that is created. Default: the option `subject`.",
        default=(),
    ),
    Option(
        "fastIngest",
        converters.boolean,
        "Whether the server acknowledges many rows together (ADR-50), which is faster for rows of "
        "up to some hundred bytes. The stream must have `allow_batched`, which needs nats-server "
        "2.14; a stream that is created has it. {default}.",
        default=False,
    ),
    *_WRITING,
)


@dataclass(frozen=True, slots=True)
class CommonWriteOptions:
    """The options that both formats have.

    Attributes:
        create: whether a missing bucket or stream is created.
        max_bytes: its size; None for no limit.
        placement: the server's ``placement`` object; None for the default.
        metadata: names and values that describe it.
        ttl, duplicate_window: seconds; None for the default.
    """

    create: bool
    replicas: int
    storage: str
    max_bytes: int | None
    compressed: bool
    placement: Mapping[str, Any] | None
    metadata: Mapping[str, str]
    ttl: float | None
    duplicate_window: float | None
    message_id: MessageId
    refuse_async_persist: bool
    unsendable_headers: Unsendable
    max_in_flight: int

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> CommonWriteOptions:
        """From parsed values."""
        cluster, tags = values["placementCluster"], values["placementTags"]
        placement: dict[str, Any] = {"cluster": cluster} if cluster else {}
        if tags:
            placement["tags"] = list(tags)
        return cls(
            create=values["ifMissing"] == "create",
            replicas=values["replicas"] or 1,
            storage=values["storage"] or "file",
            max_bytes=values["maxBytes"],
            compressed=values["compression"] == "s2",
            placement=placement or None,
            metadata=values["metadata"] or {},
            ttl=values["ttl"],
            duplicate_window=values["duplicateWindow"],
            message_id=MessageId(values["messageId"]),
            unsendable_headers=Unsendable(values["invalidHeaders"]),
            refuse_async_persist=values["asyncPersist"] == "fail",
            max_in_flight=values["maxInFlight"],
        )


@dataclass(frozen=True, slots=True)
class KvWriteOptions:
    """The parsed and validated options of a write to ``nats_kv``.

    Attributes:
        config: the bucket that ``ifMissing=create`` creates.
        has_ttl: whether the rows have the column ``ttl``.
    """

    connection: ConnectionSettings
    bucket: str
    on_conflict: OnConflict
    config: KeyValueConfig
    common: CommonWriteOptions
    codec: KvCodec = NO_CODEC
    has_ttl: bool = False

    @property
    def target(self) -> str:
        """The name of the bucket, for logs and metrics."""
        return self.bucket


@dataclass(frozen=True, slots=True)
class StreamWriteOptions:
    """The parsed and validated options of a write to ``nats_stream``.

    Attributes:
        subject: the subject of all rows; None: the column ``subject`` has them.
        subjects: the subjects of a stream that ``ifMissing=create`` creates.
        fast_ingest: whether the server acknowledges many rows together.
    """

    connection: ConnectionSettings
    stream: str
    subject: str | None
    subjects: tuple[str, ...]
    common: CommonWriteOptions
    fast_ingest: bool = False

    @property
    def target(self) -> str:
        """The name of the stream, for logs and metrics."""
        return self.stream


_QUERY_OPTIONS = (
    "checkpointlocation",
    "queryname",
    "asyncprogresstrackingenabled",
    "asyncprogresstrackingcheckpointintervalms",
)


def without_query_options(given: Mapping[str, str]) -> dict[str, str]:
    """The options of a sink: ``df.writeStream`` also passes those of the query itself."""
    return {name: text for name, text in given.items() if name.lower() not in _QUERY_OPTIONS}


def kv_write_options(given: Mapping[str, str]) -> KvWriteOptions:
    """Parse and validate the options of a write to ``nats_kv``.

    Raises:
        OptionError: an option is unknown, missing, of the wrong type, or contradicts another.
        InvalidNameError: the bucket violates ADR-8.
        ConfigurationError: the properties of a bucket to create are invalid.
    """
    with option_hints(option_names(CONNECTION + KV_WRITE)):
        values = parse(given, CONNECTION + KV_WRITE, KV_WRITE_ADVICE)
        if values["bucket"] is None:
            raise OptionError("option 'bucket' is missing: the name of the key-value bucket")
        validate_creation(values, ("history", "limitMarkerTtl"))
        common = CommonWriteOptions.of(values)
        config = KeyValueConfig(
            bucket=validate_bucket(values["bucket"]),
            history=values["history"] or 1,
            ttl=common.ttl,
            storage="memory" if common.storage == "memory" else "file",
            replicas=common.replicas,
            max_bytes=common.max_bytes,
            compression=common.compressed,
            placement=common.placement,
            metadata=common.metadata,
            limit_marker_ttl=values["limitMarkerTtl"],
            duplicate_window=common.duplicate_window,
        )
        return KvWriteOptions(
            connection=connection_settings(values),
            bucket=config.bucket,
            on_conflict=OnConflict(values["onConflict"]),
            config=config,
            common=common,
            codec=KvCodec(values["keyCodec"], values["valueCodec"]),
        )


def stream_write_options(given: Mapping[str, str]) -> StreamWriteOptions:
    """Parse and validate the options of a write to ``nats_stream``.

    Raises:
        OptionError: an option is unknown, missing, of the wrong type, or contradicts another.
        InvalidNameError: the stream or a subject is invalid.
    """
    with option_hints(option_names(CONNECTION + STREAM_WRITE)):
        values = parse(given, CONNECTION + STREAM_WRITE, STREAM_WRITE_ADVICE)
        if values["stream"] is None:
            raise OptionError("option 'stream' is missing: the name of the JetStream stream")
        validate_creation(values, ("subjects",))
        common, subject = CommonWriteOptions.of(values), values["subject"]
        subjects = values["subjects"] or ((subject,) if subject else ())
        if common.create and not subjects:
            raise OptionError(
                "option 'subjects' is missing: ifMissing=create needs the subjects of the stream, "
                "for example 'orders.>'"
            )
        return StreamWriteOptions(
            connection=connection_settings(values),
            stream=validate_stream(values["stream"]),
            subject=None if subject is None else validate_written_subject(subject),
            subjects=tuple(validate_subject_filters(subjects)),
            common=common,
            fast_ingest=values["fastIngest"],
        )
