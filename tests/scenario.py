"""Scenarios: what happens to a bucket or a stream and to a query on it, as a list of actions.

A test says what is done and what must be seen, in order, as Spark's own stream tests do::

    play(
        scene,
        Put("a", "1"),
        Run(),
        ExpectRows("1 PUT a=1 initial"),
        Put("a", "2"),
        Run(),
        ExpectRows("1 PUT a=1 initial", "2 PUT a=2"),
    )

``Run`` is a query with ``Trigger.AvailableNow`` up to its end; ``Start``, ``Wait`` and ``Stop``
are one that goes on. All runs of a scene have the same checkpoint. A micro-batch's rows are
collected by ``foreachBatch``; when Spark runs a batch again, its last attempt counts, as for any
idempotent sink. ``ExpectRows`` compares all rows since the scene's beginning, so nothing lost,
nothing twice and the order are one comparison. Conditions have deadlines; nothing sleeps for luck.

A row is written ``<revision> <operation> <key>=<value>``, with `` initial`` behind initial values,
and without ``=<value>`` where the value is null.

A scene has a format, and the same actions do for both. In a scene of ``nats_stream``, the stream
has the name that the bucket would have, and its subjects are ``<name>.<key>``: ``Put("a", "1")``
publishes to ``<name>.a``. A row is written ``<sequence> <key>=<data>`` there. ``ExpectMessages``
writes rows of both formats so, and ``ALL`` and ``NEW`` have each format's options for the two
beginnings: what is written with these is one scenario for both (``shared_scenarios.py``).
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import buckets
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StreamingQuery
from queries import begin

from nats_stream_source.embedded import NatsServer

DEADLINE = 600.0
"""Seconds that a condition may take to come true; only a failing test takes that long."""

KV, STREAM = "nats_kv", "nats_stream"

ALL: Mapping[str, Mapping[str, Any]] = {KV: {"includeHistory": True}, STREAM: {}}
"""By format: begin with all that there is."""

NEW: Mapping[str, Mapping[str, Any]] = {KV: {"updatesOnly": True}, STREAM: {"deliverPolicy": "new"}}
"""By format: begin with what comes after the query's start."""

LIVE: Mapping[str, Any] = {"processingTime": "50 milliseconds"}


class SinkError(Exception):
    """What ``Start(fail_on_batch=…)`` raises in the sink."""


@dataclass
class Scene:
    """The state of a scenario: a server, a bucket on it, a query, and what the query delivered.

    Attributes:
        directory: holds the checkpoint.
        attempts: each micro-batch that reached the sink, in order: its id and its rows.
        options: the options of the last ``Start`` or ``Run``, for ``Restart``.
        backup: the copy of the server's store that ``Backup`` made.
        format: ``KV`` or ``STREAM``.
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

    @property
    def stream(self) -> str:
        """The stream's name on the server."""
        return f"KV_{self.bucket}" if self.format == KV else self.bucket

    @property
    def prefix(self) -> str:
        """What stands before a key in every subject."""
        return f"$KV.{self.bucket}." if self.format == KV else f"{self.bucket}."

    @property
    def source(self) -> dict[str, str]:
        """The options that say what is read."""
        name = "bucket" if self.format == KV else "stream"
        return {"servers": self.url, name: self.bucket}

    def info(self) -> dict[str, Any]:
        """``STREAM.INFO`` of the stream."""
        return buckets.api(self.url, f"STREAM.INFO.{self.stream}")

    def write(self, entries: Iterable[tuple[str, bytes]]) -> list[int]:
        """Write values to keys, in order; their sequences."""
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
        """The offsets in the checkpoint's offset log, one for each micro-batch."""
        logged = (self.checkpoint / "offsets").glob("[0-9]*")
        return [logged_offset(path) for path in sorted(logged, key=lambda path: int(path.name))]

    def sink(self, start: Start) -> Callable[[DataFrame, int], None]:
        """The sink of a query that ``start`` starts."""
        return start.collect(self)

    def close(self) -> None:
        """Stop a query that still runs."""
        query, self.query = self.query, None
        if query is not None:
            query.stop()


class Action(Protocol):
    """One thing that happens, or must be seen, in a scene."""

    def run(self, scene: Scene) -> None: ...


def play(scene: Scene, *actions: Action) -> None:
    """Run the actions in order; the failing one's position is noted on the error."""
    for number, action in enumerate(actions, start=1):
        try:
            action.run(scene)
        except BaseException as error:
            # BaseException.add_note is of Python 3.11.
            print(f"action {number} of {len(actions)} failed: {action!r}: {type(error).__name__}")
            raise
    # A stream that was set back gives its revisions out again; the time tells them apart.
    kv = scene.format == KV
    identities = [
        (
            row.stream_created,
            *((row.revision, row.created) if kv else (row.sequence, row.timestamp)),
        )
        for row in scene.rows
    ]
    assert len(identities) == len(set(identities)), "a row was delivered twice"


def eventually(
    condition: Callable[[], Any],
    what: str,
    alive: Callable[[], None] = lambda: None,
    seen: Callable[[], object] = lambda: "",
    within: float = DEADLINE,
) -> None:
    """Wait until ``condition`` holds.

    Args:
        what: is waited for, in words.
        alive: raises when it cannot come any more.
        seen: what there is instead, for the error.
        within: seconds.
    """
    deadline = time.monotonic() + within
    while not condition():
        alive()
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within:g} s: {what}; {seen()}")
        time.sleep(0.01)


def logged_offset(path: Path) -> dict[str, Any]:
    """The source's offset in a file of the offset log: the version, Spark's own line, then it."""
    offset: dict[str, Any] = json.loads(path.read_text().splitlines()[2])
    return offset


def shown(row: Row) -> str:
    """A row as ``ExpectRows`` writes it."""
    if "revision" not in row:
        subject = row.subject.partition(".")[2]
        return (
            f"{row.sequence} {subject}{'' if row.data is None else f'={bytes(row.data).decode()}'}"
        )
    value = "" if row.value is None else f"={bytes(row.value).decode()}"
    return f"{row.revision} {row.operation} {row.key}{value}{' initial' if row.initial else ''}"


# -- writing ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Create:
    """Create the bucket, or a stream, for which ``history`` means nothing."""

    history: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)

    def run(self, scene: Scene) -> None:
        if scene.format == KV:
            buckets.create_bucket(scene.url, scene.bucket, self.history, **self.config)
            return
        wanted = {"name": scene.bucket, "subjects": [f"{scene.prefix}>"], **self.config}
        buckets.api(scene.url, f"STREAM.CREATE.{scene.stream}", wanted)


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
    """Delete messages by their sequences, which leaves holes."""

    sequences: tuple[int, ...]

    def run(self, scene: Scene) -> None:
        for seq in self.sequences:
            buckets.api(scene.url, f"STREAM.MSG.DELETE.{scene.stream}", {"seq": seq})


@dataclass(frozen=True)
class Drop:
    """Purge the stream of all messages before ``seq``, as limits do."""

    seq: int

    def run(self, scene: Scene) -> None:
        buckets.api(scene.url, f"STREAM.PURGE.{scene.stream}", {"seq": self.seq})


# -- the bucket's and the server's fate ---------------------------------------------------------


@dataclass(frozen=True)
class Recreate:
    """Delete the bucket and make it again, empty; it is another stream then."""

    history: int = 1

    def run(self, scene: Scene) -> None:
        before = scene.info()["created"]
        buckets.api(scene.url, f"STREAM.DELETE.{scene.stream}")
        Create(self.history).run(scene)
        assert scene.info()["created"] != before


@dataclass(frozen=True)
class Backup:
    """Copy the server's store as it is now, with the server stopped."""

    def run(self, scene: Scene) -> None:
        scene.backup = scene.directory / "store"
        scene.server.terminate()
        shutil.copytree(scene.server.store / "jetstream", scene.backup)
        scene.server.start()


@dataclass(frozen=True)
class Restore:
    """Put the store back that ``Backup`` copied: the bucket is at an earlier sequence again."""

    def run(self, scene: Scene) -> None:
        assert scene.backup is not None
        before = scene.info()
        scene.server.terminate()
        shutil.rmtree(scene.server.store / "jetstream")
        shutil.copytree(scene.backup, scene.server.store / "jetstream")
        scene.server.start()
        after = scene.info()
        assert after["created"] == before["created"]
        assert after["state"]["last_seq"] < before["state"]["last_seq"]


@dataclass(frozen=True)
class RestartServer:
    """End the server in good order and start it again."""

    def run(self, scene: Scene) -> None:
        scene.server.restart()


@dataclass(frozen=True)
class ExpectState:
    """What the server itself says of the stream: items of ``state``."""

    state: Mapping[str, int]

    def run(self, scene: Scene) -> None:
        state = scene.info()["state"]
        assert {name: state[name] for name in self.state} == self.state


# -- the query ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """Start the query.

    Attributes:
        options: of the source, beside ``servers`` and ``bucket``.
        trigger: keyword arguments of ``DataStreamWriter.trigger``.
        fail_on_batch: raise in the sink, once, after it was given this micro-batch.
        before, after: called in the sink for each micro-batch, with its id, before and after its
            rows are read.
        sink: a sink of the test's own in place of the one that collects.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    trigger: Mapping[str, Any] = field(default_factory=lambda: LIVE)
    fail_on_batch: int | None = None
    before: Callable[[int], None] | None = None
    after: Callable[[int], None] | None = None
    sink: Callable[[DataFrame, int], None] | None = None

    def run(self, scene: Scene) -> None:
        assert scene.query is None, "a query runs already"
        scene.options = dict(self.options)
        scene.query = begin(
            read(scene, self.options)
            .writeStream.foreachBatch(self.sink or scene.sink(self))
            .trigger(**self.trigger)
            .option("checkpointLocation", str(scene.checkpoint))
            .start
        )

    def collect(self, scene: Scene) -> Callable[[DataFrame, int], None]:
        """The sink that collects a micro-batch's rows in the scene."""

        def collect(batch: DataFrame, batch_id: int) -> None:
            if self.before is not None:
                self.before(batch_id)
            scene.attempts.append((batch_id, batch.collect()))
            if self.after is not None:
                self.after(batch_id)
            if batch_id == self.fail_on_batch:
                raise SinkError(f"the sink fails on micro-batch {batch_id}")

        return collect


def read(scene: Scene, options: Mapping[str, Any]) -> DataFrame:
    """The streaming DataFrame of the scene's bucket or stream; None takes an option away."""
    given = {name: v for name, v in {**scene.source, **options}.items() if v is not None}
    return scene.spark.readStream.format(scene.format).options(**given).load()


@dataclass(frozen=True)
class Wait:
    """Wait until the query has delivered ``rows`` rows since the scene's beginning."""

    rows: int

    def run(self, scene: Scene) -> None:
        eventually(
            lambda: len(scene.rows) >= self.rows,
            f"{self.rows} rows",
            lambda: _alive(scene),
            lambda: [shown(row) for row in scene.rows],
        )


@dataclass(frozen=True)
class WaitForBatch:
    """Wait until micro-batch ``batch_id`` is committed in the checkpoint, empty or not."""

    batch_id: int

    def run(self, scene: Scene) -> None:
        committed = scene.checkpoint / "commits" / str(self.batch_id)
        eventually(committed.exists, f"micro-batch {self.batch_id}", lambda: _alive(scene))


@dataclass(frozen=True)
class Stop:
    """Stop the query."""

    def run(self, scene: Scene) -> None:
        assert scene.query is not None, "no query runs"
        _alive(scene)
        scene.close()


@dataclass(frozen=True)
class Restart:
    """Stop the query and start it again with the same options."""

    def run(self, scene: Scene) -> None:
        Stop().run(scene)
        Start(scene.options).run(scene)


@dataclass(frozen=True)
class Run:
    """Run the query with ``Trigger.AvailableNow`` to its end; ``options`` as of ``Start``."""

    options: Mapping[str, Any] = field(default_factory=dict)
    after: Callable[[int], None] | None = None

    def run(self, scene: Scene) -> None:
        Start(self.options, trigger={"availableNow": True}, after=self.after).run(scene)
        assert scene.query is not None
        assert scene.query.awaitTermination(int(DEADLINE)), "AvailableNow did not end"
        scene.close()


@dataclass(frozen=True)
class ExpectError:
    """The query fails, or ``action`` does.

    Attributes:
        name: the name of the error's class.
        fragments: what its text must have; ``absent``: what it must not have.
        rows: how many rows there are then, in all; when not given, no more than before.
    """

    name: str
    fragments: tuple[str, ...] = ()
    action: Action | None = None
    rows: int | None = None
    absent: tuple[str, ...] = ()

    def run(self, scene: Scene) -> None:
        before = len(scene.rows)
        text = self._text(scene)
        assert re.search(rf"\b{self.name}: ", text), text
        for fragment in self.fragments:
            assert fragment in text, text
        for secret in self.absent:
            assert secret not in text, "a secret is in the text of an error"
        assert len(scene.rows) == (before if self.rows is None else self.rows), "partial output"

    def _text(self, scene: Scene) -> str:
        try:
            if self.action is not None:
                self.action.run(scene)
            elif scene.query is not None:
                assert scene.query.awaitTermination(int(DEADLINE)), "the query goes on"
        except PySparkException as error:
            return str(error)
        finally:
            scene.close()
        raise AssertionError(f"no {self.name}")


def _alive(scene: Scene) -> None:
    """Raise the query's error if it has failed."""
    assert scene.query is not None, "no query runs"
    error = scene.query.exception()
    if error is not None:
        raise error


# -- what must be seen --------------------------------------------------------------------------


class ExpectRows:
    """All rows that the query has delivered since the scene's beginning."""

    def __init__(self, *rows: str) -> None:
        self.expected = list(rows)

    def __repr__(self) -> str:
        return f"ExpectRows({len(self.expected)})"

    def run(self, scene: Scene) -> None:
        assert [shown(row) for row in scene.rows] == self.expected


class ExpectMessages(ExpectRows):
    """All rows, as ``<sequence> <key>=<value>`` in both formats; no markers."""

    def run(self, scene: Scene) -> None:
        assert [
            re.sub(" PUT | initial$", _plain, shown(row)) for row in scene.rows
        ] == self.expected


def _plain(matched: re.Match[str]) -> str:
    return " " if matched[0].endswith(" ") else ""


@dataclass(frozen=True)
class ExpectInitialThrough:
    """End-Of-Initial-Data as all offsets of the checkpoint have it, and the rows agree."""

    sequence: int

    def run(self, scene: Scene) -> None:
        offsets = scene.offsets()
        assert offsets, "no offset is logged"
        assert {offset["initial_through"] for offset in offsets} == {self.sequence}
        if scene.format == KV:
            assert all(row.initial == (row.revision <= self.sequence) for row in scene.rows)


@dataclass(frozen=True)
class ExpectBatches:
    """How many rows each micro-batch that had any has delivered."""

    sizes: tuple[int, ...]

    def run(self, scene: Scene) -> None:
        assert tuple(len(rows) for rows in scene.batches.values() if rows) == self.sizes


@dataclass(frozen=True)
class ExpectNoConsumers:
    """Nothing is left on the server: ordered consumers are deleted when a range is read."""

    def run(self, scene: Scene) -> None:
        names = buckets.api(scene.url, f"CONSUMER.NAMES.{scene.stream}").get("consumers")
        assert not names


@dataclass(frozen=True)
class Do:
    """Anything else."""

    action: Callable[[Scene], None]

    def run(self, scene: Scene) -> None:
        self.action(scene)
