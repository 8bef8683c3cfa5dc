"""Speculative execution on a standalone cluster: two attempts of one task write the same rows.

The first attempt of a task stops when a part of its rows is stored. Spark starts a second
attempt on the other worker, which writes all rows of the task; then Spark kills the first one.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession

from nats_stream_source.embedded import NatsServer
from tests.support.nats.streams import stream_state
from tests.support.query_driver.batch import read_batch
from tests.support.spark.scenario import KV, STREAM
from tests.support.wait import wait_until

# What runs in a task is pickled as it is: workers do not import tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [
    pytest.mark.sparks,
    pytest.mark.skipif(
        os.environ.get("SPARK_PLACE") != "standalone", reason="`make test-spark SPARKS=standalone`"
    ),
]

ROWS, PARTITIONS, STRAGGLER = 2000, 4, 3
SIZE = 4000  # of a value: Python hands rows to Spark by 64 KiB
DEADLINE = 300.0

TARGETS = {
    KV: {"bucket": "spec", "ifMissing": "create", "history": "10"},
    STREAM: {"stream": "SPEC", "ifMissing": "create", "subjects": "spec.>"},
}
STREAMS = {KV: "KV_spec", STREAM: "SPEC"}
COLUMNS = {
    KV: ("concat('k', id) AS key", "value"),
    STREAM: ("concat('spec.', id) AS subject", "data"),
}


@pytest.fixture
def speculating(spark: SparkSession) -> Iterator[SparkSession]:
    """The session, in which a task is slow that takes longer than another one.

    Spark reads the multiplier for each stage, and the other settings once.
    """
    conf, name = spark.sparkContext._jsc.sc().conf(), "spark.speculation.multiplier"
    before = conf.get(name)
    conf.set(name, "1.1")
    session = spark.newSession()
    session.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
    yield session
    conf.set(name, before)


def straggling(directory: Path) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What precedes the sink.

    The first attempt of the straggler passes a part of its rows on, and then stops. The next
    one begins when the test allows it.
    """
    place, straggler, deadline = str(directory), STRAGGLER, DEADLINE

    def wait_for(name: str) -> None:
        end = time.monotonic() + deadline
        while not (Path(place) / name).exists():
            assert time.monotonic() < end, f"nobody said {name}"
            time.sleep(0.02)

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        slow, attempt = context.partitionId() == straggler, context.attemptNumber()
        for number, batch in enumerate(batches):
            if slow and attempt == 0 and number == 3:
                wait_for("over")
                raise RuntimeError("the task was let go, to end")
            if slow and attempt > 0 and number == 0:
                (Path(place) / f"attempt-{attempt}").touch()
                wait_for("go")
            yield batch

    return work


def attempts(spark: SparkSession) -> list[tuple[int, bool, str]]:
    """Attempt, whether it is speculative, and status of each task of the straggler's partition."""
    store = spark.sparkContext._jsc.sc().statusStore()
    stage = store.lastStageAttempt(_last_stage(spark))
    tasks = store.taskList(stage.stageId(), stage.attemptId(), 1000)
    some = [tasks.apply(i) for i in range(tasks.size())]
    return sorted(
        (task.attempt(), task.speculative(), task.status())
        for task in some
        if task.index() == STRAGGLER
    )


def _last_stage(spark: SparkSession) -> int:
    """The stage of the last job, by Spark's status."""
    tracker = spark.sparkContext.statusTracker()
    job = tracker.getJobInfo(max(tracker.getJobIdsForGroup()))
    assert job is not None
    return max(job.stageIds)


@pytest.mark.parametrize("message_id", ["auto", "none"])
@pytest.mark.parametrize("kind", [KV, STREAM])
def test_speculative_attempt_wins(
    speculating: SparkSession, nats_server: NatsServer, tmp_path: Path, kind: str, message_id: str
) -> None:
    """With ids each row is stored once; without, at least once, each with its value."""
    spark, url, stream = speculating, nats_server.url, STREAMS[kind]
    directory = tmp_path / "attempts"
    directory.mkdir()
    others = ROWS - ROWS // PARTITIONS

    def messages() -> int:
        return int(stream_state(url, stream)["messages"])

    def let_go() -> int:
        """The second attempt begins to write when the first one has rows in the stream."""
        second = directory / "attempt-1"
        wait_until(second.exists, "a speculative attempt", deadline=DEADLINE)
        wait_until(lambda: messages() > others, "rows of the first attempt", deadline=DEADLINE)
        before = messages()
        (directory / "go").touch()
        return before

    name, value = COLUMNS[kind]
    numbers = spark.range(0, ROWS, numPartitions=PARTITIONS)
    frame = numbers.selectExpr(name, f"rpad(CAST(id AS STRING), {SIZE}, ' ') AS {value}")
    writer = frame.mapInArrow(straggling(directory), frame.schema).write.format(kind)
    writer = writer.options(servers=url, messageId=message_id, **TARGETS[kind]).mode("append")
    with ThreadPoolExecutor(1) as pool:
        letting_go = pool.submit(let_go)
        try:
            writer.save()
        finally:
            (directory / "over").touch()
        before = letting_go.result()

    (first, second) = attempts(spark)
    assert first[:2] == (0, False)
    assert second == (1, True, "SUCCESS")
    repeated = before - others
    assert repeated > 0
    found = read_batch(url, stream=stream)
    copies = Counter((row["subject"].rpartition(".")[2], row["data"]) for row in found)
    prefix = "k" if kind == KV else ""
    assert set(copies) == {
        (f"{prefix}{n}", b"%d" % n + b" " * (SIZE - len(str(n)))) for n in range(ROWS)
    }
    if message_id == "auto":
        assert max(copies.values()) == 1
    else:
        assert len(found) >= ROWS + repeated
        assert max(copies.values()) == 2
