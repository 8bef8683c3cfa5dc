"""Garbage collection in workers."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from pyspark import TaskContext

from nats_stream_source.spark import tasks
from nats_stream_source.spark.tasks import exempt_modules


@pytest.fixture(autouse=True)
def unfrozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tasks, "_frozen", 0)
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("in_task", [True, False])
def test_worker_modules_are_exempt(monkeypatch: pytest.MonkeyPatch, in_task: bool) -> None:
    """With what the first task added, and not in a process that is not a worker."""
    monkeypatch.setattr(TaskContext, "_taskContext", TaskContext() if in_task else None)
    exempt_modules()
    assert (gc.get_freeze_count() > 10_000) is in_task
    tracked = []
    for _ in range(2):
        tracked.append([[] for _ in range(1000)])
        exempt_modules()
    collectable = {id(one) for one in gc.get_objects()}
    exempt = [all(id(one) not in collectable for one in added) for added in tracked]
    assert exempt == [in_task, False]
