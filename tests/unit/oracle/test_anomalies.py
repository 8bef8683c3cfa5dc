"""Planted anomalies: each oracle of a run with random faults reports its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.oracle.copy_oracle import compare_copy
from tests.support.oracle.evidence import Entry, Evidence
from tests.support.oracle.ledger import PUT, value_of
from tests.support.oracle.row_oracle import compare_all
from tests.unit.oracle.evidence_builder import (
    full_rows,
    set_progress,
    valid_run,
)


def test_valid_run_has_no_anomalies() -> None:
    findings = compare_all(valid_run())
    assert not findings.counts, findings.examples
    assert findings.excused == {"purged": 1, "TTL": 1, "expired": 1}


def unread_message(evidence: Evidence) -> None:
    full_rows(evidence).pop()


def row_missing_in_table(evidence: Evidence) -> None:
    assert evidence.reconciled
    evidence.reconciled.clear()


def unread_before_it_expired(evidence: Evidence) -> None:
    set_progress(evidence, "full", completed=((5, 30), (6, 70), (9, 80)))


def stale_row_never_removed(evidence: Evidence) -> None:
    set_progress(evidence, "current", reported_at=tuple(range(40, 300, 10)))


@pytest.mark.parametrize(
    ("tamper", "kinds"),
    [
        (unread_message, {"not read": 1}),
        (row_missing_in_table, {"unequal": 1}),
        (unread_before_it_expired, {"not read": 1}),
        (stale_row_never_removed, {"unequal": 1}),
    ],
    ids=lambda one: one.__name__ if callable(one) else None,
)
def test_anomaly_is_found(tamper: Callable[[Evidence], None], kinds: dict[str, int]) -> None:
    evidence = valid_run()
    tamper(evidence)
    findings = compare_all(evidence)
    assert findings.counts == kinds, findings.examples


def test_anomalies_of_copy_are_found() -> None:
    messages = [Entry(seq, f"put.{seq % 2}", PUT, value_of(seq)) for seq in range(1, 5)]
    copies = [replace(one, seq=one.seq + 10) for one in messages]
    assert not compare_copy(messages, copies).counts
    other = Entry(99, "put.1", PUT, value_of(99))
    counts = compare_copy(messages, [*copies[:-1], copies[1], other]).counts
    assert counts == {"not read": 1, "read twice": 1, "not written": 1}
