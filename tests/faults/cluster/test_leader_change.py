"""The stream has another leader while a split is half read, and the reader's server survives.

See ``tests.faults.cluster.stalled_reader``: nothing is lost on the way and no connection is cut.
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
from tests.support.recorded_stream import KINDS_IN_TURN

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
