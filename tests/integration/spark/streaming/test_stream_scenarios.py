"""Streaming reads of ``nats_stream`` in Spark, and the scenarios that it shares with ``nats_kv``.

What the planner and the reader show without Spark stands in ``tests/integration/spark/reading``.
"""

from __future__ import annotations

import pytest

from tests.support.spark.scenario import STREAM, CreateOther, Scene, play
from tests.support.spark.shared_scenarios import OF_ONE_STREAM, SHARED


@pytest.fixture
def scene(scene: Scene) -> Scene:
    """A scene of a stream."""
    scene.format = STREAM
    return scene


@pytest.mark.parametrize("name", SHARED)
def test_shared(scene: Scene, name: str) -> None:
    """Buckets have the same cases in scenarios of their own; ``make test-spark`` plays both."""
    play(scene, *SHARED[name](scene))


@pytest.mark.parametrize("name", [name for name in SHARED if name not in OF_ONE_STREAM])
def test_shared_with_several_streams(scene: Scene, name: str) -> None:
    play(scene, CreateOther(), *SHARED[name](scene))
