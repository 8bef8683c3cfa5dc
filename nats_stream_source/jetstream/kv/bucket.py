"""A key-value bucket as a stream (ADR-8): subjects of its keys, and its removal settings."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nats_stream_source.errors import (
    BucketNotFoundError,
    StreamNotFoundError,
    UnsupportedStreamError,
)
from nats_stream_source.jetstream.kv.codec import NO_CODEC, KvCodec
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.subjects import bucket_of, key_subject, stream_of, write_subject

if TYPE_CHECKING:
    from nats_stream_source.jetstream.api import JetStream

ALL_KEYS = (">",)
"""The key filters that match all keys."""

UNMARKED_TTLS = "allow_msg_ttl without delete markers"
"""The setting that removes a key only if a writer sets a TTL; nats-py sets it in every bucket."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Properties of a bucket's stream that a reader or writer needs.

    Attributes:
        name, stream: ``fleet`` and ``KV_fleet``.
        prefix: the part of each subject before the key, ``$KV.fleet.``; a mirror keeps the subjects
            of the bucket that it mirrors.
        history: number of revisions kept per key; with 1 every message is the last of its key.
        covers_stream: whether the stream stores entries of this bucket only, by its present
            configuration. Then a consumer for all keys works without a filter, which would be slow
            (docs/internals/measurements.md, Servers 5). Messages from before the configuration was
            changed are left out by the reader (``RangeRequest.prefix``).
        unmarked_removals: settings that remove a key without a marker, for messages; empty if none
            does.
        write_bucket: the bucket that stores the writes: this one, or the one that it mirrors.
        write_api_prefix: API prefix of the mirrored bucket's account or domain, if it is another
            one.
        allows_message_ttl: whether a single write may have a TTL.
        no_ack: whether writes are stored without PubAcks.
        codec: how its keys and values are encoded; keys in the other attributes are stored keys.
    """

    name: str
    stream: str
    prefix: str
    history: int
    covers_stream: bool
    unmarked_removals: tuple[str, ...]
    write_bucket: str
    write_api_prefix: str | None = None
    allows_message_ttl: bool = False
    no_ack: bool = False
    codec: KvCodec = NO_CODEC

    @classmethod
    def of(cls, info: StreamInfo, codec: KvCodec = NO_CODEC) -> Bucket:
        """Create from the stream; UnsupportedStreamError if its retention is not 'limits'."""
        name, config = bucket_of(info.name), info.config
        retention = config.get("retention", "limits")
        if retention != "limits":
            raise UnsupportedStreamError(
                f"could not read bucket {name!r}: retention of stream {info.name} is "
                f"{retention!r}, expected 'limits', because consumed messages are removed and a "
                f"range could not be read again; read a mirror of the stream with limits retention"
            )
        mirror = config.get("mirror") or {}
        origin = info.origin or _bucket_of_subjects(name, config)
        return cls(
            name=name,
            stream=info.name,
            prefix=key_subject(origin, ""),
            history=config.get("max_msgs_per_subject", -1),
            covers_stream=config.get("subjects") == [key_subject(origin, ">")]
            and not any(config.get(name) for name in ("mirror", "sources", "subject_transform")),
            unmarked_removals=_unmarked_removals(config),
            write_bucket=origin,
            write_api_prefix=(mirror.get("external") or {}).get("api") or None,
            allows_message_ttl=bool(config.get("allow_msg_ttl")),
            no_ack=info.no_ack and not mirror,
            codec=codec,
        )

    def write_prefix(self, api_prefix: str) -> str:
        """The part of a write's subject before the key: ``$KV.fleet.``, ``fromA.$KV.fleet.``."""
        api_prefix = self.write_api_prefix or api_prefix
        return write_subject(key_subject(self.write_bucket, ""), api_prefix)

    def filter_subjects(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        """The filter subjects for filters of stored keys; empty if they cover the whole stream."""
        if not keys or keys == (">",):
            return () if self.covers_stream else (f"{self.prefix}>",)
        return tuple(f"{self.prefix}{key}" for key in keys)


def _bucket_of_subjects(name: str, config: Mapping[str, Any]) -> str:
    """The bucket in the subjects of the stream: its own name, unless it is or was a mirror.

    A mirror that was promoted with the subjects of its origin continues the origin's entries.
    """
    if mirror := config.get("mirror"):
        return bucket_of(mirror["name"])
    subjects = list(config.get("subjects") or ())
    promoted = re.fullmatch(r"\$KV\.([^.*>]+)\.>", subjects[0]) if len(subjects) == 1 else None
    return promoted[1] if promoted else name


def _unmarked_removals(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings that remove a key without a marker (docs/internals/architecture.md)."""
    reasons = []
    if config.get("max_age", 0) > 0 and not config.get("subject_delete_marker_ttl"):
        reasons.append("max_age without delete markers")
    if config.get("discard", "old") == "old":
        reasons += [name for name in ("max_bytes", "max_msgs") if config.get(name, -1) > 0]
    if config.get("allow_msg_ttl") and not config.get("subject_delete_marker_ttl"):
        reasons.append(UNMARKED_TTLS)
    return tuple(reasons)


async def bucket_stream_info(jetstream: JetStream, bucket: str) -> StreamInfo:
    """The bucket's stream info, from the leader; BucketNotFoundError if it does not exist."""
    with bucket_errors(jetstream, bucket):
        return await jetstream.stream_info(stream_of(bucket))


@contextlib.contextmanager
def bucket_errors(jetstream: JetStream, bucket: str) -> Iterator[None]:
    """Raise BucketNotFoundError in place of the StreamNotFoundError of the bucket's stream."""
    try:
        yield
    except BucketNotFoundError:
        raise
    except StreamNotFoundError as error:
        raise BucketNotFoundError(
            f"bucket {bucket!r} does not exist on {jetstream.connection.settings.server_list}: "
            f"stream {stream_of(bucket)!r} not found; check 'bucket', 'servers' and 'domain'",
            settings=("bucket", "servers", "domain"),
        ) from error


async def stream_info_with_revision(
    jetstream: JetStream, bucket: str, min_last_revision: int | None
) -> StreamInfo:
    """The bucket's stream info, once its leader has reached ``min_last_revision``.

    Raises:
        BucketNotFoundError: the bucket does not exist.
        MinLastSequenceError: not reached within ``request_timeout``.
    """
    # Deferred import: processes of Spark that need only `Bucket` would load nats-py.
    from nats_stream_source.jetstream.leader import wait_for_last_seq

    with bucket_errors(jetstream, bucket):
        return await wait_for_last_seq(jetstream, stream_of(bucket), min_last_revision or 0)
