"""Queries that stop, fail or whose driver is killed, and restart: nothing lost, nothing twice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from nats_stream_source.embedded import NatsServer
from tests.faults.process.crash_point_driver import stopping_driver, stored_rows
from tests.support.nats.buckets import bucket_state, consumers, create_bucket, put, put_many
from tests.support.spark.scenario import (
    Create,
    Delete,
    Do,
    ExpectBatches,
    ExpectError,
    ExpectInitialThrough,
    ExpectNoConsumers,
    ExpectRows,
    Purge,
    Put,
    Restart,
    Run,
    Scene,
    Start,
    Stop,
    Wait,
    play,
)
from tests.support.wait import wait_until

# -- stop and restart ---------------------------------------------------------------------------


def test_writes_while_stopped(scene: Scene) -> None:
    play(
        scene,
        Create(5),
        Put("a", "1"),
        Put("b", "1"),
        Start(),
        Wait(rows=2),
        Put("a", "2"),
        Wait(rows=3),
        Stop(),
        Put("a", "3"),
        Delete("b"),
        Put("a", "4"),
        Start(),
        Wait(rows=6),
        Restart(),
        Put("c", "1"),
        Wait(rows=7),
        Stop(),
        Run(),  # there is nothing new: nothing comes again
        ExpectRows(
            "1 PUT a=1 initial",
            "2 PUT b=1 initial",
            "3 PUT a=2",
            "4 PUT a=3",
            "5 DEL b",
            "6 PUT a=4",
            "7 PUT c=1",
        ),
        ExpectInitialThrough(2),
        ExpectNoConsumers(),
    )


def test_compacted_while_stopped(scene: Scene) -> None:
    """Where one revision is kept, the last one of each key comes, and none of those read before."""
    play(
        scene,
        Create(1),
        Put("a", "1"),
        Put("b", "1"),
        Put("c", "1"),
        Run(),
        Put("a", "2"),
        Put("b", "2"),
        Put("a", "3"),
        Purge("b"),
        Put("d", "1"),
        Run(),
        ExpectRows(
            "1 PUT a=1 initial",
            "2 PUT b=1 initial",
            "3 PUT c=1 initial",
            "6 PUT a=3",
            "7 PURGE b",
            "8 PUT d=1",
        ),
    )


def test_server_restarts_under_query(own_scene: Scene) -> None:
    play(
        own_scene,
        Create(),
        Put("a", "1"),
        Start(),
        Wait(rows=1),
        Do(lambda scene: scene.server.restart()),
        Put("b", "1"),
        Wait(rows=2),
        ExpectRows("1 PUT a=1 initial", "2 PUT b=1"),
    )


# -- a sink that fails --------------------------------------------------------------------------


def test_first_batch_fails(scene: Scene) -> None:
    play(
        scene,
        Create(5),
        Put("a", "1"),
        Put("b", "1"),
        Put("a", "2"),
        Start(fail_on_batch=0),
        ExpectError("SinkError", rows=2),
        Put("c", "1"),
        Run(),
        ExpectRows("2 PUT b=1 initial", "3 PUT a=2 initial", "4 PUT c=1"),
        ExpectInitialThrough(3),
        Do(same_rows_again),
    )


def test_first_batch_fails_and_its_rows_are_superseded(scene: Scene) -> None:
    """A key that was overwritten meanwhile comes with its later revision, in the next range."""
    play(
        scene,
        Create(5),
        Put("a", "1"),
        Put("b", "1"),
        Start(fail_on_batch=0),
        ExpectError("SinkError", rows=2),
        Put("a", "2"),
        Run(),
        ExpectRows("2 PUT b=1 initial", "3 PUT a=2"),
        ExpectInitialThrough(2),
    )


def test_later_batch_fails(scene: Scene) -> None:
    play(
        scene,
        Create(5),
        Put("a", "1"),
        Run(),
        Put("a", "2"),
        Put("b", "1"),
        Start(fail_on_batch=1),
        ExpectError("SinkError", rows=3),
        Put("a", "3"),
        Run(),
        ExpectRows("1 PUT a=1 initial", "2 PUT a=2", "3 PUT b=1", "4 PUT a=3"),
        Do(same_rows_again),
    )


def same_rows_again(scene: Scene) -> None:
    """The micro-batch that failed came twice, and with the same rows."""
    ids = [batch_id for batch_id, _ in scene.attempts]
    (failed,) = {batch_id for batch_id in ids if ids.count(batch_id) > 1}
    first, second = (rows for batch_id, rows in scene.attempts if batch_id == failed)
    assert [identity(row) for row in first] == [identity(row) for row in second]


def identity(row: Any) -> dict[str, Any]:
    """All columns that a second read promises: ``delta`` is the one that may differ."""
    columns = row.asDict()
    del columns["delta"]
    return dict(columns)


# -- replay -------------------------------------------------------------------------------------


def test_replay_from_sequence(scene: Scene, tmp_path: Path) -> None:
    """The same rows as the first time, from another checkpoint and in other micro-batches."""
    play(
        scene,
        Create(10),
        Put("a", "1"),
        Put("b", "1"),
        Start({"includeHistory": True}),
        Wait(rows=2),
        Put("a", "2"),
        Delete("b"),
        Wait(rows=4),
        Put("c", "1", {"Trace": "t"}),
        Wait(rows=5),
        Stop(),
    )
    replayed = Scene(scene.spark, scene.server, scene.bucket, tmp_path / "replay")
    play(replayed, Run({"startSequence": 2, "maxRowsPerTrigger": 3}), ExpectBatches((3, 1)))
    expected = [row for row in scene.rows if row.revision >= 2]
    without = ("delta", "initial")  # what is an initial value depends on when the query began
    assert [
        {name: value for name, value in row.asDict().items() if name not in without}
        for row in replayed.rows
    ] == [
        {name: value for name, value in row.asDict().items() if name not in without}
        for row in expected
    ]


# -- triggers -----------------------------------------------------------------------------------


def test_available_now_ends_under_steady_writes(scene: Scene) -> None:
    """What is written while it runs is the next run's."""

    def write(batch_id: int) -> None:
        put(scene.url, scene.bucket, f"w{batch_id}", b"1")
        put(scene.url, scene.bucket, "b", b"%d" % batch_id)

    play(
        scene,
        Create(-1),
        *(Put("a", str(i)) for i in range(1, 6)),
        Run({"includeHistory": True, "maxRowsPerTrigger": 2}, after=write),
        ExpectBatches((2, 2, 1)),
        ExpectRows(*(f"{i} PUT a={i} initial" for i in range(1, 6))),
    )
    written = bucket_state(scene.url, scene.bucket)["last_seq"]
    assert written > 5
    play(
        scene,
        Run({"includeHistory": True}),
        Do(lambda scene: check_revisions(scene, range(1, written + 1))),
        ExpectInitialThrough(5),
    )


def check_revisions(scene: Scene, revisions: range) -> None:
    assert [row.revision for row in scene.rows] == list(revisions)


@pytest.mark.parametrize("trigger", [{"processingTime": "100 milliseconds"}, {}], ids=str)
def test_processing_time_triggers(scene: Scene, trigger: dict[str, str]) -> None:
    play(
        scene,
        Create(),
        Put("a", "1"),
        Start({"maxRowsPerTrigger": 2}, trigger=trigger or {"processingTime": "0 seconds"}),
        Wait(rows=1),
        *(Put(f"b{i}", "1") for i in range(5)),
        Wait(rows=6),
        Stop(),
        Do(lambda scene: check_revisions(scene, range(1, 7))),
    )
    assert max(map(len, scene.batches.values())) <= 2


# -- a sink that does not read everything -------------------------------------------------------


def test_sink_reads_part(scene: Scene) -> None:
    """A task that is ended early leaves no consumer, and the next read is whole."""
    seen: list[tuple[bool, int, int]] = []

    def sink(batch: DataFrame, batch_id: int) -> None:
        seen.append((batch.isEmpty(), len(batch.take(3)), batch.count()))

    create_bucket(scene.url, scene.bucket)
    put_many(scene.url, scene.bucket, ((f"k{i}", b"x" * 200) for i in range(60_000)))
    play(scene, Start(trigger={"availableNow": True}, sink=sink))
    assert scene.query is not None
    assert scene.query.awaitTermination(60)
    assert seen == [(False, 3, 60_000)]
    play(
        scene,
        Do(lambda scene: wait_until(lambda: no_consumers(scene), "no consumers", deadline=600)),
    )


def no_consumers(scene: Scene) -> bool:
    return consumers(scene.url, scene.bucket) == []


# -- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["between", "before"])
@pytest.mark.parametrize(
    ("keys", "count"),
    [(None, 45), ("a.*", 15), ("a.*,b.*", 30)],
    ids=["all keys", "a pattern", "two patterns"],
)
def test_limit_counts_rows_not_sequences(
    scene: Scene, keys: str | None, count: int, place: str
) -> None:
    """A bucket that is mostly holes: 45 keys that stay, and 1,800 overwrites of them or others.

    How few micro-batches it takes hangs on how fast the machine counts: see ``test_batch_limits``.
    """
    create_bucket(scene.url, scene.bucket)
    kept = [f"{'abc'[i % 3]}.{i}" for i in range(45)]
    if place == "between":
        entries = [(key, b"1") for one in kept for key in [one, *["c.2"] * 40]]
    else:
        entries = [(key, b"1") for _ in range(40) for key in kept]
    put_many(scene.url, scene.bucket, entries)
    state = bucket_state(scene.url, scene.bucket)
    assert (state["messages"], state["last_seq"]) == (45, len(entries))
    limit = 10
    options: dict[str, Any] = {"maxRowsPerTrigger": limit} | ({"keys": keys} if keys else {})
    play(scene, Run(options))
    sizes = [len(rows) for rows in scene.batches.values()]
    assert len(scene.rows) == count
    assert max(sizes) <= limit


def test_initial_values_of_bucket_with_history_are_one_batch(scene: Scene) -> None:
    """They cannot be cut; what comes after them can."""
    play(
        scene,
        Create(5),
        *(Put(f"k{i}", "1") for i in range(5)),
        Run({"maxRowsPerTrigger": 2}),
        ExpectBatches((5,)),
        *(Put("k0", str(i)) for i in range(3)),
        Run({"maxRowsPerTrigger": 2}),
        ExpectBatches((5, 2, 1)),
    )


@dataclass(frozen=True)
class Crash:
    """A query that is killed in micro-batch ``block_on``, and its continuation.

    Attributes:
        options, then_options: of the source before and after.
        block_on: the micro-batch that is read and not committed.
        before: what the bucket holds when the query starts; ``during``: what is written when its
            first micro-batch is through; ``later``: what is written after the crash.
        rows: all that the restarted query delivers.
    """

    options: dict[str, str]
    block_on: int
    rows: tuple[str, ...]
    during: tuple[str, ...] = ()
    then_options: dict[str, str] | None = None
    before: tuple[str, ...] = ("a", "b", "a", "c", "b")
    later: tuple[str, ...] = ("d", "a")


LATER_ROWS = ("6 PUT d=6", "7 PUT a=7")

CRASHES = {
    "first": Crash(
        {},
        0,
        (
            "3 PUT a=3 initial",
            "4 PUT c=4 initial",
            "5 PUT b=5 initial",
            "6 PUT d=6",
            "7 PUT e=7",
        ),
        later=("d", "e"),
    ),
    "later": Crash(
        {"includeHistory": "true"},
        1,
        ("6 PUT x=6", "7 PUT a=7", "8 PUT d=8", "9 PUT a=9"),
        during=("x", "a"),
    ),
    # The new initial offset is 7, the logged one 5: what is between must come.
    "updates": Crash({"updatesOnly": "true"}, 0, LATER_ROWS),
    # As an updatesOnly query whose first range, (2, 5], was logged: the new initial offset is 7.
    "updates, logged": Crash(
        {"startSequence": "3"},
        0,
        ("3 PUT a=3 initial", "4 PUT c=4 initial", "5 PUT b=5 initial", *LATER_ROWS),
        then_options={"updatesOnly": "true"},
    ),
}


@pytest.fixture(scope="module")
def crashed(
    shared_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[str, Path]]:
    """One driver with all queries of CRASHES, killed; each one's bucket and directory."""
    root = tmp_path_factory.mktemp("crash")
    url = shared_server.url
    places = {name: (f"crash{i}", root / str(i)) for i, name in enumerate(CRASHES)}
    for name, (bucket, directory) in places.items():
        directory.mkdir()
        create_bucket(url, bucket, history=10)
        put_numbered(url, bucket, CRASHES[name].before)
    queries = [
        {
            "format": "nats_kv",
            "options": {"bucket": bucket, **CRASHES[name].options},
            "directory": str(directory),
            "streaming": True,
            "point": "written",
            "batch": CRASHES[name].block_on,
        }
        for name, (bucket, directory) in places.items()
    ]
    request = root / "request.json"
    asked = {"servers": url, "hides_formats": True, "queries": queries}
    with stopping_driver(request, **asked) as process:

        def alive() -> None:
            assert process.poll() is None, request.with_suffix(".log").read_text()[-3000:]

        for name, (bucket, directory) in places.items():
            if CRASHES[name].during:
                committed = directory / "checkpoint" / "commits" / "0"
                wait_until(
                    committed.exists,
                    f"the first micro-batch of {name!r}",
                    alive=alive,
                    deadline=600,
                )
                put_numbered(url, bucket, CRASHES[name].during)
            read = (directory / "at").exists
            wait_until(read, f"the micro-batch of {name!r} to be read", alive=alive, deadline=600)
    for name, (_, directory) in places.items():
        assert not (directory / "checkpoint" / "commits" / str(CRASHES[name].block_on)).exists()
    return places


def put_numbered(url: str, bucket: str, keys: tuple[str, ...]) -> None:
    for key in keys:
        put(url, bucket, key, b"%d" % (bucket_state(url, bucket)["last_seq"] + 1))


@pytest.mark.parametrize("name", CRASHES)
def test_driver_is_killed(
    spark: SparkSession, shared_server: NatsServer, crashed: dict[str, tuple[str, Path]], name: str
) -> None:
    """The micro-batch that was read and not committed is repeated with the same rows."""
    crash = CRASHES[name]
    bucket, directory = crashed[name]
    put_numbered(shared_server.url, bucket, crash.later)
    scene = Scene(spark, shared_server, bucket, directory)
    play(
        scene,
        Run(crash.options if crash.then_options is None else crash.then_options),
        ExpectRows(*crash.rows),
    )
    again = [[row.revision, row.value.decode()] for row in scene.batches[crash.block_on]]
    assert again == stored_rows(directory, str(crash.block_on))


@pytest.mark.spark  # beside those that need the same killed driver
def test_register_where_spark_finds_nothing_by_itself(crashed: dict[str, tuple[str, Path]]) -> None:
    """The killed driver's Spark did not find the format, and had it after ``register``."""
    (directory,) = {directory.parent for _, directory in crashed.values()}
    assert "[DATA_SOURCE_NOT_FOUND]" in (directory / "lookup").read_text()
