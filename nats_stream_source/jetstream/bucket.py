"""A key-value bucket as a stream (ADR-8): where its keys are, and what it cannot show."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nats_stream_source.errors import (
    BucketNotFoundError,
    StreamNotFoundError,
    UnsupportedStreamError,
)
from nats_stream_source.jetstream.api import JetStream, StreamInfo
from nats_stream_source.jetstream.read_after_write import reached
from nats_stream_source.jetstream.subjects import (
    bucket_of,
    key_subject,
    stream_of,
    write_prefix,
)

EVERYTHING = (">",)
"""The key filters that stand for all keys."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """What a reader has to know of a bucket's stream.

    Attributes:
        name, stream: ``fleet`` and ``KV_fleet``.
        prefix: what stands before the key in each subject, ``$KV.fleet.``; a mirror keeps the
            subjects of the bucket that it mirrors.
        history: how many revisions of a key are kept; 1 when every message is its key's last.
        covers: whether every message of the stream is an entry of this bucket, so that a consumer
            for all keys needs no filter (which would be slow, DESIGN 3.5).
        vanishing: why a key may vanish without a marker, in words; empty when it cannot.
        writes_to: the bucket that takes the writes: this one, or the one that it mirrors.
        writes_through: the API prefix that leads to the mirrored bucket's account or domain, where
            that is another one.
        message_ttl: whether a single write may have a TTL.
    """

    name: str
    stream: str
    prefix: str
    history: int
    covers: bool
    vanishing: tuple[str, ...]
    writes_to: str
    writes_through: str | None = None
    message_ttl: bool = False

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any]) -> Bucket:
        """From the stream's configuration.

        Raises:
            UnsupportedStreamError: a stream that gives each message to one reader only.
        """
        stream = stream_of(name)
        retention = config.get("retention", "limits")
        if retention != "limits":
            raise UnsupportedStreamError(
                f"stream {stream} has the retention {retention!r}: its messages go away when they "
                f"are consumed, so a range cannot be read again. A bucket has retention 'limits'"
            )
        mirror = config.get("mirror") or {}
        origin = bucket_of(mirror.get("name", stream))
        own = [key_subject(name, ">")]
        return cls(
            name=name,
            stream=stream,
            prefix=key_subject(origin, ""),
            history=config.get("max_msgs_per_subject", -1),
            covers=config.get("subjects") == own
            and not any(config.get(name) for name in ("mirror", "sources", "subject_transform")),
            vanishing=_vanishing(config),
            writes_to=origin,
            writes_through=(mirror.get("external") or {}).get("api") or None,
            message_ttl=bool(config.get("allow_msg_ttl")),
        )

    def write_prefix(self, api_prefix: str) -> str:
        """What stands before the key where a write is sent to, see ``subjects.write_prefix``."""
        return write_prefix(self.writes_to, self.writes_through or api_prefix)

    def filters(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        """The filter subjects for key filters; none where they would cover the whole stream."""
        if not keys or keys == (">",):
            return () if self.covers else (f"{self.prefix}>",)
        return tuple(f"{self.prefix}{key}" for key in keys)


def _vanishing(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What makes a key vanish without a marker (DESIGN 6, "What current values cannot show")."""
    reasons = []
    if config.get("max_age", 0) > 0 and not config.get("subject_delete_marker_ttl"):
        reasons.append("max_age without delete markers")
    if config.get("discard", "old") == "old":
        reasons += [name for name in ("max_bytes", "max_msgs") if config.get(name, -1) > 0]
    if config.get("allow_msg_ttl") and not config.get("subject_delete_marker_ttl"):
        reasons.append("TTLs without delete markers")
    return tuple(reasons)


async def look_up(jetstream: JetStream, bucket: str) -> StreamInfo:
    """The bucket's stream info, from the leader; BucketNotFoundError when there is none."""
    try:
        return await jetstream.stream_info(stream_of(bucket))
    except StreamNotFoundError as error:
        raise BucketNotFoundError(
            f"bucket {bucket!r} does not exist on {jetstream.connection.settings.places}: there is "
            f"no stream {stream_of(bucket)!r}. Check the options 'bucket', 'servers' and 'domain'"
        ) from error


async def info_of(jetstream: JetStream, bucket: str, min_last_revision: int | None) -> StreamInfo:
    """The leader's word on a bucket, once it has reached ``min_last_revision``.

    Raises:
        BucketNotFoundError: there is none.
        MinLastSequenceError: it does not reach it within ``request_timeout``.
    """
    if min_last_revision is not None:
        with contextlib.suppress(StreamNotFoundError):  # look_up says it better
            return await reached(jetstream, stream_of(bucket), min_last_revision)
    return await look_up(jetstream, bucket)


async def last_matching(
    jetstream: JetStream, info: StreamInfo, bucket: Bucket, keys: tuple[str, ...]
) -> int:
    """The sequence of the leader's last message that matches; 0 when there is none.

    For all keys it is the stream's last sequence, though the message there may be gone.
    """
    if info.first_seq > info.last_seq:
        return 0
    if keys == EVERYTHING:
        return info.last_seq
    return await jetstream.last_seq(info.name, bucket.filters(keys))
