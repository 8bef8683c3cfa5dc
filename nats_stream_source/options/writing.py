"""The options of ``df.write`` and ``df.writeStream``, for both formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nats_stream_source.connection.settings import ConnectionSettings
from nats_stream_source.errors import OptionError
from nats_stream_source.jetstream.kv.codec import KvCodec
from nats_stream_source.jetstream.kv.config import MAX_HISTORY, KeyValueConfig
from nats_stream_source.jetstream.publish import MAX_IN_FLIGHT
from nats_stream_source.jetstream.subjects import (
    validate_stream,
    validate_subject_filters,
    validate_written_subject,
)
from nats_stream_source.options import converters
from nats_stream_source.options.advice import KV_WRITE_ADVICE, STREAM_WRITE_ADVICE
from nats_stream_source.options.connection import CONNECTION, connection_settings
from nats_stream_source.options.reading import CODECS
from nats_stream_source.options.table import Option, Values, option_hints, parse
from nats_stream_source.wire.publish.unsendable import Unsendable

_CREATION: tuple[Option, ...] = (
    Option(
        "replicas",
        converters.integer_to(5),
        "Replicas of a created bucket or stream. {default}; at most 5.",
        default=1,
    ),
    Option(
        "storage",
        converters.one_of("file", "memory"),
        "Storage of a created bucket or stream. {default}.",
        default="file",
    ),
    Option(
        "maxBytes",
        converters.byte_size,
        "Size of a created bucket or stream; `k`, `m` and `g` are suffixes. An account can require "
        "it. A full bucket refuses rows, a full stream removes its oldest messages. Default: no "
        "limit.",
    ),
    Option(
        "compression",
        converters.one_of("none", "s2"),
        "Compression of the files of a created bucket or stream. {default}.",
        default="none",
    ),
    Option(
        "placementCluster",
        converters.string,
        "Cluster of a created bucket or stream. Default: the connection's.",
    ),
    Option(
        "placementTags",
        converters.string_list,
        "Tags that each server of a created bucket or stream has. Default: none.",
        default=(),
    ),
    Option(
        "metadata",
        converters.metadata,
        'Metadata of a created bucket or stream, as `{"owner": "fleet"}`. Default: none.',
        default={},
    ),
    Option(
        "ttl",
        converters.long_duration,
        "Age at which a created bucket or stream removes a message. Default: no limit. The column "
        "`ttl` sets it for single rows.",
    ),
    Option(
        "duplicateWindow",
        converters.long_duration,
        "Time during which a created bucket or stream recognises a message id that it has stored. "
        "Default: 120. Set it longer than a restart of the query takes.",
    ),
)


_WRITING: tuple[Option, ...] = (
    Option(
        "ifMissing",
        converters.one_of("error", "create"),
        "What to do if the bucket or stream does not exist. {default}; `create` creates it with "
        "the options for a created bucket or stream.",
        default="error",
    ),
    *_CREATION,
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
        converters.one_of(*Unsendable),
        "What to do with a header that cannot be sent: its name has characters other than visible "
        "ASCII, or `:`; its value is null, begins with white space or has a line break. {default}; "
        "`skip` leaves it out, `encode` writes such characters as `%XX`, and both log the number.",
        default=Unsendable.FAIL,
    ),
    Option(
        "maxInFlight",
        converters.integer_to(10_000),
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
        converters.integer_to(MAX_HISTORY),
        "Revisions per key of a created bucket. {default}; at most 64.",
        default=1,
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
        "Subjects of a created stream. Default: the option `subject`.",
        default=(),
    ),
    Option(
        "fastIngest",
        converters.boolean,
        "Whether the server acknowledges many rows together (ADR-50), which is faster for rows of "
        "up to some hundred bytes. The stream must have `allow_batched`, which needs nats-server "
        "2.14; a created stream has it. {default}.",
        default=False,
    ),
    *_WRITING,
)


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """The parsed options that both formats have.

    Attributes:
        create: whether a missing bucket or stream is created.
        target: the name of the bucket or stream, for logs and metrics.
        message_ids: whether each message has a ``Nats-Msg-Id``.
    """

    connection: ConnectionSettings
    target: str
    create: bool
    message_ids: bool
    async_persist: str
    invalid_headers: Unsendable
    max_in_flight: int


@dataclass(frozen=True, slots=True)
class KvWriteOptions(WriteOptions):
    """The parsed and validated options of a write to ``nats_kv``.

    Attributes:
        skip_conflicts: whether a row is skipped whose ``expected_revision`` is not the key's.
        config: the bucket that ``ifMissing=create`` creates.
        has_ttl: whether the rows have the column ``ttl``.
    """

    skip_conflicts: bool
    config: KeyValueConfig
    codec: KvCodec
    has_ttl: bool = False


@dataclass(frozen=True, slots=True)
class StreamWriteOptions(WriteOptions):
    """The parsed and validated options of a write to ``nats_stream``.

    Attributes:
        subject: the subject of all rows; None: the column ``subject`` has them.
        config: the stream that ``ifMissing=create`` creates, as its configuration.
        fast_ingest: whether the server acknowledges many rows together.
    """

    subject: str | None
    config: Mapping[str, Any]
    fast_ingest: bool


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
    """Parse and validate the options of a write to ``nats_kv``."""
    with option_hints(CONNECTION + KV_WRITE):
        values = parse(given, CONNECTION + KV_WRITE, KV_WRITE_ADVICE)
        if values["bucket"] is None:
            raise OptionError("option 'bucket' is missing: the name of the key-value bucket")
        return values.build(
            KvWriteOptions,
            target=values["bucket"],
            skip_conflicts=values["onConflict"] == "skip",
            config=values.build(
                KeyValueConfig,
                compression=values["compression"] == "s2",
                placement=_placement(values),
            ),
            codec=KvCodec(values["keyCodec"], values["valueCodec"]),
            **_common(values, "history", "limitMarkerTtl"),
        )


def stream_write_options(given: Mapping[str, str]) -> StreamWriteOptions:
    """Parse and validate the options of a write to ``nats_stream``."""
    with option_hints(CONNECTION + STREAM_WRITE):
        values = parse(given, CONNECTION + STREAM_WRITE, STREAM_WRITE_ADVICE)
        if values["stream"] is None:
            raise OptionError("option 'stream' is missing: the name of the JetStream stream")
        common, subject = _common(values, "subjects"), values["subject"]
        subjects = values["subjects"] or ((subject,) if subject else ())
        if common["create"] and not subjects:
            raise OptionError(
                "option 'subjects' is missing: ifMissing=create needs the subjects of the stream, "
                "for example 'orders.>'"
            )
        optional = {
            "max_bytes": values["maxBytes"],
            "compression": "s2" if values["compression"] == "s2" else None,
            "placement": _placement(values),
            "metadata": values["metadata"],
            "allow_batched": values["fastIngest"],
        }
        config = {
            "name": validate_stream(values["stream"]),
            "subjects": list(validate_subject_filters(subjects)),
            "retention": "limits",
            "storage": values["storage"],
            "num_replicas": values["replicas"],
            "max_age": round((values["ttl"] or 0) * 1e9),
            "duplicate_window": round((values["duplicateWindow"] or 0) * 1e9),
            "allow_direct": True,
            **{name: value for name, value in optional.items() if value},
        }
        return values.build(
            StreamWriteOptions,
            target=config["name"],
            subject=None if subject is None else validate_written_subject(subject),
            config=config,
            **common,
        )


def _common(values: Values, *own: str) -> dict[str, Any]:
    """The fields that both formats compute; ``own`` are the format's options for a new target."""
    create = values["ifMissing"] == "create"
    for name in (*own, *(option.name for option in _CREATION)):
        if values.is_set(name) and not create:
            raise OptionError(
                f"option {name!r} has no effect without ifMissing=create: the properties of an "
                f"existing bucket or stream do not change; add ifMissing=create or remove {name!r}"
            )
    message_ids = values["messageId"] == "auto"
    settings = connection_settings(values)
    return {"connection": settings, "create": create, "message_ids": message_ids}


def _placement(values: Values) -> dict[str, Any] | None:
    """The server's ``placement`` object; None for the default."""
    cluster, tags = values["placementCluster"], list(values["placementTags"])
    placement = {"cluster": cluster, "tags": tags}
    return {name: value for name, value in placement.items() if value} or None
