"""Several tasks in one micro-batch read every row once; a query waits for a minimum of rows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import spark_partition_id

from nats_stream_source.embedded import NatsServer
from tests.support.nats.buckets import bucket_state, create_bucket, put_many
from tests.support.spark.scenario import DEADLINE, ExpectNoConsumers, Run, Scene, Start, play
from tests.support.spark.streaming_query import begin, run_to_the_end
from tests.support.wait import wait_until


class Tasks:
    """A sink that keeps each micro-batch's rows by the task that read them."""

    def __init__(self) -> None:
        self.batches: list[list[list[int]]] = []

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        tasks: list[list[int]] = [[] for _ in range(batch.rdd.getNumPartitions())]
        for row in batch.select(spark_partition_id().alias("task"), "revision").collect():
            tasks[row.task].append(row.revision)
        self.batches.append(tasks)

    @property
    def revisions(self) -> list[int]:
        return [revision for tasks in self.batches for task in tasks for revision in task]


def run(scene: Scene, **options: Any) -> Tasks:
    """All that there is, with ``Trigger.AvailableNow``."""
    tasks = Tasks()
    play(scene, Start(options, trigger={"availableNow": True}, sink=tasks))
    assert scene.query is not None
    assert scene.query.awaitTermination(int(DEADLINE))
    scene.close()
    return tasks


def fill(scene: Scene) -> list[int]:
    """3,000 entries that are left of 30,000; their revisions."""
    create_bucket(scene.url, scene.bucket)
    keys = [f"{'ab'[i % 2]}.{i}" for i in range(3000)]
    put_many(scene.url, scene.bucket, [(key, b"%032d" % i) for i, key in enumerate(keys)])
    rewritten = [(keys[i * 7919 % 1500], b"again") for i in range(27_000)]
    put_many(scene.url, scene.bucket, rewritten)
    last = {key: i for i, key in enumerate([*keys, *(key for key, _ in rewritten)], start=1)}
    assert bucket_state(scene.url, scene.bucket)["messages"] == 3000
    return sorted(last.values())


@pytest.mark.parametrize("keys", [None, "a.*"])
def test_rows_are_read_once_and_in_order(scene: Scene, keys: str | None) -> None:
    expected = fill(scene)
    options: dict[str, Any] = {"minPartitions": 5} | ({"keys": keys} if keys else {})
    tasks = run(scene, **options)
    (batch,) = [batch for batch in tasks.batches if any(batch)]
    assert len(batch) == 5
    if keys is None:
        assert tasks.revisions == expected  # in order across the tasks, too
    else:
        assert len(tasks.revisions) == 1500
        assert tasks.revisions == sorted(tasks.revisions)
        assert set(tasks.revisions) < set(expected)
    play(scene, ExpectNoConsumers())


def test_limits_and_splits_with_restart(scene: Scene) -> None:
    expected = fill(scene)
    options: dict[str, Any] = {
        "maxRowsPerTrigger": 1000,
        "maxBytesPerTrigger": "48k",
        "minPartitions": 3,
    }
    state = bucket_state(scene.url, scene.bucket)
    most = (48 << 10) * state["messages"] // state["bytes"]
    assert most < 1000  # the limit in bytes is the smaller one
    play(scene, Start(options, trigger={"availableNow": True}, fail_on_batch=1))
    assert scene.query is not None
    with pytest.raises(StreamingQueryException, match="the sink fails on micro-batch 1"):
        scene.query.awaitTermination(int(DEADLINE))
    scene.close()
    assert len(scene.attempts) == 2
    play(scene, Run(options))
    assert [row.revision for row in scene.rows] == expected
    sizes = [len(rows) for rows in scene.batches.values()]
    assert max(sizes) <= most
    assert len(sizes) <= 3000 / (0.8 * most) + 1
    play(scene, ExpectNoConsumers())


def test_micro_batches_wait_for_rows(
    spark: SparkSession, shared_server: NatsServer, tmp_path: Path
) -> None:
    url, sizes = shared_server.url, list[int]()
    create_bucket(url, "min_rows", 64)
    put_many(url, "min_rows", [("a", b"0")])
    rows = (
        spark.readStream.format("nats_kv")
        .options(servers=url, bucket="min_rows", includeHistory=True, minRowsPerTrigger=10)
        .load()
    )
    writer = rows.writeStream.foreachBatch(lambda batch, _: sizes.append(batch.count()))
    writer = writer.option("checkpointLocation", str(tmp_path))
    query = begin(writer.start)
    try:
        wait_until(lambda: sizes == [1], "the first micro-batch")
        put_many(url, "min_rows", [("a", b"%d" % number) for number in range(9)])
        # Spark polls many times meanwhile.
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            assert sizes == [1]
            time.sleep(0.05)
        put_many(url, "min_rows", [("a", b"9")])
        wait_until(lambda: sizes == [1, 10], "the second micro-batch")
        wait_until((tmp_path / "commits" / "1").exists, "its commit")
    finally:
        query.stop()
    put_many(url, "min_rows", [("a", b"10")])
    run_to_the_end(writer.trigger(availableNow=True).start)
    assert sizes == [1, 10, 1]
