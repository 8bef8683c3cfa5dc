"""Batches whose stream gets another leader: when they are planned, and while they are half read.

The reader's server survives, see ``clusters.halfway``. ``test_leaders`` has leaders that step down
under batches, with frames lost; here they also die and stand still, and nothing else is harmed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from batch_reads import batch_reader, tasks_of
from cluster import Cluster
from faults.batches import BATCHES, kind_of, options_of, read
from faults.trial import Trial

from clusters.halfway import COUNT, HARMS, SIZE, Halfway, LeaderGoes, read_in_small_batches
from clusters.watched import create_replicated

pytestmark = pytest.mark.faults

_HARMS = [harm for harm in HARMS if harm != "stopped"]  # to a reader, that is as if killed


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def patient_options(trial: Trial, what: str) -> dict[str, str]:
    return {**options_of(trial, what), "requestTimeout": "2", "connectTimeout": "60"}


@pytest.mark.parametrize("harm", _HARMS)
@pytest.mark.parametrize("what", BATCHES)
def test_between_planning_and_reading(cluster: Cluster, what: str, harm: str) -> None:
    trial = create_replicated(cluster, kind_of(what), COUNT // 3)
    with contextlib.closing(LeaderGoes(cluster, trial.stream, harm)) as goes:
        rows = read(goes.outside.url, patient_options(trial, what), goes)
        assert goes.after not in (None, goes.before)
    trial.check(rows)
    assert len(rows) == COUNT // 3


@pytest.mark.parametrize("harm", _HARMS)
@pytest.mark.parametrize("what", BATCHES)
def test_half_read(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, what: str, harm: str) -> None:
    trial = create_replicated(cluster, kind_of(what), COUNT, SIZE)
    read_in_small_batches(monkeypatch)
    with contextlib.closing(LeaderGoes(cluster, trial.stream, harm)) as goes:
        options = patient_options(trial, what)
        with Halfway(goes.outside.port, goes) as proxy:
            rows = read(proxy.url, options, each=proxy.each)
        assert goes.after not in (None, goes.before)
        assert 0 < proxy.rows <= proxy.passed < COUNT // 4
    trial.check(rows)
    assert len(rows) == COUNT


def test_a_task_is_half_of_nothing_else(cluster: Cluster) -> None:
    """What :func:`test_half_read` takes for granted of tasks: one, or four of the same size."""
    for what in BATCHES:
        trial = create_replicated(cluster, kind_of(what), 100)
        tasks = tasks_of(batch_reader(cluster.url, **options_of(trial, what)))
        assert len(tasks) == (4 if what in ("all", "stream") else 1)
