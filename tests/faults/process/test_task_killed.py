"""Spark itself kills a task in the middle of its split and runs it again: each row comes once.

What follows the source in a task (``mapInArrow``) stops at a split's first rows until the
task is killed. The split holds much more than fits between there and the server, which still has
the reader's consumer then. ``SparkContext.killTaskAttempt`` kills two attempts, one with its thread
interrupted and one without, and Spark's own record shows it. Each row has the attempt that read it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext, cloudpickle
from pyspark.sql import DataFrame, Row as RowOfSpark, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from nats_stream_source.embedded import NatsServer
from tests.support.leak_check import consumers
from tests.support.recorded_stream import RecordedStream, Row
from tests.support.spark.blocked_task import PER_SPLIT, SIZE, BlockedTask, Work, session
from tests.support.spark.streaming_query import run_to_the_end
from tests.support.wait import wait_until

pytestmark = pytest.mark.faults

KILLED = (True, False)
"""By attempt: whether its thread is interrupted. The one after these comes to its end."""

UNHEARD = 120.0
"""Seconds for consumers of readers that were killed (-9); the server waits a minute for them."""

COLUMNS = "seq long, key string, value string, padding int, split int, attempt int"

# What runs in a task is pickled as it is: workers do not import tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@dataclass(frozen=True)
class Read:
    """A query or batch, and its splits, of which the first one's task is killed."""

    kind: str
    splits: int = 1
    streaming: bool = True
    options: dict[str, str] = field(default_factory=dict)

    def load(self, spark: SparkSession, recorded: RecordedStream) -> DataFrame:
        splits = {"minPartitions": str(self.splits)} if self.splits > 1 else {}
        given = {**recorded.options(recorded.url), **splits, **self.options}
        begun = spark.readStream if self.streaming else spark.read
        return begun.format("nats_kv" if recorded.is_kv else "nats_stream").options(**given).load()


QUERIES = {
    "kv with history": Read("kv", splits=2),
    "kv, current values": Read("kv current"),
    "stream": Read("stream", splits=3),
}
BATCHES = {
    "kv, current values": Read("kv current", streaming=False),
    "kv, as of": Read("kv current", streaming=False, options={"asOfSequence": str(PER_SPLIT)}),
    "stream": Read("stream", splits=3, streaming=False),
}


# -- in a task ----------------------------------------------------------------------------------


def shows(before: Work) -> Work:
    """Makes :data:`COLUMNS` of what ``before`` passes on."""

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        for batch in before(batches):
            yield shown(batch, context.partitionId(), context.attemptNumber())

    return work


def shown(batch: pa.RecordBatch, split: int, attempt: int) -> pa.RecordBatch:
    """What is compared of either format's rows; of a value's padding, its length."""
    names = ("revision", "key", "value")
    if "revision" not in batch.schema.names:
        names = ("sequence", "subject", "data")
    seqs, keys, values = (batch.column(name).to_pylist() for name in names)
    bare = [value.rstrip(b"x") for value in values]
    return pa.RecordBatch.from_pydict(
        {
            "seq": pa.array(seqs, pa.int64()),
            "key": [key.rpartition(".")[2] for key in keys],
            "value": [value.decode() for value in bare],
            "padding": pa.array(
                [len(a) - len(b) for a, b in zip(values, bare, strict=True)], pa.int32()
            ),
            "split": pa.array([split] * len(seqs), pa.int32()),
            "attempt": pa.array([attempt] * len(seqs), pa.int32()),
        }
    )


# -- beside it ----------------------------------------------------------------------------------


@dataclass
class Killer:
    """Runs what reads, and kills its tasks meanwhile."""

    spark: SparkSession
    server: NatsServer
    stands: BlockedTask

    def behind(self, source: DataFrame) -> DataFrame:
        """The rows of a source whose tasks stop until they are killed."""
        return source.mapInArrow(shows(self.stands.work), COLUMNS)

    def around(self, read: Callable[[], list[RowOfSpark]]) -> list[RowOfSpark]:
        """What ``read`` gives, whose task is killed twice before that."""
        with ThreadPoolExecutor(1) as pool:
            run = pool.submit(read)
            try:
                known: set[str] = set()
                for attempt, interrupt in enumerate(KILLED):
                    known |= self._kill(run, attempt, interrupt, known)
            finally:
                self.stands.over()  # or else a failing test waits for ever
            return run.result()

    def _kill(self, run: Future[Any], attempt: int, interrupt: bool, known: set[str]) -> set[str]:
        """Kill an attempt once it has stopped; the consumers that are not ``known``."""

        def running() -> None:
            if run.done():
                run.result()
                raise AssertionError("it is through, and an attempt was not killed")

        self.stands.arrived(self.spark, attempt, running)
        new: set[str] = set()

        def in_the_middle() -> bool:
            # A consumer that is being made anew may not be there yet.
            new.update(set(consumers(self.server)) - known)
            return bool(new)

        wait_until(
            in_the_middle,
            "the attempt has a consumer: not all is read already",
            alive=running,
            deadline=600,
        )
        self.stands.kill(self.spark, attempt, interrupt, running)
        return new


@pytest.fixture
def killer(spark: SparkSession, nats_server: NatsServer, tmp_path: Path) -> Killer:
    return Killer(session(spark), nats_server, BlockedTask(tmp_path / "tasks", len(KILLED)))


def written(server: NatsServer, read: Read) -> RecordedStream:
    """What is read; a bucket keeps more than one revision, of which a list of last values goes."""
    recorded = RecordedStream(read.kind, server.url).create()
    recorded.write(PER_SPLIT * read.splits, SIZE)
    return recorded


def check(recorded: RecordedStream, read: Read, found: list[RowOfSpark]) -> None:
    """All rows, once and in order, and those of the first split by the attempt that lived."""
    recorded.check([Row(r.seq, r.key, r.value.encode() + b"x" * r.padding) for r in found])
    first = [row for row in found if row.seq <= PER_SPLIT * read.splits]
    attempts = {(row.split, row.attempt) for row in first}
    assert attempts == {(split, 0 if split else len(KILLED)) for split in range(read.splits)}


@pytest.mark.parametrize("name", BATCHES)
def test_batch_task_killed(killer: Killer, name: str) -> None:
    read = BATCHES[name]
    recorded = written(killer.server, read)
    rows = killer.behind(read.load(killer.spark, recorded))
    check(recorded, read, killer.around(rows.collect))
    wait_until(lambda: not consumers(killer.server), "no consumer is left", deadline=UNHEARD)


@pytest.mark.parametrize("name", QUERIES)
def test_query_task_killed(killer: Killer, tmp_path: Path, name: str) -> None:
    """A task of the first micro-batch is killed; the next run resumes after that micro-batch."""
    read = QUERIES[name]
    recorded = written(killer.server, read)
    found: list[RowOfSpark] = []

    def start() -> StreamingQuery:
        return (
            killer.behind(read.load(killer.spark, recorded))
            .writeStream.foreachBatch(lambda batch, _: found.extend(batch.collect()))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )

    def run() -> list[RowOfSpark]:
        run_to_the_end(start)
        return found

    check(recorded, read, killer.around(run))
    recorded.write(100)
    check(recorded, read, run())
    wait_until(lambda: not consumers(killer.server), "no consumer is left", deadline=UNHEARD)
