"""The stream has another leader while a split is half read, and the reader's server survives.

See ``tests.faults.cluster.stalled_reader``: nothing is lost on the way and no connection is cut.
"""

from __future__ import annotations

import contextlib

import pytest

from tests.faults.cluster.replica_state import create_replicated
from tests.faults.cluster.stalled_reader import (
    COUNT,
    HARMS,
    SIZE,
    LeaderGoes,
    StalledReader,
    read_in_small_batches,
)
from tests.support.nats.cluster import Cluster
from tests.support.workload import KINDS_IN_TURN

HARMS_IN_TURN = (
    "steps down",
    *(pytest.param(harm, marks=pytest.mark.faults) for harm in HARMS if harm != "steps down"),
)
"""An election for want of a leader takes seconds."""


@pytest.mark.parametrize("harm", HARMS_IN_TURN)
@pytest.mark.parametrize("kind", KINDS_IN_TURN)
def test_another_leader(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    harm: str,
) -> None:
    """One that follows goes on delivering; what was killed has a successor; one task does it."""
    workload = create_replicated(cluster, kind, COUNT, SIZE)
    read_in_small_batches(monkeypatch)
    with contextlib.closing(LeaderGoes(cluster, workload.stream, harm)) as goes:
        with (
            StalledReader(goes.outside.port, goes) as proxy,
            workload.reading(proxy.url, requestTimeout="2", connectTimeout="60") as reading,
        ):
            assert reading.plan()
            assert len(reading.splits) == 1
            reading.read(proxy.each)
        assert goes.after not in (None, goes.before)
        assert 0 < proxy.rows <= proxy.passed < COUNT // 4
        assert proxy.connections == 2  # the planner's and the reader's
        workload.check(reading.rows)
        assert len(reading.rows) == COUNT
    rebuilt = [one for one in caplog.records if one.getMessage().startswith("consumer rebuilt")]
    if harm == "killed":
        assert rebuilt
