"""Properties of a key-value bucket, as in its stream's configuration (ADR-8). Pure.

Only :meth:`KeyValueConfig.stream_config` converts a bucket's properties to a stream configuration.
:meth:`KeyValueConfig.of` reads them from the configuration that the server returns. Times are
seconds in the properties and nanoseconds in the stream configuration.

Differences from the document's example, because today's servers differ: the field for roll-ups is
``allow_rollup_hdrs``. ``allow_direct`` is requested because no server sets it by default.
``discard`` is ``new``, as in NATS's own clients, so that a full bucket rejects a write instead of
dropping another key. With ``max_msgs_per_subject`` the oldest revision of a key is still replaced
by its newest.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nats_stream_source.errors import ConfigurationError, UnsupportedStreamError
from nats_stream_source.jetstream.json_fields import integer, object_, stream_config
from nats_stream_source.jetstream.subjects import (
    bucket_of,
    key_subject,
    stream_of,
    validate_bucket,
    validate_filter,
)
from nats_stream_source.jetstream.times import LONGEST_DURATION

MAX_HISTORY = 64
_NANOSECONDS = 1_000_000_000  # per second
_DUPLICATE_WINDOW = 120 * _NANOSECONDS  # the server's default
_MIN_TTL = 0.1  # seconds; the server's minimum

OMITTED_WHEN_UNSET = (
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
"""The fields that :meth:`KeyValueConfig.stream_config` omits when they are not set."""


@dataclass(frozen=True, slots=True)
class ExternalSource:
    """A bucket that another bucket mirrors or uses as a source.

    Attributes:
        bucket: its name.
        domain: its JetStream domain, if it is another one.
        api_prefix: the prefix under which its account's API is imported (ADR-19). At most one of
            ``domain`` and ``api_prefix`` is set.
        deliver_prefix: prefix of the subjects on which the other account delivers.
        keys: only keys that match this filter.
        start_seq: start at this revision of it.
    """

    bucket: str
    domain: str | None = None
    api_prefix: str | None = None
    deliver_prefix: str | None = None
    keys: str | None = None
    start_seq: int | None = None

    def __post_init__(self) -> None:
        validate_bucket(self.bucket)
        if self.domain and self.api_prefix:
            raise ConfigurationError(
                f"invalid external source {self.bucket!r}: domain and api_prefix are both set, and "
                f"the domain {self.domain!r} stands for the prefix '$JS.{self.domain}.API'; set "
                f"one of them"
            )
        if self.keys is not None:
            validate_filter(self.keys)

    @property
    def external(self) -> dict[str, Any] | None:
        """The server's ``external`` object; None for a bucket of the same account and domain."""
        api = f"$JS.{self.domain}.API" if self.domain else self.api_prefix
        if api is None:
            return None
        return {"api": api} | ({"deliver": self.deliver_prefix} if self.deliver_prefix else {})

    def as_mirror(self) -> dict[str, Any]:
        """The stream's ``mirror`` object; subjects stay those of the mirrored bucket."""
        source = self._stream_source()
        if self.keys is not None:
            source["filter_subject"] = key_subject(self.bucket, self.keys)
        return source

    def as_source(self, bucket: str) -> dict[str, Any]:
        """An element of the stream's ``sources``; subjects become those of ``bucket``."""
        source = self._stream_source()
        keys = self.keys or ">"
        if self.external is None or self.bucket != bucket:
            source["subject_transforms"] = [
                {
                    "src": key_subject(self.bucket, keys),
                    "dest": key_subject(bucket, _transform_destination(keys)),
                }
            ]
        elif self.keys is not None:
            source["filter_subject"] = key_subject(self.bucket, self.keys)
        return source

    def _stream_source(self) -> dict[str, Any]:
        source: dict[str, Any] = {"name": stream_of(self.bucket)}
        if self.external is not None:
            source["external"] = self.external
        if self.start_seq is not None:
            source["opt_start_seq"] = self.start_seq
        return source

    @classmethod
    def from_stream_config(cls, source: Mapping[str, Any]) -> ExternalSource:
        """Create from a stream's ``mirror`` or an element of its ``sources``."""
        external = source.get("external") or {}
        upstream = bucket_of(source["name"])
        subject = source.get("filter_subject") or ""
        for transform in source.get("subject_transforms") or ():
            subject = transform.get("src", "")
        prefix = key_subject(upstream, "")
        keys = subject[len(prefix) :] if subject.startswith(prefix) else ""
        return cls(
            bucket=upstream,
            api_prefix=external.get("api") or None,
            deliver_prefix=external.get("deliver") or None,
            keys=None if keys in ("", ">") else keys,
            start_seq=source.get("opt_start_seq") or None,
        )


def _transform_destination(keys: str) -> str:
    """A key filter as the destination of a subject transform, with a number for each ``*``."""
    indexes = itertools.count(1)
    return re.sub(r"\*", lambda _: f"{{{{wildcard({next(indexes)})}}}}", keys)


@dataclass(frozen=True, slots=True)
class Republish:
    """Publish every stored message again, from subjects ``source`` to ``destination``."""

    source: str
    destination: str
    headers_only: bool = False


@dataclass(frozen=True, slots=True)
class KeyValueConfig:
    """The properties of a bucket.

    Attributes:
        bucket: its name (ADR-8's rules).
        description: free text.
        history: number of revisions kept per key, 1 to 64.
        ttl: seconds that an entry is kept, at least 0.1; None for no limit.
        max_value_size: bytes of a message, headers included; None for the server's limit.
        max_bytes: bytes of the whole bucket; None for no limit. A full bucket rejects writes.
        storage: ``file`` or ``memory``.
        replicas: 1 to 5.
        placement: the server's ``placement`` object, ``{"cluster": …, "tags": […]}``.
        compression: whether the stored messages are compressed (S2).
        republish: subjects to which stored messages are published again.
        mirror: the bucket that this bucket is a read replica of. It does not store writes itself;
            writes through this bucket are sent to the mirrored one.
        sources: buckets whose entries this bucket also receives.
        limit_marker_ttl: seconds that the server keeps the marker of an entry whose TTL expired, at
            least 1. It also allows a TTL on a single write. Requires server 2.11 or later.
        metadata: metadata of the stream.
        duplicate_window: seconds during which a message id is recognised; None for the server's
            default of 120, or ``ttl`` if that is shorter.
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
    mirror: ExternalSource | None = None
    sources: Sequence[ExternalSource] = ()
    limit_marker_ttl: float | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    duplicate_window: float | None = None

    def __post_init__(self) -> None:
        validate_bucket(self.bucket)
        if not 1 <= self.history <= MAX_HISTORY:
            allowed = f"1 to {MAX_HISTORY} revisions (ADR-8)"
            raise self._invalid("history", self.history, allowed)
        if not 1 <= self.replicas <= 5:
            raise self._invalid("replicas", self.replicas, "1 to 5")
        if self.storage not in ("file", "memory"):
            raise self._invalid("storage", self.storage, "'file' or 'memory'")
        for name in ("max_value_size", "max_bytes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise self._invalid(name, value, "more than 0, or None for no limit")
        # The comparison also rejects NaN. A shorter TTL would round to 0, which means no limit.
        if self.ttl is not None and not _MIN_TTL <= self.ttl <= LONGEST_DURATION:
            raise self._invalid("ttl", self.ttl, "0.1 seconds or more, or None for no limit")
        marker_ttl = self.limit_marker_ttl
        if marker_ttl is not None and not 1 <= marker_ttl <= LONGEST_DURATION:
            raise self._invalid("limit_marker_ttl", marker_ttl, "at least 1 second")
        window = self.duplicate_window
        if window is not None and not _MIN_TTL <= window <= (self.ttl or LONGEST_DURATION):
            raise self._invalid("duplicate_window", window, "0.1 seconds or more, at most the ttl")
        if self.mirror is not None and self.sources:
            raise ConfigurationError(
                f"invalid properties of bucket {self.bucket!r}: mirror and sources are both set, "
                f"but a mirror contains only the entries of the mirrored bucket; set mirror or "
                f"sources, not both"
            )

    def _invalid(self, name: str, value: object, allowed: str) -> ConfigurationError:
        return ConfigurationError(
            f"invalid properties of bucket {self.bucket!r}: {name} is {value!r}, expected "
            f"{allowed}; change {name!r}",
            settings=(name,),
        )

    def stream_config(self) -> dict[str, Any]:
        """The stream configuration. Limits that are not set are included with their default."""
        ttl = round(self.ttl * _NANOSECONDS) if self.ttl else 0
        # Servers reject a window that is longer than max_age.
        window = min(ttl, _DUPLICATE_WINDOW) if ttl else _DUPLICATE_WINDOW
        if self.duplicate_window is not None:
            window = round(self.duplicate_window * _NANOSECONDS)
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
            "duplicate_window": window,
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
            config["subject_delete_marker_ttl"] = round(self.limit_marker_ttl * _NANOSECONDS)
        if self.metadata:
            config["metadata"] = dict(self.metadata)
        if self.mirror is not None:
            return config | {"mirror": self.mirror.as_mirror(), "mirror_direct": True}
        if self.sources:
            config["sources"] = [source.as_source(self.bucket) for source in self.sources]
        return config | {"subjects": [key_subject(self.bucket, ">")]}

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> KeyValueConfig:
        """From a stream's configuration; UnsupportedStreamError if the stream is not a bucket."""
        history = config.get("max_msgs_per_subject", -1)
        if not config["name"].startswith("KV_") or not 1 <= history <= MAX_HISTORY:
            raise UnsupportedStreamError(
                f"stream {config['name']!r} is not a bucket: max_msgs_per_subject is {history}, "
                f"expected the name 'KV_<bucket>' and 1 to {MAX_HISTORY} (ADR-8); use a stream "
                f"created as a bucket"
            )
        republish = config.get("republish")
        marker_ttl = config.get("subject_delete_marker_ttl")
        mirror = config.get("mirror")
        return cls(
            bucket=bucket_of(config["name"]),
            description=config.get("description", ""),
            history=history,
            ttl=config.get("max_age", 0) / _NANOSECONDS or None,
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
            mirror=ExternalSource.from_stream_config(mirror) if mirror else None,
            sources=tuple(
                ExternalSource.from_stream_config(source) for source in config.get("sources") or ()
            ),
            limit_marker_ttl=marker_ttl / _NANOSECONDS if marker_ttl else None,
            # The server adds its own metadata about versions.
            metadata={
                name: value
                for name, value in (config.get("metadata") or {}).items()
                if not name.startswith("_nats.")
            },
            duplicate_window=_window(config),
        )


def _window(config: Mapping[str, Any]) -> float | None:
    """The duplicate window in seconds; None if it is the default."""
    window, ttl = config.get("duplicate_window", 0), config.get("max_age", 0)
    default = min(ttl, _DUPLICATE_WINDOW) if ttl else _DUPLICATE_WINDOW
    unusual = 0 < window != default and (not ttl or window <= ttl)
    return window / _NANOSECONDS if unusual else None


def _limit(value: int) -> int | None:
    return value if value > 0 else None


@dataclass(frozen=True, slots=True)
class BucketStatus:
    """Status of a bucket (ADR-8).

    Attributes:
        bucket: its name.
        values: number of messages, older revisions and markers included.
        bytes: size of the messages.
        history: number of revisions kept per key.
        ttl: seconds that entries are kept; None for no limit.
        backing_store: always ``JetStream``.
        last_revision: the highest revision ever written.
        config: all properties.
        stream_info: the server's whole response.
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
    def of(cls, response: Mapping[str, Any]) -> BucketStatus:
        """Create from the response of ``STREAM.INFO``; UnsupportedStreamError if not a bucket."""
        config = KeyValueConfig.of(stream_config(response, "config"))
        state = object_(response, "state")
        return cls(
            bucket=config.bucket,
            values=integer(state, "messages"),
            bytes=integer(state, "bytes"),
            history=config.history,
            ttl=config.ttl,
            backing_store="JetStream",
            last_revision=integer(state, "last_seq"),
            config=config,
            stream_info=response,
        )
