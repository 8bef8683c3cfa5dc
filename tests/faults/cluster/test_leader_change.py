"""A stream has another leader while it is read, and the reader's server survives.

See ``tests.faults.cluster.replica_state``: nothing is lost on the way and no connection is cut.
Batches get another leader also when they are planned. ``test_step_down`` has leaders that step down
with frames lost.
"""

from __future__ import annotations

import contextlib

import pytest

from tests.faults.cluster.replica_state import (
    COUNT,
    FAULTS,
    SIZE,
    LeaderLoss,
    StalledReader,
    create_replicated,
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
from tests.support.recorded_stream import KINDS_IN_TURN, RecordedStream

FAULTS_IN_TURN = (
    "steps down",
    *(pytest.param(fault, marks=pytest.mark.faults) for fault in FAULTS if fault != "steps down"),
)
"""An election for want of a leader takes seconds."""


@pytest.mark.parametrize("fault", FAULTS_IN_TURN)
@pytest.mark.parametrize("kind", KINDS_IN_TURN)
def test_leader_changes_while_query_runs(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    fault: str,
) -> None:
    """A follower continues to deliver; a killed server has a successor; one task reads all."""
    recorded = create_replicated(cluster, kind, COUNT, SIZE)
    read_in_small_batches(monkeypatch)
    with contextlib.closing(LeaderLoss(cluster, recorded.stream, fault)) as goes:
        with (
            StalledReader(goes.outside.port, goes) as proxy,
            recorded.query(proxy.url, requestTimeout="2", connectTimeout="60") as query,
        ):
            assert query.plan()
            assert len(query.splits) == 1
            query.read(proxy.each)
        assert goes.after not in (None, goes.before)
        assert 0 < proxy.rows <= proxy.passed < COUNT // 4
        assert proxy.connections == 2  # the planner's and the reader's
        recorded.check(query.rows)
        assert len(query.rows) == COUNT
    rebuilt = [one for one in caplog.records if one.getMessage().startswith("consumer rebuilt")]
    if fault == "killed":
        assert rebuilt


# -- batches ---------------------------------------------------------------------------------------


_FAULTS = [fault for fault in FAULTS if fault != "stopped"]  # to a reader, that is as if killed


def long_deadline_options(recorded: RecordedStream, what: str) -> dict[str, str]:
    return {**batch_options(recorded, what), "requestTimeout": "2", "connectTimeout": "60"}


@pytest.mark.faults
@pytest.mark.parametrize("fault", _FAULTS)
@pytest.mark.parametrize("what", BATCHES)
def test_leader_loss_between_planning_and_reading(cluster: Cluster, what: str, fault: str) -> None:
    recorded = create_replicated(cluster, recorded_kind(what), COUNT // 3)
    with contextlib.closing(LeaderLoss(cluster, recorded.stream, fault)) as goes:
        rows = read_sorted(goes.outside.url, long_deadline_options(recorded, what), goes)
        assert goes.after not in (None, goes.before)
    recorded.check(rows)
    assert len(rows) == COUNT // 3


@pytest.mark.faults
@pytest.mark.parametrize("fault", _FAULTS)
@pytest.mark.parametrize("what", BATCHES)
def test_leader_changes_while_batch_is_half_read(
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


@pytest.mark.faults
def test_task_is_half_read_at_leader_change(cluster: Cluster) -> None:
    """What these tests take for granted of tasks: one, or four of the same size."""
    for what in BATCHES:
        recorded = create_replicated(cluster, recorded_kind(what), 100)
        tasks = tasks_of(batch_reader(cluster.url, **batch_options(recorded, what)))
        assert len(tasks) == (4 if what in ("all", "stream") else 1)
