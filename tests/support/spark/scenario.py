"""Scenarios: changes of a bucket or a stream, and of a query on it, as a list of actions.

A test lists actions and expected results, in order, as Spark's own stream tests do::

    play(
        scene,
        Put("a", "1"),
        Run(),
        ExpectRows("1 PUT a=1 initial"),
        Put("a", "2"),
        Run(),
        ExpectRows("1 PUT a=1 initial", "2 PUT a=2"),
    )

``Run`` runs a query with ``Trigger.AvailableNow`` to its end. ``Start``, ``Wait`` and ``Stop``
control a query that runs continuously. All queries of a scene use the same checkpoint.
``foreachBatch`` collects the rows of a micro-batch. When Spark runs a micro-batch again, its last
attempt counts, as in any idempotent sink. ``ExpectRows`` compares all rows since the start of the
scene, so one comparison detects lost rows, duplicates and a wrong order. Conditions have deadlines;
no action sleeps for a fixed time.

The form of a row is ``<revision> <operation> <key>=<value>``, followed by `` initial`` for initial
values, and without ``=<value>`` where the value is null.

A scene has a format, and the same actions work with both formats. In a scene of ``nats_stream``,
the stream has the name that the bucket would have, and its subjects are ``<name>.<key>``:
``Put("a", "1")`` publishes to ``<name>.a``. The form of its rows is ``<sequence> <key>=<data>``.
``ExpectMessages`` uses this form for both formats, and ``ALL`` and ``NEW`` hold the options of each
format for the two start positions. Scenarios that use these run with both formats
(``shared_scenarios.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from nats_stream_source.embedded import NatsServer
from tests.support.nats import buckets
from tests.support.nats.store_files import keep_store
from tests.support.nats.streams import create_stream
from tests.support.spark.streaming_query import begin
from tests.support.wait import wait_until

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
        attempts: id and rows of each micro-batch that reached the sink, in order.
        options: options of the last ``Start`` or ``Run``, for ``Restart``.
        restore: puts the store back that ``Backup`` has copied.
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
    restore: Callable[[], None] | None = None
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
        return [row for batch in self.batches.values() for row in batch]

    def offsets(self) -> list[dict[str, Any]]:
        """Read the offsets of the checkpoint's offset log, one for each micro-batch."""
        logged = (self.checkpoint / "offsets").glob("[0-9]*")
        return [logged_offset(path) for path in sorted(logged, key=lambda path: int(path.name))]

    def sink(self, start: Start) -> Callable[[DataFrame, int], None]:
        """Return the sink of a query that ``start`` starts, which collects the rows."""

        def collect(batch: DataFrame, batch_id: int) -> None:
            if start.before is not None:
                start.before(batch_id)
            self.attempts.append((batch_id, batch.collect()))
            if start.after is not None:
                start.after(batch_id)
            if batch_id == start.fail_on_batch:
                raise SinkError(f"the sink fails on micro-batch {batch_id}")

        return collect

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


# -- writes ----------------------------------------------------------------------------------------


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


# -- the server and its store ----------------------------------------------------------------------


@dataclass(frozen=True)
class Recreate:
    """Delete the bucket and create it again, empty, which creates another stream."""

    history: int = 1

    def run(self, scene: Scene) -> None:
        before = scene.info()["created"]
        buckets.api(scene.url, f"STREAM.DELETE.{scene.stream}")
        Create(self.history).run(scene)
        assert scene.info()["created"] != before


@dataclass(frozen=True)
class Backup:
    """Copy the server's store while the server is stopped."""

    def run(self, scene: Scene) -> None:
        scene.restore = keep_store(scene.server, scene.directory)


@dataclass(frozen=True)
class Restore:
    """Restore the copy of ``Backup``, which rolls the stream back to an earlier sequence."""

    def run(self, scene: Scene) -> None:
        assert scene.restore is not None
        before = scene.info()
        scene.restore()
        after = scene.info()
        assert after["created"] == before["created"]
        assert after["state"]["last_seq"] < before["state"]["last_seq"]


@dataclass(frozen=True)
class ExpectState:
    """Compare items of the stream's ``state``, as the server reports them."""

    state: Mapping[str, int]

    def run(self, scene: Scene) -> None:
        state = scene.info()["state"]
        assert {name: state[name] for name in self.state} == self.state


# -- the query -------------------------------------------------------------------------------------


LIVE: Mapping[str, Any] = {"processingTime": "50 milliseconds"}


class SinkError(Exception):
    """The error that ``Start(fail_on_batch=…)`` raises in the sink."""


@dataclass(frozen=True)
class Start:
    """Start the query.

    Attributes:
        options: options of the source, besides ``servers`` and ``bucket``.
        trigger: keyword arguments of ``DataStreamWriter.trigger``.
        fail_on_batch: the sink raises once, after it received this micro-batch.
        before, after: called in the sink for each micro-batch, with its id, before and after its
            rows are read.
        sink: replaces the sink that collects the rows.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    trigger: Mapping[str, Any] = field(default_factory=lambda: LIVE)
    fail_on_batch: int | None = None
    before: Callable[[int], None] | None = None
    after: Callable[[int], None] | None = None
    sink: Callable[[DataFrame, int], None] | None = None

    def run(self, scene: Scene) -> None:
        assert scene.query is None, "a query is already running"
        scene.options = dict(self.options)
        scene.query = begin(
            read(scene, self.options)
            .writeStream.foreachBatch(self.sink or scene.sink(self))
            .trigger(**self.trigger)
            .option("checkpointLocation", str(scene.checkpoint))
            .start
        )


def read(scene: Scene, options: Mapping[str, Any]) -> DataFrame:
    """Return the streaming DataFrame of the bucket or stream; None removes an option."""
    given = {name: v for name, v in {**scene.source, **options}.items() if v is not None}
    return scene.spark.readStream.format(scene.format).options(**given).load()


@dataclass(frozen=True)
class Wait:
    """Wait until the query has delivered ``rows`` rows since the start of the scene."""

    rows: int

    def run(self, scene: Scene) -> None:
        wait_until(
            lambda: len(scene.rows) >= self.rows,
            f"{self.rows} rows",
            alive=lambda: _alive(scene),
            seen=lambda: [shown(row) for row in scene.rows],
            deadline=600,
        )


@dataclass(frozen=True)
class WaitForBatch:
    """Wait until micro-batch ``batch_id`` is committed in the checkpoint, empty or not."""

    batch_id: int

    def run(self, scene: Scene) -> None:
        committed = scene.checkpoint / "commits" / str(self.batch_id)
        wait_until(
            committed.exists,
            f"micro-batch {self.batch_id}",
            alive=lambda: _alive(scene),
            deadline=600,
        )


@dataclass(frozen=True)
class Stop:
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
    """Run the query with ``Trigger.AvailableNow`` to its end; ``options`` as in ``Start``."""

    options: Mapping[str, Any] = field(default_factory=dict)
    after: Callable[[int], None] | None = None

    def run(self, scene: Scene) -> None:
        Start(self.options, trigger={"availableNow": True}, after=self.after).run(scene)
        assert scene.query is not None
        assert scene.query.awaitTermination(int(DEADLINE)), "AvailableNow did not end"
        scene.close()


@dataclass(frozen=True)
class ExpectError:
    """Expect that the query, or ``action`` if it is given, fails.

    Attributes:
        name: name of the error's class.
        fragments: strings that the text of the error must contain.
        action: the action that must fail.
        rows: number of all rows afterwards; default: as many as before.
        absent: strings that the text must not contain, such as secrets.
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
            assert secret not in text, "the text of the error contains a secret"
        assert len(scene.rows) == (before if self.rows is None else self.rows), "partial output"

    def _text(self, scene: Scene) -> str:
        try:
            if self.action is not None:
                self.action.run(scene)
            elif scene.query is not None:
                assert scene.query.awaitTermination(int(DEADLINE)), "the query did not fail"
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


# -- expectations ----------------------------------------------------------------------------------


class ExpectRows:
    """Compare all rows that the query has delivered since the start of the scene."""

    def __init__(self, *rows: str) -> None:
        self.expected = list(rows)

    def __repr__(self) -> str:
        return f"ExpectRows({len(self.expected)})"

    def run(self, scene: Scene) -> None:
        assert [shown(row) for row in scene.rows] == self.expected


class ExpectMessages(ExpectRows):
    """Compare all rows as ``<sequence> <key>=<value>`` in both formats; without markers."""

    def run(self, scene: Scene) -> None:
        assert [
            re.sub(" PUT | initial$", _plain, shown(row)) for row in scene.rows
        ] == self.expected


def _plain(matched: re.Match[str]) -> str:
    return " " if matched[0].endswith(" ") else ""


@dataclass(frozen=True)
class ExpectInitialThrough:
    """Compare End-Of-Initial-Data in all offsets of the checkpoint and in the rows."""

    sequence: int

    def run(self, scene: Scene) -> None:
        offsets = scene.offsets()
        assert offsets, "no offset is logged"
        assert {offset["initial_through"] for offset in offsets} == {self.sequence}
        if scene.format == KV:
            assert all(row.initial == (row.revision <= self.sequence) for row in scene.rows)


@dataclass(frozen=True)
class ExpectBatches:
    """Compare the number of rows of each micro-batch that has rows."""

    sizes: tuple[int, ...]

    def run(self, scene: Scene) -> None:
        assert tuple(len(rows) for rows in scene.batches.values() if rows) == self.sizes


@dataclass(frozen=True)
class ExpectNoConsumers:
    """Expect no consumer on the server: a reader deletes its consumer after its range."""

    def run(self, scene: Scene) -> None:
        names = buckets.api(scene.url, f"CONSUMER.NAMES.{scene.stream}").get("consumers")
        assert not names
