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

An action is mostly a function of the scene, see :func:`action`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from nats_stream_source.embedded import NatsServer
from tests.support.nats import buckets
from tests.support.nats.store_files import keep_store
from tests.support.nats.streams import create_stream
from tests.support.spark.streaming_query import begin
from tests.support.wait import wait_until

P = ParamSpec("P")

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
class Step:
    """The action that calls a function with the scene and these arguments."""

    function: Callable[..., None]
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]

    def __repr__(self) -> str:
        named = (f"{name}={value!r}" for name, value in self.named.items())
        return f"{self.function.__name__}({', '.join([*map(repr, self.arguments), *named])})"

    def run(self, scene: Scene) -> None:
        self.function(scene, *self.arguments, **self.named)


def action(function: Callable[Concatenate[Scene, P], None]) -> Callable[P, Step]:
    """Let a function of a scene and arguments return, for the arguments, its action."""

    def make(*arguments: P.args, **named: P.kwargs) -> Step:
        return Step(function, arguments, named)

    return make


@action
def Do(scene: Scene, function: Callable[[Scene], None]) -> None:
    """Call a function of the test with the scene."""
    function(scene)


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


@action
def Create(scene: Scene, history: int = 1, config: Mapping[str, Any] | None = None) -> None:
    """Create the bucket, or a stream, which ignores ``history``."""
    if scene.format == KV:
        buckets.create_bucket(scene.url, scene.bucket, history, **(config or {}))
        return
    create_stream(scene.url, scene.stream, f"{scene.prefix}>", **(config or {}))


@action
def CreateOther(scene: Scene) -> None:
    """Create a second, empty bucket or stream, which the query reads too from now on."""
    scene.other = f"{scene.bucket}-other"
    if scene.format == KV:
        buckets.create_bucket(scene.url, scene.other)
        return
    create_stream(scene.url, scene.other)


@action
def Put(scene: Scene, key: str, value: str | bytes, headers: dict[str, str] | None = None) -> None:
    value = value.encode() if isinstance(value, str) else value
    buckets.publish(scene.url, [(scene.prefix + key, value, headers)])


@action
def PutMany(scene: Scene, count: int, keys: int, prefix: str = "k") -> None:
    """Put ``count`` values ``0, 1, 2, …``, to ``keys`` keys ``<prefix>0, <prefix>1, …`` in turn."""
    scene.write((f"{prefix}{i % keys}", b"%d" % i) for i in range(count))


@action
def Delete(scene: Scene, key: str) -> None:
    """Write a DEL marker (buckets only)."""
    buckets.delete(scene.url, scene.bucket, key)


@action
def Purge(scene: Scene, key: str) -> None:
    """Write a PURGE marker (buckets only)."""
    buckets.purge(scene.url, scene.bucket, key)


@action
def Drop(scene: Scene, seq: int) -> None:
    """Purge all messages before ``seq`` from the stream, as limits do."""
    buckets.api(scene.url, f"STREAM.PURGE.{scene.stream}", {"seq": seq})


# -- the server and its store ----------------------------------------------------------------------


@action
def Recreate(scene: Scene, history: int = 1) -> None:
    """Delete the bucket and create it again, empty, which creates another stream."""
    before = scene.info()["created"]
    buckets.api(scene.url, f"STREAM.DELETE.{scene.stream}")
    Create(history).run(scene)
    assert scene.info()["created"] != before


@action
def Backup(scene: Scene) -> None:
    """Copy the server's store while the server is stopped."""
    scene.restore = keep_store(scene.server, scene.directory)


@action
def Restore(scene: Scene) -> None:
    """Restore the copy of ``Backup``, which rolls the stream back to an earlier sequence."""
    assert scene.restore is not None
    before = scene.info()
    scene.restore()
    after = scene.info()
    assert after["created"] == before["created"]
    assert after["state"]["last_seq"] < before["state"]["last_seq"]


@action
def ExpectState(scene: Scene, state: Mapping[str, int]) -> None:
    """Compare items of the stream's ``state``, as the server reports them."""
    found = scene.info()["state"]
    assert {name: found[name] for name in state} == state


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
        after: called in the sink for each micro-batch, with its id, after its rows were read.
        sink: replaces the sink that collects the rows.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    trigger: Mapping[str, Any] = field(default_factory=lambda: LIVE)
    fail_on_batch: int | None = None
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


@action
def Wait(scene: Scene, rows: int) -> None:
    """Wait until the query has delivered ``rows`` rows since the start of the scene."""
    wait_until(
        lambda: len(scene.rows) >= rows,
        f"{rows} rows",
        alive=lambda: _alive(scene),
        seen=lambda: [shown(row) for row in scene.rows],
        deadline=DEADLINE,
    )


@action
def WaitForBatch(scene: Scene, batch_id: int) -> None:
    """Wait until micro-batch ``batch_id`` is committed in the checkpoint, empty or not."""
    committed = scene.checkpoint / "commits" / str(batch_id)
    what = f"micro-batch {batch_id}"
    wait_until(committed.exists, what, alive=lambda: _alive(scene), deadline=DEADLINE)


@action
def Stop(scene: Scene) -> None:
    assert scene.query is not None, "no query runs"
    _alive(scene)
    scene.close()


@action
def Restart(scene: Scene) -> None:
    """Stop the query and start it again with the same options."""
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


@action
def ExpectError(
    scene: Scene,
    name: str,
    fragments: tuple[str, ...] = (),
    action: Action | None = None,
    rows: int | None = None,
) -> None:
    """Expect that the query, or ``action`` if it is given, fails.

    Args:
        name: name of the error's class.
        fragments: strings that the text of the error must contain.
        rows: number of all rows afterwards; default: as many as before.
    """
    before = len(scene.rows)
    text = _error_of(scene, action)
    assert re.search(rf"\b{name}: ", text), text
    for fragment in fragments:
        assert fragment in text, text
    assert len(scene.rows) == (before if rows is None else rows), "partial output"


def _error_of(scene: Scene, action: Action | None) -> str:
    try:
        if action is not None:
            action.run(scene)
        elif scene.query is not None:
            assert scene.query.awaitTermination(int(DEADLINE)), "the query did not fail"
    except PySparkException as error:
        return str(error)
    finally:
        scene.close()
    raise AssertionError("no error")


def _alive(scene: Scene) -> None:
    """Raise the query's error if it has failed."""
    assert scene.query is not None, "no query runs"
    error = scene.query.exception()
    if error is not None:
        raise error


# -- expectations ----------------------------------------------------------------------------------


@action
def ExpectRows(scene: Scene, *rows: str) -> None:
    """Compare all rows that the query has delivered since the start of the scene."""
    assert [shown(row) for row in scene.rows] == list(rows)


@action
def ExpectMessages(scene: Scene, *rows: str) -> None:
    """Compare all rows as ``<sequence> <key>=<value>`` in both formats; without markers."""
    plain = [re.sub(" PUT | initial$", _plain, shown(row)) for row in scene.rows]
    assert plain == list(rows)


def _plain(matched: re.Match[str]) -> str:
    return " " if matched[0].endswith(" ") else ""


@action
def ExpectInitialThrough(scene: Scene, sequence: int) -> None:
    """Compare End-Of-Initial-Data in all offsets of the checkpoint and in the rows."""
    offsets = scene.offsets()
    assert offsets, "no offset is logged"
    assert {offset["initial_through"] for offset in offsets} == {sequence}
    if scene.format == KV:
        assert all(row.initial == (row.revision <= sequence) for row in scene.rows)


@action
def ExpectBatches(scene: Scene, sizes: tuple[int, ...]) -> None:
    """Compare the number of rows of each micro-batch that has rows."""
    assert tuple(len(rows) for rows in scene.batches.values() if rows) == sizes


@action
def ExpectNoConsumers(scene: Scene) -> None:
    """Expect no consumer on the server: a reader deletes its consumer after its range."""
    names = buckets.api(scene.url, f"CONSUMER.NAMES.{scene.stream}").get("consumers")
    assert not names
