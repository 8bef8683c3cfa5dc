"""Streaming reads of ``nats_stream`` in Spark, and the scenarios that it shares with ``nats_kv``.

What the planner and the reader show without Spark stands in ``tests/integration/spark/reading``.
"""

from __future__ import annotations

import pytest

from tests.support.spark.scenario import (
    STREAM,
    Create,
    CreateOther,
    Do,
    Erase,
    ExpectNoConsumers,
    ExpectRows,
    ExpectState,
    PutMany,
    Run,
    Scene,
    Start,
    Stop,
    Wait,
    play,
)
from tests.support.spark.shared_scenarios import OF_ONE_STREAM, SHARED


@pytest.fixture
def scene(scene: Scene) -> Scene:
    """A scene of a stream."""
    scene.format = STREAM
    return scene


@pytest.fixture
def own_scene(own_scene: Scene) -> Scene:
    own_scene.format = STREAM
    return own_scene


@pytest.mark.parametrize("name", SHARED)
def test_shared(scene: Scene, name: str) -> None:
    """Buckets have the same cases in scenarios of their own; ``make test-spark`` plays both."""
    play(scene, *SHARED[name](scene))


@pytest.mark.parametrize("name", [name for name in SHARED if name not in OF_ONE_STREAM])
def test_shared_with_several_streams(scene: Scene, name: str) -> None:
    play(scene, CreateOther(), *SHARED[name](scene))


def test_last_of_each_subject_then_everything(scene: Scene) -> None:
    """The first micro-batch is the last messages, whatever the limit; then nothing is left out."""
    options = {"deliverPolicy": "last_per_subject", "maxRowsPerTrigger": 2}
    play(
        scene,
        Create(),
        PutMany(9, keys=3),
        Start(options),
        Wait(rows=3),
        PutMany(4, keys=2),
        Wait(rows=7),
        Stop(),
        ExpectRows("7 k0=6", "8 k1=7", "9 k2=8", "10 k0=0", "11 k1=1", "12 k0=2", "13 k1=3"),
        Do(lambda scene: _first_batch(scene, 3)),
        ExpectNoConsumers(),
    )


def _first_batch(scene: Scene, rows: int) -> None:
    assert len(scene.batches[0]) == rows


def test_stream_with_holes_by_looked_up_subject(scene: Scene) -> None:
    """Deleted messages are nowhere: not in the rows, not in the limit, not in the splits."""
    kept = [seq for seq in range(1, 61) if seq % 3 == 0]
    options = {
        "stream": None,
        "subject": f"{scene.bucket}.>",
        "maxRowsPerTrigger": 8,
        "minPartitions": 2,
        "headersOnly": True,
    }
    play(
        scene,
        Create(),
        PutMany(60, keys=60),
        Erase(tuple(seq for seq in range(1, 61) if seq % 3)),
        ExpectState({"messages": 20, "last_seq": 60}),
        Run(options),
        ExpectRows(*(f"{seq} k{seq - 1}" for seq in kept)),
        Do(lambda scene: _at_most(scene, 8)),
    )


def _at_most(scene: Scene, rows: int) -> None:
    sizes = [len(batch) for batch in scene.batches.values() if batch]
    assert max(sizes) <= rows
    assert len(sizes) > 1
