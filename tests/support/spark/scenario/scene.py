"""The state of a scenario, and ``play``, which runs actions on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from nats_stream_source.embedded import NatsServer
from tests.support.nats import buckets

if TYPE_CHECKING:
    from tests.support.spark.scenario.query import Start

DEADLINE = 600.0
"""Deadline of a condition in seconds; only a failing test reaches it."""

KV, STREAM = "nats_kv", "nats_stream"

ALL: Mapping[str, Mapping[str, Any]] = {KV: {"includeHistory": True}, STREAM: {}}
"""By format: the options that start at the first message."""

NEW: Mapping[str, Mapping[str, Any]] = {KV: {"updatesOnly": True}, STREAM: {"deliverPolicy": "new"}}
"""By format: the options that start after the last message."""


@dataclass
class Scene:
    """The state of a scenario: a server, a bucket on it, a query, and the rows it delivered.

    Attributes:
        directory: directory of the checkpoint.
        attempts: id and rows of each micro-batch that reached the sink, in order.
        options: options of the last ``Start`` or ``Run``, for ``Restart``.
        backup: copy of the server's store, made by ``Backup``.
        format: ``KV`` or ``STREAM``.
        other: a second bucket or stream, empty, which the query reads too; None for a query of one.
    """

    spark: SparkSession
    server: NatsServer
    bucket: str
    directory: Path
    attempts: list[tuple[int, list[Row]]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    query: StreamingQuery | None = None
    backup: Path | None = None
    format: str = KV
    other: str | None = None

    @property
    def stream(self) -> str:
        """The stream's name on the server."""
        return f"KV_{self.bucket}" if self.format == KV else self.bucket

    @property
    def prefix(self) -> str:
        """The prefix of a key in its subject."""
        return f"$KV.{self.bucket}." if self.format == KV else f"{self.bucket}."

    @property
    def source(self) -> dict[str, str]:
        """The options that name the server and the bucket or stream."""
        name = "bucket" if self.format == KV else "stream"
        if self.other is not None:
            return {"servers": self.url, f"{name}s": f"{self.bucket},{self.other}"}
        return {"servers": self.url, name: self.bucket}

    def info(self) -> dict[str, Any]:
        """Request ``STREAM.INFO`` of the stream."""
        return buckets.api(self.url, f"STREAM.INFO.{self.stream}")

    def write(self, entries: Iterable[tuple[str, bytes]]) -> list[int]:
        """Write values to keys, in order; return their sequences."""
        return buckets.publish(self.url, ((self.prefix + key, v, None) for key, v in entries))

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoint"

    @property
    def batches(self) -> dict[int, list[Row]]:
        """The last attempt of each micro-batch, in the order of their ids."""
        return dict(sorted(dict(self.attempts).items()))

    @property
    def rows(self) -> list[Row]:
        """All rows, in the order of the micro-batches."""
        return [row for batch in self.batches.values() for row in batch]

    def offsets(self) -> list[dict[str, Any]]:
        """Read the offsets of the checkpoint's offset log, one for each micro-batch."""
        logged = (self.checkpoint / "offsets").glob("[0-9]*")
        return [logged_offset(path) for path in sorted(logged, key=lambda path: int(path.name))]

    def sink(self, start: Start) -> Callable[[DataFrame, int], None]:
        """Return the sink of a query that ``start`` starts."""
        return start.collect(self)

    def close(self) -> None:
        """Stop the query if it still runs."""
        query, self.query = self.query, None
        if query is not None:
            query.stop()


class Action(Protocol):
    """A step of a scenario: a change, or a check that raises ``AssertionError``."""

    def run(self, scene: Scene) -> None: ...


@dataclass(frozen=True)
class Do:
    """Call a function of the test with the scene."""

    action: Callable[[Scene], None]

    def run(self, scene: Scene) -> None:
        self.action(scene)


def play(scene: Scene, *actions: Action) -> None:
    """Run the actions in order; print the position of an action that fails."""
    for number, action in enumerate(actions, start=1):
        try:
            action.run(scene)
        except BaseException as error:
            # BaseException.add_note requires Python 3.11.
            print(f"action {number} of {len(actions)} failed: {action!r}: {type(error).__name__}")
            raise
    # A stream that was rolled back assigns revisions again; their timestamps differ.
    kv = scene.format == KV
    identities = [
        (
            row.stream_created,
            *((row.revision, row.created) if kv else (row.sequence, row.timestamp)),
        )
        for row in scene.rows
    ]
    assert len(identities) == len(set(identities)), "a row was delivered twice"


def logged_offset(path: Path) -> dict[str, Any]:
    """Read the offset of the source, the third line of a file of the offset log."""
    offset: dict[str, Any] = json.loads(path.read_text().splitlines()[2])
    return offset


def shown(row: Row) -> str:
    """Format a row as ``ExpectRows`` does."""
    if "revision" not in row:
        subject = row.subject.partition(".")[2]
        return (
            f"{row.sequence} {subject}{'' if row.data is None else f'={bytes(row.data).decode()}'}"
        )
    value = "" if row.value is None else f"={bytes(row.value).decode()}"
    return f"{row.revision} {row.operation} {row.key}{value}{' initial' if row.initial else ''}"
