"""Configuration of a bucket that another bucket mirrors or uses as a source. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nats_stream_source.errors import ConfigurationError
from nats_stream_source.jetstream.subjects import (
    bucket_of,
    key_subject,
    stream_of,
    validate_bucket,
    validate_filter,
)


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
