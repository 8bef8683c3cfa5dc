"""Reading and writing wherever Spark runs: each supported version, a cluster, Spark Connect."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from tenacity import retry, retry_if_exception, stop_after_attempt

from nats_stream_source.embedded import NatsServer
from nats_stream_source.spark.session import ADMISSION_CONTROL
from tests.support.nats.buckets import create_bucket, put_many
from tests.support.nats.streams import stream_state
from tests.support.spark.scenario import (
    ALL,
    KV,
    STREAM,
    Action,
    Create,
    CreateOther,
    ExpectError,
    Put,
    PutMany,
    Run,
    Scene,
    play,
    shown,
)
from tests.support.spark.shared_scenarios import NEEDS_LIMITS, OF_ONE_STREAM, SHARED

pytestmark = [pytest.mark.sparks]


@pytest.fixture(params=[KV, STREAM])
def scene(scene: Scene, request: pytest.FixtureRequest) -> Scene:
    """A scene of either format."""
    scene.format = request.param
    return scene


@pytest.mark.parametrize(
    "name", [name for name in SHARED if ADMISSION_CONTROL or name not in NEEDS_LIMITS]
)
def test_shared_scenarios(scene: Scene, name: str) -> None:
    play_shared(scene, name)


@pytest.mark.parametrize("name", ["write_and_expect", "crash", "recreate"])
def test_shared_scenarios_with_several_streams(scene: Scene, name: str) -> None:
    assert name not in NEEDS_LIMITS | OF_ONE_STREAM
    play_shared(scene, name, CreateOther())


def play_shared(scene: Scene, name: str, *before: Action) -> None:
    """Play a shared scenario, again where Spark could not start a Python process."""
    attempts = itertools.count()

    @retry(retry=retry_if_exception(spark_gave_up), stop=stop_after_attempt(4), reraise=True)
    def attempt() -> None:
        one = another(scene, next(attempts))
        try:
            play(one, *before, *(step for action in SHARED[name](one) for step in runs(action)))
        finally:
            one.close()

    attempt()


def spark_gave_up(error: BaseException) -> bool:
    """Spark gives a Python process ten seconds to start, on a busy machine too.

    Over Spark Connect, which starts two for each query, that is the usual failure there.
    """
    return "Python worker failed to connect back" in str(error)


def another(scene: Scene, number: int) -> Scene:
    """A scene like ``scene`` that nothing has happened in."""
    directory = scene.directory / str(number)
    directory.mkdir()
    name = f"{scene.bucket}-{number}"
    return type(scene)(scene.spark, scene.server, name, directory, format=scene.format)


def runs(action: Action) -> tuple[Action, ...]:
    """Before Spark 4.2, AvailableNow is one micro-batch: after a failure, the one that failed."""
    return (action, action) if isinstance(action, Run) and not ADMISSION_CONTROL else (action,)


@pytest.mark.skipif(ADMISSION_CONTROL, reason="this Spark keeps limits")
@pytest.mark.parametrize("option", ["maxRowsPerTrigger", "maxBytesPerTrigger"])
def test_limits_are_refused_where_spark_keeps_none(scene: Scene, option: str) -> None:
    play(
        scene,
        Create(),
        Put("a", "1"),
        ExpectError("OptionError", (option, "needs Spark 4.2"), Run({option: 10})),
    )


@pytest.mark.parametrize("name", ["now", "all", "until 3"])
def test_batch_reads(scene: Scene, name: str) -> None:
    """The current values, the whole history, and the values as of a sequence."""
    options, keys = {
        (KV, "now"): ({}, {4, 5}),
        (KV, "all"): (ALL[KV], {1, 2, 3, 4, 5}),
        (KV, "until 3"): ({"asOfSequence": 3}, {2, 3}),
        (STREAM, "now"): ({"deliverPolicy": "last_per_subject"}, {4, 5}),
        (STREAM, "all"): ({"minPartitions": 2}, {1, 2, 3, 4, 5}),
        (STREAM, "until 3"): ({"endSequence": 3}, {1, 2, 3}),
    }[scene.format, name]
    play(scene, Create(history=64), PutMany(5, keys=2))
    rows = scene.spark.read.format(scene.format).options(**scene.source, **options).load().collect()
    plain = sorted(shown(row).replace(" PUT", "").replace(" initial", "") for row in rows)
    assert plain == [f"{seq} k{(seq - 1) % 2}={seq - 1}" for seq in sorted(keys)]


ROWS = 200
TARGETS = {
    KV: {"bucket": "to_kv", "ifMissing": "create", "history": "10"},
    STREAM: {"stream": "TO_STREAM", "ifMissing": "create", "subjects": "out.>"},
}


def frame_for(kind: str, frame: DataFrame) -> DataFrame:
    """The columns that the format writes, from those of ``nats_kv``."""
    if kind == KV:
        return frame.select("key", "value", "operation")
    return frame.selectExpr("concat('out.', key) AS subject", "value AS data")


def stored(server: NatsServer, kind: str) -> int:
    name = "KV_to_kv" if kind == KV else "TO_STREAM"
    return int(stream_state(server.url, name)["messages"])


@pytest.fixture(params=[KV, STREAM])
def kind(request: pytest.FixtureRequest, nats_server: NatsServer) -> str:
    create_bucket(nats_server.url, "origin", 64)
    put_many(nats_server.url, "origin", [(f"k{i % 50}", b"%d" % i) for i in range(ROWS)])
    return str(request.param)


def test_batch_is_written(spark: SparkSession, nats_server: NatsServer, kind: str) -> None:
    servers = {"servers": nats_server.url}
    source = spark.read.format(KV).options(**servers, bucket="origin", includeHistory="true")
    writer = frame_for(kind, source.load()).write.format(kind).mode("append")
    writer.options(**servers, **TARGETS[kind]).save()
    assert stored(nats_server, kind) == ROWS


def test_micro_batch_written_twice(
    spark: SparkSession, nats_server: NatsServer, kind: str, tmp_path: Path
) -> None:
    servers: dict[str, Any] = {"servers": nats_server.url}
    source = spark.readStream.format(KV).options(**servers, bucket="origin", includeHistory="true")

    def run() -> None:
        query = (
            frame_for(kind, source.load())
            .writeStream.format(kind)
            .queryName("copy")
            .options(**servers, **TARGETS[kind], messageId="auto")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    run()
    assert stored(nats_server, kind) == ROWS
    commits = tmp_path / "checkpoint" / "commits"
    for path in [*commits.iterdir()]:
        path.unlink()
    run()
    assert (commits / "0").exists(), "the micro-batch came again"
    assert stored(nats_server, kind) == ROWS, "and each of its rows is stored once"
