"""A bucket that another one mirrors or takes entries from, as its stream's configuration. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nats_stream_source.errors import ConfigurationError
from nats_stream_source.jetstream.subjects import (
    bucket_of,
    check_bucket,
    check_filter,
    key_subject,
    stream_of,
)


@dataclass(frozen=True, slots=True)
class Upstream:
    """A bucket that another one mirrors, or takes entries from.

    Attributes:
        bucket: its name.
        domain: the JetStream domain that it is in, when that is another one.
        api_prefix: or the prefix under which its account's API is imported (ADR-19); one of the
            two at most.
        deliver_prefix: of the subjects on which the other account delivers.
        keys: take only the keys that match this filter.
        start_seq: begin at this revision of it.
    """

    bucket: str
    domain: str | None = None
    api_prefix: str | None = None
    deliver_prefix: str | None = None
    keys: str | None = None
    start_seq: int | None = None

    def __post_init__(self) -> None:
        check_bucket(self.bucket)
        if self.domain and self.api_prefix:
            raise ConfigurationError(
                f"the upstream bucket {self.bucket!r} has both a domain and an API prefix: the "
                f"domain {self.domain!r} is the prefix '$JS.{self.domain}.API'"
            )
        if self.keys is not None:
            check_filter(self.keys)

    @property
    def external(self) -> dict[str, Any] | None:
        """The server's ``external`` object; None for a bucket of the same account and domain."""
        api = f"$JS.{self.domain}.API" if self.domain else self.api_prefix
        if api is None:
            return None
        return {"api": api} | ({"deliver": self.deliver_prefix} if self.deliver_prefix else {})

    def as_mirror(self) -> dict[str, Any]:
        """The stream's ``mirror``: subjects stay what they are upstream."""
        source = self._common()
        if self.keys is not None:
            source["filter_subject"] = key_subject(self.bucket, self.keys)
        return source

    def as_source(self, bucket: str) -> dict[str, Any]:
        """One of the stream's ``sources``: subjects become those of ``bucket``."""
        source = self._common()
        keys = self.keys or ">"
        if self.external is None or self.bucket != bucket:
            source["subject_transforms"] = [
                {"src": key_subject(self.bucket, keys), "dest": key_subject(bucket, _placed(keys))}
            ]
        elif self.keys is not None:
            source["filter_subject"] = key_subject(self.bucket, self.keys)
        return source

    def _common(self) -> dict[str, Any]:
        source: dict[str, Any] = {"name": stream_of(self.bucket)}
        if self.external is not None:
            source["external"] = self.external
        if self.start_seq is not None:
            source["opt_start_seq"] = self.start_seq
        return source

    @classmethod
    def of(cls, source: Mapping[str, Any]) -> Upstream:
        """From a stream's ``mirror`` or one of its ``sources``."""
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


def _placed(keys: str) -> str:
    """A key filter as the destination of a transform, where each ``*`` says which it stands for."""
    numbers = itertools.count(1)
    return re.sub(r"\*", lambda _: f"{{{{wildcard({next(numbers)})}}}}", keys)
