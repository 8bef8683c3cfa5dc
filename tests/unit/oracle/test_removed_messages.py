"""The oracle excuses removed messages if the ledger explains them, and no others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.oracle.evidence import Entry
from tests.support.oracle.ledger import PURGE, PUT, value_of
from tests.support.oracle.row_oracle import compare_all
from tests.unit.oracle.evidence_builder import (
    entry_of,
    make_write,
    set_progress,
    valid_run,
    with_creation_time,
)
from tests.unit.oracle.test_anomalies import (
    expired_row_after_reconcile,
    removed_from_the_stream,
    unread_before_it_was_purged,
)


@pytest.mark.parametrize(("before", "kinds"), [(10, {}), (100, {"not read": 1})])
def test_unsure_purge_stored_late(before: float, kinds: dict[str, int]) -> None:
    """A server that hangs stores it when it goes on: after what another one took meanwhile."""
    evidence = valid_run()
    unread_before_it_was_purged(evidence)
    full = evidence.writes["full"]
    purge = make_write(0, "full", "purge.6", PURGE, seq=None)
    full.insert(0, replace(purge, sent_at=full[2].sent_at - before))
    findings = compare_all(evidence)
    assert findings.counts == kinds, findings.examples


@pytest.mark.parametrize(
    ("expired_at", "marked", "sent_since", "kinds"),
    [
        (64, True, 64, {}),
        (100, True, 64, {"not read": 1}),  # it had not expired when all had been read
        (1, True, 64, {"not read": 1}),  # long before the other one was written
        (64, False, 64, {"not read": 1}),
        (64, True, 90, {"not read": 1}),  # the marker was stored after all had been read
    ],
)
def test_marker_removes_message_in_flight(
    expired_at: float, marked: bool, sent_since: float, kinds: dict[str, int]
) -> None:
    """Its key's older entry expired, and the leader had not stored the newer one yet."""
    evidence = valid_run()
    evidence.writes["full"] += [
        make_write(10, "full", "ttl.8", ttl=45, seq=10, at=expired_at - 45),
        make_write(11, "full", "ttl.8", ttl=45, seq=11, at=64.5),
        make_write(12, "full", "put.3", seq=12, at=sent_since),
    ]
    rows = [entry_of(evidence.writes["full"][-1])]
    if marked:
        rows.append(Entry(13, "ttl.8", PURGE, None))
    older = entry_of(evidence.writes["full"][-3])
    evidence.attempts["full"][1][-1] += with_creation_time([older, *rows])
    evidence.messages["full"] += rows
    set_progress(evidence, "full", committed=13, completed=((6, 70), (rows[-1].seq, 80)))
    findings = compare_all(evidence)
    assert {"not read": findings.counts["not read"]} == {"not read": 0, **kinds}, findings.examples


def test_superseded_messages_are_required() -> None:
    """However often its key was written since."""
    evidence = valid_run()
    key = evidence.writes["stream"][0].key
    later = [make_write(100 + i, "stream", key, seq=10 + i) for i in range(200)]
    evidence.writes["stream"] += later
    evidence.messages["stream"] += [entry_of(write) for write in later]
    rows = evidence.attempts["stream"][2][-1]
    rows += [replace(entry_of(write), created=rows[-1].created) for write in later]
    assert not compare_all(evidence).counts
    del rows[-150:-100]
    assert compare_all(evidence).counts == {"not read": 50}


def test_stopped_query_need_not_read_later_messages() -> None:
    evidence = valid_run()
    removed_from_the_stream(evidence)
    evidence.messages["full"].append(Entry(10, "put.9", PUT, value_of(9)))
    evidence.stopped.add("full")
    assert set(compare_all(evidence).counts) == {"server lost"}


def test_stale_row_until_its_marker_is_read() -> None:
    evidence = valid_run()
    evidence.messages["current"].append(Entry(6, "ttl.7", PURGE, None, at=250))
    assert not compare_all(evidence).counts


def test_stale_row_before_its_marker_is_written() -> None:
    evidence = valid_run()
    evidence.messages_read_at, evidence.reconciled_at = 90, 75
    expired_row_after_reconcile(evidence)
    assert not compare_all(evidence).counts


def test_stale_row_of_an_earlier_message_that_was_not_read_since() -> None:
    evidence = valid_run()
    evidence.writes["current"].append(make_write(35, "current", "ttl.7", ttl=45, seq=6, at=60))
    set_progress(evidence, "current", reported_at=(40, 50, 60, 250))
    assert not compare_all(evidence).counts


def test_messages_overwritten_during_the_read() -> None:
    evidence = valid_run()
    for number, at in ((35, 60), (36, 68)):
        write = make_write(number, "current", "ttl.7", ttl=45, seq=number - 29, at=at)
        evidence.writes["current"].append(write)
    set_progress(evidence, "current", reported_at=(40, 50, 66, 72, 250))
    assert not compare_all(evidence).counts


@pytest.mark.parametrize("at", [None, 215.0])
def test_messages_that_expired_after_reconcile(at: float | None) -> None:
    evidence = valid_run()
    evidence.reconciled_at = 75 if at is None else 210
    if at is not None:
        evidence.messages["current"].append(Entry(6, "ttl.7", PURGE, None, at=at))
    expired_row_after_reconcile(evidence)
    assert not compare_all(evidence).counts


def test_unsure_write_in_the_bucket() -> None:
    evidence = valid_run()
    write = make_write(35, "current", "put.1")
    evidence.writes["current"].append(write)
    evidence.messages["current"][0] = evidence.table[0] = entry_of(write, 6)
    evidence.reconciled = [entry_of(write, 6)]
    assert not compare_all(evidence).counts
