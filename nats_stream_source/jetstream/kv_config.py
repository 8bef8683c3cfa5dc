"""A key-value bucket's properties, as its stream's configuration has them (ADR-8). Pure.

:meth:`KeyValueConfig.stream_config` is the one place that turns a bucket into a stream, and
:meth:`KeyValueConfig.of` reads the same back out of what the server says. Times are seconds here
and nanoseconds there.

Where this differs from the document's example, today's servers have moved on: the field for
roll-ups is ``allow_rollup_hdrs``, ``allow_direct`` is asked for because no server sets it by
itself, and ``discard`` is ``new``, as NATS's own clients have it, so that a full bucket refuses a
write instead of dropping somebody else's key (with ``max_msgs_per_subject`` a key's oldest
revision still makes room for its newest).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nats_stream_source.errors import ConfigurationError, UnsupportedStreamError
from nats_stream_source.jetstream.answer import number, stream_config, table
from nats_stream_source.jetstream.subjects import (
    bucket_of,
    check_bucket,
    key_subject,
    stream_of,
)
from nats_stream_source.jetstream.upstream import Upstream

__all__ = ["MOST_HISTORY", "BucketStatus", "KeyValueConfig", "Republish", "Upstream"]

MOST_HISTORY = 64
_SECOND = 1_000_000_000  # nanoseconds
_DUPLICATE_WINDOW = 120 * _SECOND  # the server's own
_SHORTEST_TTL = 0.1  # seconds; the server's own
_LONGEST_TTL = 9e9  # seconds: what nanoseconds in 64 bits can say

ABSENT_WHEN_OFF = (
    "placement",
    "compression",
    "republish",
    "subject_delete_marker_ttl",
    "metadata",
    "mirror",
    "mirror_direct",
    "sources",
    "subjects",
)
"""The fields that :meth:`KeyValueConfig.stream_config` leaves out where they are not wanted."""


@dataclass(frozen=True, slots=True)
class Republish:
    """Every stored message is published again, from subjects ``source`` to ``destination``."""

    source: str
    destination: str
    headers_only: bool = False


@dataclass(frozen=True, slots=True)
class KeyValueConfig:
    """What a bucket is made with.

    Attributes:
        bucket: its name (ADR-8's rules).
        description: free text.
        history: revisions kept of each key, 1 to 64.
        ttl: seconds that any entry is kept, 0.1 or more; None for ever.
        max_value_size: bytes of a message, headers included; None for the server's limit.
        max_bytes: of the whole bucket; None for no limit. A full bucket refuses writes.
        storage: ``file`` or ``memory``.
        replicas: 1 to 5.
        placement: the server's ``placement`` object, ``{"cluster": …, "tags": […]}``.
        compression: whether the stored messages are compressed (S2).
        republish: publish what was stored again.
        mirror: this bucket is a read replica of another one; it takes no writes itself, those that
            are put through it go to that one.
        sources: this bucket also takes the entries of these.
        limit_marker_ttl: seconds that the markers stay which the server leaves where an entry ends
            by its TTL; also what allows a TTL on a single write. At least 1. Servers from 2.11.
        metadata: of the stream.
    """

    bucket: str
    description: str = ""
    history: int = 1
    ttl: float | None = None
    max_value_size: int | None = None
    max_bytes: int | None = None
    storage: Literal["file", "memory"] = "file"
    replicas: int = 1
    placement: Mapping[str, Any] | None = None
    compression: bool = False
    republish: Republish | None = None
    mirror: Upstream | None = None
    sources: Sequence[Upstream] = ()
    limit_marker_ttl: float | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_bucket(self.bucket)
        if not 1 <= self.history <= MOST_HISTORY:
            raise self._wrong("history", self.history, f"1 to {MOST_HISTORY} revisions (ADR-8)")
        if not 1 <= self.replicas <= 5:
            raise self._wrong("replicas", self.replicas, "1 to 5")
        if self.storage not in ("file", "memory"):
            raise self._wrong("storage", self.storage, "'file' or 'memory'")
        for name in ("max_value_size", "max_bytes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise self._wrong(name, value, "more than 0, or None for no limit")
        # Written so that NaN is refused, too. A shorter one would round to 0, which is no limit.
        if self.ttl is not None and not _SHORTEST_TTL <= self.ttl <= _LONGEST_TTL:
            raise self._wrong("ttl", self.ttl, "0.1 seconds or more, or None for no limit")
        marker_ttl = self.limit_marker_ttl
        if marker_ttl is not None and not 1 <= marker_ttl <= _LONGEST_TTL:
            raise self._wrong("limit_marker_ttl", marker_ttl, "at least 1 second")
        if self.mirror is not None and self.sources:
            raise ConfigurationError(
                f"bucket {self.bucket!r}: a mirror holds its upstream's entries and no others: "
                f"give 'mirror' or 'sources', not both"
            )

    def _wrong(self, name: str, value: object, allowed: str) -> ConfigurationError:
        return ConfigurationError(f"bucket {self.bucket!r}: {name} is {value!r}: {allowed}")

    def stream_config(self) -> dict[str, Any]:
        """The stream's configuration. Limits that were not asked for are named, too."""
        ttl = round(self.ttl * _SECOND) if self.ttl else 0
        config: dict[str, Any] = {
            "name": stream_of(self.bucket),
            "description": self.description,
            "retention": "limits",
            "max_consumers": -1,
            "max_msgs_per_subject": self.history,
            "max_msgs": -1,
            "max_bytes": self.max_bytes or -1,
            "max_age": ttl,
            "max_msg_size": self.max_value_size or -1,
            "storage": self.storage,
            "discard": "new",
            "num_replicas": self.replicas,
            # A window that is longer than messages live is refused.
            "duplicate_window": min(ttl, _DUPLICATE_WINDOW) if ttl else _DUPLICATE_WINDOW,
            "allow_rollup_hdrs": True,
            "deny_delete": True,
            "allow_direct": True,
        }
        if self.placement is not None:
            config["placement"] = dict(self.placement)
        if self.compression:
            config["compression"] = "s2"
        if self.republish is not None:
            config["republish"] = {
                "src": self.republish.source,
                "dest": self.republish.destination,
                "headers_only": self.republish.headers_only,
            }
        if self.limit_marker_ttl is not None:
            config["allow_msg_ttl"] = True
            config["subject_delete_marker_ttl"] = round(self.limit_marker_ttl * _SECOND)
        if self.metadata:
            config["metadata"] = dict(self.metadata)
        if self.mirror is not None:
            return config | {"mirror": self.mirror.as_mirror(), "mirror_direct": True}
        if self.sources:
            config["sources"] = [source.as_source(self.bucket) for source in self.sources]
        return config | {"subjects": [key_subject(self.bucket, ">")]}

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> KeyValueConfig:
        """The bucket's properties out of its stream's configuration.

        Raises:
            UnsupportedStreamError: the stream is no bucket: its name, or its history.
        """
        history = config.get("max_msgs_per_subject", -1)
        if not config["name"].startswith("KV_") or not 1 <= history <= MOST_HISTORY:
            raise UnsupportedStreamError(
                f"stream {config['name']!r} is no bucket: a bucket's is called 'KV_<bucket>' and "
                f"has max_msgs_per_subject of 1 to {MOST_HISTORY}, not {history} (ADR-8)"
            )
        republish = config.get("republish")
        marker_ttl = config.get("subject_delete_marker_ttl")
        mirror = config.get("mirror")
        return cls(
            bucket=bucket_of(config["name"]),
            description=config.get("description", ""),
            history=history,
            ttl=config.get("max_age", 0) / _SECOND or None,
            max_value_size=_limit(config.get("max_msg_size", -1)),
            max_bytes=_limit(config.get("max_bytes", -1)),
            storage=config.get("storage", "file"),
            replicas=config.get("num_replicas", 1),
            placement=config.get("placement"),
            compression=config.get("compression", "none") != "none",
            republish=Republish(
                republish.get("src", ""),
                republish.get("dest", ""),
                republish.get("headers_only", False),
            )
            if republish
            else None,
            mirror=Upstream.of(mirror) if mirror else None,
            sources=tuple(Upstream.of(source) for source in config.get("sources") or ()),
            limit_marker_ttl=marker_ttl / _SECOND if marker_ttl else None,
            # The server adds fields of its own about versions.
            metadata={
                name: value
                for name, value in (config.get("metadata") or {}).items()
                if not name.startswith("_nats.")
            },
        )


def _limit(value: int) -> int | None:
    return value if value > 0 else None


@dataclass(frozen=True, slots=True)
class BucketStatus:
    """ADR-8's Status: what a bucket is and how much is in it.

    Attributes:
        bucket: its name.
        values: messages in it: older revisions and markers are counted too.
        bytes: what they take.
        history: revisions kept of each key.
        ttl: seconds that entries are kept; None for ever.
        backing_store: always ``JetStream``.
        last_revision: the newest revision that was ever written.
        config: all properties.
        stream_info: the server's whole answer.
    """

    bucket: str
    values: int
    bytes: int
    history: int
    ttl: float | None
    backing_store: str
    last_revision: int
    config: KeyValueConfig
    stream_info: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> BucketStatus:
        """From the answer of ``STREAM.INFO``; UnsupportedStreamError when it is no bucket."""
        config, state = KeyValueConfig.of(stream_config(answer, "config")), table(answer, "state")
        return cls(
            bucket=config.bucket,
            values=number(state, "messages"),
            bytes=number(state, "bytes"),
            history=config.history,
            ttl=config.ttl,
            backing_store="JetStream",
            last_revision=number(state, "last_seq"),
            config=config,
            stream_info=answer,
        )
