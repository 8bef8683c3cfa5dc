"""One anomaly of each kind, and one for each excuse that does not apply: the oracle reports it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.oracle.evidence import Entry, Evidence
from tests.support.oracle.ledger import DEL, PURGE, value_of
from tests.support.oracle.row_oracle import compare_all
from tests.unit.oracle.evidence_builder import (
    full_rows,
    make_write,
    set_progress,
    valid_run,
)


def test_valid_run_has_no_anomalies() -> None:
    findings = compare_all(valid_run())
    assert not findings.counts, findings.examples
    assert findings.excused == {"purged": 1, "TTL": 1, "expired": 1}


def unread_message(evidence: Evidence) -> None:
    full_rows(evidence).pop()


def read_twice(evidence: Evidence) -> None:
    evidence.attempts["stream"][2][0].insert(1, evidence.attempts["stream"][2][0][0])


def reversed_rows(evidence: Evidence) -> None:
    evidence.attempts["stream"][0][0].reverse()


def value_of_another_write(evidence: Evidence) -> None:
    rows = full_rows(evidence)
    rows[-1] = replace(rows[-1], value=value_of(1))


def truncated_value(evidence: Evidence) -> None:
    rows = full_rows(evidence)
    assert rows[-1].value is not None
    rows[-1] = replace(rows[-1], value=rows[-1].value[:-1])


def unsure_marker_twice(evidence: Evidence) -> None:
    full_rows(evidence).append(Entry(10, "put.1", DEL, None, 1))
    evidence.messages["full"] = [*evidence.messages["full"], Entry(10, "put.1", DEL, None)]


def different_replay(evidence: Evidence) -> None:
    evidence.attempts["full"][0][0].pop(0)


def row_missing_in_table(evidence: Evidence) -> None:
    assert evidence.reconciled
    evidence.reconciled.clear()


def removed_from_the_stream(evidence: Evidence) -> None:
    evidence.messages["full"] = evidence.messages["full"][:-1]


def unread_before_it_expired(evidence: Evidence) -> None:
    set_progress(evidence, "full", completed=((5, 30), (6, 70), (9, 80)))


def unread_before_it_was_purged(evidence: Evidence) -> None:
    evidence.writes["full"][3] = make_write(4, "full", "purge.6", PURGE, seq=4, at=90)


def stale_row_never_removed(evidence: Evidence) -> None:
    set_progress(evidence, "current", reported_at=tuple(range(40, 300, 10)))


@pytest.mark.parametrize(
    ("tamper", "kinds"),
    [
        (unread_message, {"not read": 1}),
        (read_twice, {"read twice": 1}),
        (reversed_rows, {"out of order": 2}),
        (value_of_another_write, {"not written": 1, "not read": 1}),
        (truncated_value, {"not written": 1, "not read": 1}),
        (unsure_marker_twice, {"not written": 1}),
        (different_replay, {"replayed": 1}),
        (row_missing_in_table, {"unequal": 1}),
        (removed_from_the_stream, {"server lost": 1, "loss unnoticed": 1}),
        (unread_before_it_expired, {"not read": 1}),
        (unread_before_it_was_purged, {"not read": 1}),
        (stale_row_never_removed, {"unequal": 1}),
    ],
    ids=lambda one: one.__name__ if callable(one) else None,
)
def test_anomaly_is_found(tamper: Callable[[Evidence], None], kinds: dict[str, int]) -> None:
    evidence = valid_run()
    tamper(evidence)
    findings = compare_all(evidence)
    assert findings.counts == kinds, findings.examples
