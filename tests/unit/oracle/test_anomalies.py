"""The oracle finds each anomaly in the rows, the table and the bucket."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.oracle.evidence import Entry, Evidence
from tests.support.oracle.ledger import DEL, PURGE, PUT, value_of
from tests.support.oracle.row_oracle import compare_all
from tests.unit.oracle.evidence_builder import (
    entry_of,
    full_rows,
    make_write,
    set_progress,
    valid_run,
    with_creation_time,
)


def test_valid_run_has_no_anomalies() -> None:
    findings = compare_all(valid_run())
    assert not findings.counts, findings.examples
    assert findings.excused == {"purged": 1, "TTL": 1, "expired": 1}


def unread_message(evidence: Evidence) -> None:
    full_rows(evidence).pop()


def unread_and_removed(evidence: Evidence) -> None:
    # Acknowledged, neither read nor held: what no purge and no TTL explains.
    evidence.messages["full"] = evidence.messages["full"][:-1]
    full_rows(evidence).pop()


def unread_unsure_message(evidence: Evidence) -> None:
    full_rows(evidence).pop(0)


def read_twice(evidence: Evidence) -> None:
    evidence.attempts["stream"][2][0].insert(1, evidence.attempts["stream"][2][0][0])


def read_twice_in_two_batches(evidence: Evidence) -> None:
    evidence.attempts["stream"][2][0].insert(0, evidence.attempts["stream"][0][0][-1])


def reversed_rows(evidence: Evidence) -> None:
    evidence.attempts["stream"][0][0].reverse()


def reversed_batches(evidence: Evidence) -> None:
    attempts = evidence.attempts["stream"]
    attempts[0], attempts[2] = attempts[2], attempts[0]


def change_row(row: int, **fields: object) -> Callable[[Evidence], None]:
    def change(evidence: Evidence) -> None:
        rows = full_rows(evidence)
        rows[row] = replace(rows[row], **fields)  # type: ignore[arg-type]

    return change


def rows_of_two_streams(evidence: Evidence) -> None:
    rows = evidence.attempts["stream"][2][0]
    rows.insert(1, replace(rows[0], created=2))


def unwritten_marker(evidence: Evidence) -> None:
    full_rows(evidence).append(Entry(10, "put.1", DEL, None, 1))


def unsure_marker_twice(evidence: Evidence) -> None:
    full_rows(evidence).append(Entry(10, "put.1", DEL, None, 1))
    evidence.messages["full"] = [*evidence.messages["full"], Entry(10, "put.1", DEL, None)]


def different_replay(evidence: Evidence) -> None:
    evidence.attempts["full"][0][0].pop(0)


def row_missing_in_table(evidence: Evidence) -> None:
    assert evidence.reconciled
    evidence.reconciled.clear()


def extra_row_in_table(evidence: Evidence) -> None:
    evidence.table.append(entry_of(evidence.writes["current"][2]))


def old_row_in_table(evidence: Evidence) -> None:
    evidence.table[0] = entry_of(evidence.writes["current"][0])


def removed_from_the_stream(evidence: Evidence) -> None:
    evidence.messages["full"] = evidence.messages["full"][:-1]


def removed_from_the_bucket(evidence: Evidence) -> None:
    evidence.writes["current"].append(make_write(35, "current", "put.2", seq=9))


def unsure_value_not_in_the_stream(evidence: Evidence) -> None:
    full_rows(evidence).append(Entry(10, "put.1", PUT, value_of(7), 1))


def unsure_value_twice(evidence: Evidence) -> None:
    write = make_write(10, "full", "ttl.15", ttl=45, at=65)
    evidence.writes["full"].append(write)
    full_rows(evidence).extend(with_creation_time([entry_of(write, 10), entry_of(write, 11)]))


def other_value_instead_of_an_unsure_one(evidence: Evidence) -> None:
    evidence.messages["full"][4] = replace(evidence.messages["full"][4], value=value_of(999))
    full_rows(evidence)[0] = replace(full_rows(evidence)[0], value=value_of(999))


def unsure_value_instead_of_an_acknowledged_one(evidence: Evidence) -> None:
    evidence.writes["full"].append(make_write(10, "full", "ttl.7", ttl=45, at=5))
    full_rows(evidence, 0).insert(3, Entry(5, "ttl.7", PUT, value_of(10), 1))


def other_value_in_the_bucket(evidence: Evidence) -> None:
    other = replace(evidence.messages["current"][0], value=value_of(30))
    evidence.messages["current"][0] = evidence.table[0] = other
    evidence.reconciled = [other]


def marker_without_an_expired_message(evidence: Evidence) -> None:
    marker = Entry(10, "ttl.15", PURGE, None)
    full_rows(evidence).extend(with_creation_time([marker]))
    evidence.messages["full"] = [*evidence.messages["full"], marker]


def marker_in_the_bucket_without_an_expired_message(evidence: Evidence) -> None:
    evidence.messages["current"].append(Entry(6, "ttl.15", PURGE, None, at=90))


def unread_before_it_expired(evidence: Evidence) -> None:
    set_progress(evidence, "full", completed=((5, 30), (6, 70), (9, 80)))


def unread_before_it_was_purged(evidence: Evidence) -> None:
    evidence.writes["full"][3] = make_write(4, "full", "purge.6", PURGE, seq=4, at=90)


def removed_before_it_expired(evidence: Evidence) -> None:
    evidence.messages_read_at = 70


def stale_row_never_removed(evidence: Evidence) -> None:
    set_progress(evidence, "current", reported_at=tuple(range(40, 300, 10)))


def stale_row_long_after_its_marker(evidence: Evidence) -> None:
    # A time without a micro-batch, but long after the marker must have come.
    set_progress(evidence, "current", reported_at=tuple(range(40, 270, 10)))
    evidence.messages_read_at = 500


def stale_row_without_a_marker(evidence: Evidence) -> None:
    evidence.messages_read_at = 110


def stale_row_after_its_marker_was_read(evidence: Evidence) -> None:
    evidence.messages["current"].append(Entry(6, "ttl.7", PURGE, None, at=80))
    set_progress(evidence, "current", committed=6)


def stale_row_of_an_earlier_message(evidence: Evidence) -> None:
    evidence.writes["current"].append(make_write(35, "current", "ttl.7", ttl=45, seq=6, at=60))
    set_progress(evidence, "current", reported_at=(40, 50, 70, 80, 90, 250))


def expired_row_after_reconcile(evidence: Evidence) -> None:
    assert evidence.reconciled
    evidence.reconciled.append(entry_of(evidence.writes["current"][4]))


def expired_row_with_a_marker_before_reconcile(evidence: Evidence) -> None:
    evidence.messages["current"].append(Entry(6, "ttl.7", PURGE, None, at=205))
    expired_row_after_reconcile(evidence)


@pytest.mark.parametrize(
    ("tamper", "kinds"),
    [
        (unread_message, {"not read": 1}),
        (unread_and_removed, {"server lost": 1}),
        (unread_unsure_message, {"not read": 1}),
        (read_twice, {"read twice": 1}),
        (read_twice_in_two_batches, {"read twice": 1}),
        (rows_of_two_streams, {"not written": 1}),
        (reversed_rows, {"out of order": 2}),
        (reversed_batches, {"out of order": 3}),
        (change_row(-1, value=value_of(9) + b"x"), {"not written": 1, "not read": 1}),
        (change_row(-1, value=value_of(1)), {"not written": 1, "not read": 1}),
        (change_row(-1, key="put.1"), {"not written": 1, "not read": 1}),
        (change_row(-1, seq=10), {"not written": 1, "not read": 1}),
        (change_row(-1, operation=DEL, value=None), {"not written": 1, "not read": 1}),
        (unwritten_marker, {"not written": 1}),
        (unsure_marker_twice, {"not written": 1}),
        (different_replay, {"replayed": 1}),
        (row_missing_in_table, {"unequal": 1}),
        (extra_row_in_table, {"unequal": 1}),
        (old_row_in_table, {"unequal": 1}),
        (removed_from_the_stream, {"server lost": 1, "loss unnoticed": 1}),
        (removed_from_the_bucket, {"server lost": 1}),
        (unsure_value_not_in_the_stream, {"not written": 1}),
        (unsure_value_twice, {"not written": 1}),
        (other_value_instead_of_an_unsure_one, {"not written": 1}),
        (unsure_value_instead_of_an_acknowledged_one, {"not written": 1}),
        (other_value_in_the_bucket, {"server lost": 1, "not written": 1}),
        (marker_without_an_expired_message, {"not written": 1}),
        (marker_in_the_bucket_without_an_expired_message, {"not written": 1}),
        (unread_before_it_expired, {"not read": 1}),
        (unread_before_it_was_purged, {"not read": 1}),
        (removed_before_it_expired, {"server lost": 1, "unequal": 1}),
        (stale_row_never_removed, {"unequal": 1}),
        (stale_row_long_after_its_marker, {"unequal": 1}),
        (stale_row_without_a_marker, {"unequal": 1}),
        (stale_row_after_its_marker_was_read, {"unequal": 1}),
        (stale_row_of_an_earlier_message, {"unequal": 1}),
        (expired_row_after_reconcile, {"unequal": 1}),
        (expired_row_with_a_marker_before_reconcile, {"unequal": 1}),
    ],
    ids=lambda one: one.__name__ if callable(one) else None,
)
def test_anomaly_is_found(tamper: Callable[[Evidence], None], kinds: dict[str, int]) -> None:
    evidence = copy.deepcopy(valid_run())
    tamper(evidence)
    findings = compare_all(evidence)
    assert findings.counts == kinds, findings.examples
