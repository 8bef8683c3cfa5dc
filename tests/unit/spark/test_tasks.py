"""Garbage collection in workers."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from pyspark import TaskContext

from nats_stream_source.spark.tasks import exempt_modules


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("in_task", [True, False])
def test_worker_modules_are_exempt(monkeypatch: pytest.MonkeyPatch, in_task: bool) -> None:
    """Once per process, and not in a process that is not a worker."""
    monkeypatch.setattr(TaskContext, "_taskContext", TaskContext() if in_task else None)
    exempt_modules()
    frozen = gc.get_freeze_count()
    assert (frozen > 10_000) is in_task
    later: list[list[int]] = [[] for _ in range(1000)]
    exempt_modules()
    # Exempt objects may end meanwhile.
    assert gc.get_freeze_count() < frozen + len(later)
