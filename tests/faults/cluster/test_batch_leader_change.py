"""Batches whose stream gets another leader: when they are planned, and while they are half read.

The reader's server survives, see ``tests.faults.cluster.stalled_reader``. ``test_step_down`` has
leaders that step down under batches, with frames lost; here they are also killed and paused, and
nothing else is injected.
"""

from __future__ import annotations

import contextlib

import pytest

from tests.faults.cluster.replica_state import create_replicated
from tests.faults.cluster.stalled_reader import (
    COUNT,
    FAULTS,
    SIZE,
    LeaderLoss,
    StalledReader,
    read_in_small_batches,
)
from tests.support.nats.cluster import Cluster
from tests.support.query_driver.batch import (
    BATCHES,
    batch_options,
    batch_reader,
    read_sorted,
    recorded_kind,
    tasks_of,
)
from tests.support.recorded_stream import RecordedStream

pytestmark = pytest.mark.faults

_FAULTS = [fault for fault in FAULTS if fault != "stopped"]  # to a reader, that is as if killed


def long_deadline_options(recorded: RecordedStream, what: str) -> dict[str, str]:
    return {**batch_options(recorded, what), "requestTimeout": "2", "connectTimeout": "60"}


@pytest.mark.parametrize("fault", _FAULTS)
@pytest.mark.parametrize("what", BATCHES)
def test_leader_loss_between_planning_and_reading(cluster: Cluster, what: str, fault: str) -> None:
    recorded = create_replicated(cluster, recorded_kind(what), COUNT // 3)
    with contextlib.closing(LeaderLoss(cluster, recorded.stream, fault)) as goes:
        rows = read_sorted(goes.outside.url, long_deadline_options(recorded, what), goes)
        assert goes.after not in (None, goes.before)
    recorded.check(rows)
    assert len(rows) == COUNT // 3


@pytest.mark.parametrize("fault", _FAULTS)
@pytest.mark.parametrize("what", BATCHES)
def test_half_read(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, what: str, fault: str
) -> None:
    recorded = create_replicated(cluster, recorded_kind(what), COUNT, SIZE)
    read_in_small_batches(monkeypatch)
    with contextlib.closing(LeaderLoss(cluster, recorded.stream, fault)) as goes:
        options = long_deadline_options(recorded, what)
        with StalledReader(goes.outside.port, goes) as proxy:
            rows = read_sorted(proxy.url, options, each=proxy.each)
        assert goes.after not in (None, goes.before)
        assert 0 < proxy.rows <= proxy.passed < COUNT // 4
    recorded.check(rows)
    assert len(rows) == COUNT


def test_task_is_half_read_at_leader_change(cluster: Cluster) -> None:
    """What :func:`test_half_read` takes for granted of tasks: one, or four of the same size."""
    for what in BATCHES:
        recorded = create_replicated(cluster, recorded_kind(what), 100)
        tasks = tasks_of(batch_reader(cluster.url, **batch_options(recorded, what)))
        assert len(tasks) == (4 if what in ("all", "stream") else 1)
