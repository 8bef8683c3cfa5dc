"""What queries and batches leave behind in Spark: nothing on the server, nothing that grows.

Queries and batches of both formats, those that fail and one that is stopped in the middle among
them, one round of them after the other in one session, and then rounds of those that leave their
workers alive. Each leaves no consumer. After a round the server's connections are those that Python
workers keep for their next task, one each; this process and the workers have no more files, threads
and processes than after the first round. Spark ends workers that were idle for a minute: then no
connection is left.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from nats_stream_source.embedded import NatsServer
from tests.support.leak_check import DEADLINE, Held, connections, consumers
from tests.support.nats.buckets import api, create_bucket, publish
from tests.support.nats.streams import create_stream
from tests.support.spark.blocked_task import PER_SPLIT, SIZE, BlockedTask, session
from tests.support.spark.processes import connections_to, descendants, open_files
from tests.support.spark.streaming_query import begin, run_to_the_end
from tests.support.wait import wait_until

pytestmark = pytest.mark.faults

ROUNDS = 3
ROWS = 3000
"""In the bucket ``full`` and in the stream ``FULL``: more than is read without a consumer."""

UNHEARD = 120.0
"""Seconds for consumers of readers that were killed (-9); the server waits a minute for them."""

WORKERS = 4
"""Processes that may be there or not: two tasks at once, each with a worker that reads its rows and
one that works on them. Which of them a failed task has just ended hangs on the moment."""

KEPT = 4
"""Files of the connection that a worker keeps: its socket, a selector, and the loop's own pair."""

IDLE = 600.0
"""Seconds for Spark to end its workers, which it does when they were idle for one minute."""


@dataclass
class Place:
    """Where it all happens."""

    spark: SparkSession
    server: NatsServer
    directory: Path
    serial: Iterator[int] = field(default_factory=itertools.count)

    def load(self, kind: str, *, streaming: bool = False, **options: str) -> DataFrame:
        begun = self.spark.readStream if streaming else self.spark.read
        return begun.format(kind).options(servers=self.server.url, **options).load()

    def fresh(self) -> Path:
        return self.directory / str(next(self.serial))

    def make(self, stream: str, count: int, size: int = 10) -> None:
        if stream in (api(self.server.url, "STREAM.NAMES").get("streams") or []):
            api(self.server.url, f"STREAM.DELETE.{stream}")
        create_stream(self.server.url, stream, allow_direct=True)
        publish(self.server.url, ((f"{stream}.k{i}", bytes(size), None) for i in range(count)))

    def starts(
        self, rows: DataFrame, checkpoint: Path | None = None
    ) -> Callable[[], StreamingQuery]:
        """What starts a query up to the end of the stream; its rows are in the table ``left``.

        With ``checkpoint`` it resumes from there, and its rows are not kept.
        """

        def start() -> StreamingQuery:
            # Not foreachBatch, for which PySpark keeps a thread and a socket here for each query.
            return (
                rows.writeStream.format("noop" if checkpoint else "memory")
                .queryName("left")
                .option("checkpointLocation", str(checkpoint or self.fresh()))
                .trigger(availableNow=True)
                .start()
            )

        return start

    def count(self, rows: DataFrame) -> int:
        """How many rows a query delivers."""
        run_to_the_end(self.starts(rows))
        found = self.spark.table("left").count()
        self.spark.catalog.dropTempView("left")
        return found


# -- what happens -------------------------------------------------------------------------------


def a_query_with_several_splits(place: Place) -> None:
    rows = place.load("nats_stream", streaming=True, stream="FULL", minPartitions="4")
    assert place.count(rows) == ROWS


def a_query_of_all_revisions(place: Place) -> None:
    rows = place.load("nats_kv", streaming=True, bucket="full", includeHistory="true")
    assert place.count(rows) == ROWS


def a_query_of_current_values(place: Place) -> None:
    assert place.count(place.load("nats_kv", streaming=True, bucket="full")) == ROWS


def current_values(place: Place) -> None:
    assert place.load("nats_kv", bucket="full").count() == ROWS


def as_of(place: Place) -> None:
    rows = place.load("nats_kv", bucket="full", asOfSequence="2000")
    assert rows.count() == 2000


def a_range(place: Place) -> None:
    rows = place.load(
        "nats_stream", stream="FULL", startSequence="501", endSequence="2500", minPartitions="3"
    )
    assert rows.count() == 2000


def a_query_that_ends_early(place: Place) -> None:
    assert len(place.load("nats_stream", stream="FULL").take(10)) == 10


def another_stream_than_in_the_checkpoint(place: Place) -> None:
    """The planner reports it."""
    place.make("GONE", 100)
    rows, checkpoint = place.load("nats_stream", streaming=True, stream="GONE"), place.fresh()
    run_to_the_end(place.starts(rows, checkpoint))
    place.make("GONE", 100)
    with pytest.raises(PySparkException, match="DataLossError: "):
        run_to_the_end(place.starts(rows, checkpoint))


def messages_that_are_gone(place: Place) -> None:
    """The task reports it: what is made of one ``load()`` is planned once.

    In one split: the consumers of others would be those of tasks that Spark kills.
    """
    place.make("GONE", ROWS)
    rows = place.load("nats_stream", stream="GONE")
    assert rows.count() == ROWS
    api(place.server.url, "STREAM.PURGE.GONE", {"seq": 100})
    with pytest.raises(PySparkException, match="DataLossError: "):
        rows.count()


def a_query_that_is_stopped(place: Place) -> None:
    """In the middle of a split."""
    place.make("LARGE", PER_SPLIT, SIZE)
    rows, stands = (
        place.load("nats_stream", streaming=True, stream="LARGE"),
        BlockedTask(place.fresh()),
    )
    query = begin(place.starts(rows.mapInArrow(stands.work, rows.schema)))
    try:

        def alive() -> None:
            assert query.isActive, query.exception()

        stands.arrived(place.spark, 0, alive)
        # One that was just made anew may not be there yet.
        wait_until(
            lambda: consumers(place.server), "it is in the middle", alive=alive, deadline=600
        )
        query.stop()
        assert place.spark.table("left").count() == 0
    finally:
        stands.over()
        query.stop()


TROUBLE: tuple[Callable[[Place], None], ...] = (
    a_query_that_is_stopped,
    a_query_that_ends_early,
    another_stream_than_in_the_checkpoint,
    messages_that_are_gone,
)
"""What ends Python workers, and with them all that they may have left open."""

QUIET: tuple[Callable[[Place], None], ...] = (
    a_query_with_several_splits,
    a_query_of_all_revisions,
    a_query_of_current_values,
    current_values,
    as_of,
    a_range,
)
"""What the same workers do, time after time."""


# -- what is left -------------------------------------------------------------------------------


def settled(place: Place) -> None:
    """Wait until no connections are left but the workers', one each."""

    def found() -> tuple[int, dict[int, int]]:
        return connections(place.server), connections_to(place.server.port)

    def holds() -> bool:
        all_, by_process = found()
        return all_ == len(by_process) and set(by_process.values()) <= {1}

    wait_until(holds, "one connection a worker", seen=found, deadline=DEADLINE)


@dataclass(frozen=True)
class After:
    """Threads, files and memory after a round.

    Attributes:
        here: in this process.
        processes: below this one.
        files: of the worker that has most, without its connection's.
    """

    here: Held
    processes: int
    files: int

    @classmethod
    def now(cls, place: Place) -> After:
        # Looking for consumers takes connections, and the workers' were looked at.
        here = replace(Held.now(place.server), connections=0)
        kept = connections_to(place.server.port)
        files = (count - KEPT * kept.get(pid, 0) for pid, count in open_files().items())
        return cls(here, len(descendants()), max(files))

    def more(self, than: After) -> list[object]:
        """What has grown; a worker that is new keeps what it needs for its next task."""
        found: list[object] = [self.here.more(than.here)]
        found.append(max(0, self.processes - than.processes - WORKERS))
        found.append(max(0, self.files - than.files - ROUNDS))
        return [one for one in found if one]


def test_query_leaves_no_resources(
    spark: SparkSession, nats_server: NatsServer, tmp_path: Path
) -> None:
    place = Place(session(spark), nats_server, tmp_path)
    place.make("FULL", ROWS, 1000)
    create_bucket(nats_server.url, "full", history=2)
    publish(nats_server.url, ((f"$KV.full.k{i}", bytes(1000), None) for i in range(ROWS)))
    first = None
    for scenarios in (*[TROUBLE + QUIET] * ROUNDS, *[QUIET] * ROUNDS):
        for scenario in scenarios:
            scenario(place)
            place.spark.catalog.dropTempView("left")
            # Less than a minute, after which the server removes what a reader has left behind: that
            # is all that a reader can count on that is killed.
            stopped = scenario is a_query_that_is_stopped
            wait_until(
                lambda: not consumers(nats_server),
                f"{scenario.__name__} leaves no consumer",
                seen=lambda: consumers(nats_server),
                deadline=UNHEARD if stopped else DEADLINE,
            )
        settled(place)
        if first is None:
            first = After.now(place)
    assert first is not None
    wait_until(
        lambda: not After.now(place).more(first),
        "no more than after the first round",
        seen=lambda: After.now(place).more(first),
        deadline=DEADLINE,
    )
    wait_until(
        lambda: not connections(nats_server),
        "no connection is left",
        seen=lambda: connections_to(nats_server.port),
        deadline=IDLE,
    )
    assert not connections_to(nats_server.port)
