"""A key-value bucket as a stream (ADR-8): where its keys are, and what it cannot show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nats_stream_source.errors import (
    BucketNotFoundError,
    StreamNotFoundError,
    UnsupportedStreamError,
)
from nats_stream_source.jetstream.api import JetStream, StreamInfo
from nats_stream_source.jetstream.subjects import key_subject, stream_of


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
    """

    name: str
    stream: str
    prefix: str
    history: int
    covers: bool
    vanishing: tuple[str, ...]

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
        mirror = config.get("mirror")
        origin = name
        if mirror and mirror["name"].startswith("KV_"):
            origin = mirror["name"][3:]
        own = [key_subject(name, ">")]
        return cls(
            name=name,
            stream=stream,
            prefix=key_subject(origin, ""),
            history=config.get("max_msgs_per_subject", -1),
            covers=config.get("subjects") == own
            and not any(config.get(name) for name in ("mirror", "sources", "subject_transform")),
            vanishing=_vanishing(config),
        )

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
