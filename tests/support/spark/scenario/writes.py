"""Actions that create a bucket or a stream, and write to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.nats import buckets
from tests.support.nats.streams import create_stream
from tests.support.spark.scenario.scene import KV, Scene


@dataclass(frozen=True)
class Create:
    """Create the bucket, or a stream, which ignores ``history``."""

    history: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)

    def run(self, scene: Scene) -> None:
        if scene.format == KV:
            buckets.create_bucket(scene.url, scene.bucket, self.history, **self.config)
            return
        create_stream(scene.url, scene.stream, f"{scene.prefix}>", **self.config)


@dataclass(frozen=True)
class CreateOther:
    """Create a second, empty bucket or stream, which the query reads too from now on."""

    def run(self, scene: Scene) -> None:
        scene.other = f"{scene.bucket}-other"
        if scene.format == KV:
            buckets.create_bucket(scene.url, scene.other)
            return
        create_stream(scene.url, scene.other)


@dataclass(frozen=True)
class Put:
    """Put a value."""

    key: str
    value: str | bytes
    headers: Mapping[str, str] | None = None

    def run(self, scene: Scene) -> None:
        value = self.value.encode() if isinstance(self.value, str) else self.value
        headers = dict(self.headers) if self.headers else None
        buckets.publish(scene.url, [(scene.prefix + self.key, value, headers)])


@dataclass(frozen=True)
class PutMany:
    """Put ``count`` values ``0, 1, 2, …``, to ``keys`` keys ``<prefix>0, <prefix>1, …`` in turn."""

    count: int
    keys: int
    prefix: str = "k"

    def run(self, scene: Scene) -> None:
        scene.write((f"{self.prefix}{i % self.keys}", b"%d" % i) for i in range(self.count))


@dataclass(frozen=True)
class Delete:
    """Write a DEL marker (buckets only)."""

    key: str

    def run(self, scene: Scene) -> None:
        buckets.delete(scene.url, scene.bucket, self.key)


@dataclass(frozen=True)
class Purge:
    """Write a PURGE marker (buckets only)."""

    key: str

    def run(self, scene: Scene) -> None:
        buckets.purge(scene.url, scene.bucket, self.key)


@dataclass(frozen=True)
class Erase:
    """Delete messages by their sequences, which leaves gaps."""

    sequences: tuple[int, ...]

    def run(self, scene: Scene) -> None:
        for seq in self.sequences:
            buckets.api(scene.url, f"STREAM.MSG.DELETE.{scene.stream}", {"seq": seq})


@dataclass(frozen=True)
class Drop:
    """Purge all messages before ``seq`` from the stream, as limits do."""

    seq: int

    def run(self, scene: Scene) -> None:
        buckets.api(scene.url, f"STREAM.PURGE.{scene.stream}", {"seq": self.seq})
