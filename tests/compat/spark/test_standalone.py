"""A standalone cluster: where the package comes from there, and a worker that is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

import nats_stream_source
from tests.support.spark.scenario import ALL, Create, PutMany, Scene, play, read
from tests.support.wait import wait_until

pytestmark = [
    pytest.mark.sparks,
    pytest.mark.skipif(
        os.environ.get("SPARK_PLACE") != "standalone", reason="`make test-spark SPARKS=standalone`"
    ),
]


def test_package_comes_from_archive(spark: SparkSession) -> None:
    """On the driver and on the workers, or the other tests would show nothing about shipping."""

    def where(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import nats_stream_source

        for _ in batches:
            yield pa.RecordBatch.from_pydict({"file": [nats_stream_source.__file__]})

    (row,) = spark.range(1).mapInArrow(where, "file STRING").collect()
    for file in (nats_stream_source.__file__, row.file):
        assert "nats_stream_source.zip/nats_stream_source/" in file


def test_worker_killed_while_query_runs(scene: Scene, tmp_path: Path) -> None:
    """Its task runs again on the other worker, and every row comes once.

    Last in this place: afterwards the cluster has one worker less.
    """
    ran, go = tmp_path / "ran", tmp_path / "go"
    ran.mkdir()

    def hold(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Report where the task runs, yield its first rows, and wait for the test."""
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        name = f"{context.taskAttemptId()}-{context.partitionId()}"
        for batch in batches:
            (ran / name).write_text(os.getcwd())
            deadline = time.monotonic() + 300
            while not go.exists():
                assert time.monotonic() < deadline, "nobody said go"
                time.sleep(0.02)
            yield batch

    def collect(batch: DataFrame, batch_id: int) -> None:
        scene.attempts.append((batch_id, batch.collect()))

    play(scene, Create(history=64), PutMany(2000, keys=40))
    frame = read(scene, {**ALL[scene.format], "minPartitions": 2})
    scene.query = (
        frame.mapInArrow(hold, frame.schema)
        .writeStream.foreachBatch(collect)
        .trigger(availableNow=True)
        .option("checkpointLocation", str(scene.checkpoint))
        .start()
    )

    def alive() -> None:
        assert scene.query is not None
        if (error := scene.query.exception()) is not None:
            raise error

    wait_until(
        lambda: len(list(ran.iterdir())) == 2, "a task on each worker", alive=alive, deadline=600
    )
    places = [Path(file.read_text()).parts for file in ran.iterdir()]
    workers = dict(pair.split("=") for pair in os.environ["SPARK_WORKERS"].split(","))
    assert sorted(name for place in places for name in place if name in workers) == sorted(workers)
    name, group = next(iter(workers.items()))
    os.killpg(int(group), signal.SIGKILL)
    go.touch()
    wait_until(
        lambda: scene.query is None or not scene.query.isActive,
        "the end of the query",
        deadline=600,
    )
    alive()

    assert [row.revision for row in scene.rows] == list(range(1, 2001))
    attempts = [(file.name.partition("-")[2], file.read_text()) for file in ran.iterdir()]
    (again,) = (split for split, place in attempts if name in Path(place).parts)
    assert [name in Path(place).parts for split, place in sorted(attempts) if split == again].count(
        False
    ) == 1
