"""What both formats do wherever Spark runs: each supported version, a cluster, Spark Connect."""

from __future__ import annotations

import itertools

import pytest
from tenacity import retry, retry_if_exception, stop_after_attempt

from nats_stream_source.spark.compat import ADMISSION_CONTROL
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
