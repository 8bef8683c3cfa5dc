"""The soak: its ledger, its schedule, and short complete runs."""

from __future__ import annotations

import copy

import pytest

from tests.soak.fault_injector import POWER_LOSS, schedule
from tests.soak.run import Settings, clean, run, summary
from tests.soak.sites import Rows, compare
from tests.support.oracle.row_oracle import compare_all

# The schedule


def test_seed_determines_schedule() -> None:
    assert schedule(7, 1800) == schedule(7, 1800)
    assert schedule(7, 1800) != schedule(8, 1800)


# Buckets that come and go

SENT = {("site-1", "k2"), ("site-1", "k3"), ("site-4", "k5")}
PRESENT = {"site-1": [(1, "k2"), (2, "k3")]}
WRONG: dict[str, tuple[Rows, str]] = {
    "missing": ({"site-1": [(1, "k2")]}, "not read"),
    "twice": ({"site-1": [(1, "k2"), (2, "k3"), (2, "k3")]}, "read twice"),
    "out of order": ({"site-1": [(2, "k3"), (1, "k2")]}, "out of order"),
    "never sent": ({**PRESENT, "site-4": [(1, "k6")]}, "not written"),
}


@pytest.mark.parametrize(("rows", "kind"), WRONG.values(), ids=WRONG)
def test_wrong_rows_of_sites_are_found(rows: Rows, kind: str) -> None:
    assert compare(rows, PRESENT, SENT).counts == {kind: 1}


def test_rows_of_deleted_site_may_be_missing() -> None:
    assert not compare(PRESENT, PRESENT, SENT).counts
    assert not compare({**PRESENT, "site-4": [(1, "k5")]}, PRESENT, SENT).counts


# Complete runs


@pytest.mark.faults
def test_short_soak_passes_and_missing_rows_are_found() -> None:
    lines: list[str] = []
    outcome = run(Settings(seed=1, minutes=0.75, rate=150, spark=False), lines.append)
    result = summary(outcome)
    assert not result["anomalies"], (result, lines)
    assert sum(result["faults"].values()) >= 3
    assert result["faults"]["kill driver"] + result["faults"]["stop driver"] >= 1
    assert min(result["rows"].values()) > 0
    evidence = outcome.evidence
    assert evidence is not None

    batch, attempts = max(evidence.attempts["full"].items(), key=lambda one: len(one[1][-1]))
    strict = next(i for i, row in enumerate(attempts[-1]) if row.key.startswith("put."))
    removed = attempts[-1].pop(strict)
    assert compare_all(evidence).counts["not read"] == 1
    attempts[-1].insert(strict, removed)
    attempts[-1].insert(strict, removed)
    assert compare_all(evidence).counts["read twice"] == 1, batch
    attempts[-1].pop(strict)
    assert not compare_all(evidence).counts
    clean(outcome)


@pytest.mark.faults
def test_queries_stop_after_power_loss() -> None:
    lines: list[str] = []
    settings = Settings(seed=3, minutes=0.4, topology="power-loss", rate=150, spark=False)
    outcome = run(settings, lines.append)
    result = summary(outcome)
    assert not result["anomalies"], (result, lines)
    assert result["faults"][POWER_LOSS] == 1
    assert {"full", "current", "stream"} <= result["data_loss"].keys()
    # Acknowledged writes are removed, and the sinks have those that were read before.
    loss, evidence = outcome.rollback, outcome.evidence
    assert loss is not None
    assert evidence is not None
    assert result["excused"]["rolled back"] > 0
    lost = {
        write.seq
        for write in evidence.writes["stream"]
        if write.seq is not None and loss.may_remove(write) and write.acked_at < loss.at
    }
    rows = evidence.attempts["stream"]
    batch, row = next(
        (batch, row)
        for batch, attempts in rows.items()
        for row in attempts[-1]
        if row.seq in lost and row.seq <= evidence.progress["stream"].committed
    )
    without = copy.deepcopy(evidence)
    without.attempts["stream"][batch][-1].remove(row)
    assert compare_all(without).counts["not read"] == 1
    clean(outcome)
