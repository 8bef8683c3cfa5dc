"""Planted anomalies: each oracle of a run with random faults reports its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.oracle.evidence import (
    DEL,
    PURGE,
    PUT,
    Entry,
    Evidence,
    QueryProgress,
    Rollback,
    Write,
    value_of,
)
from tests.support.oracle.row_check import Marker, Row, Written, check_batches, check_rows
from tests.support.oracle.row_oracle import compare_all, compare_copy
from tests.support.query_driver.driver import MicroBatch


def make_write(
    number: int,
    source: str,
    key: str,
    operation: str = PUT,
    *,
    seq: int | None = None,
    ttl: int = 0,
    at: float | None = None,
) -> Write:
    """A write at second ``number``, or ``at``; its PubAck, if any, 0.1 s later."""
    at = float(number) if at is None else at
    return Write(number, source, key, operation, ttl, seq, at, 0.0 if seq is None else at + 0.1)


def entry_of(write: Write, seq: int | None = None) -> Entry:
    value = value_of(write.number) if write.operation == PUT else None
    seq = write.seq if seq is None else seq
    assert seq is not None
    return Entry(seq, write.key, write.operation, value)


def with_creation_time(rows: list[Entry]) -> list[Entry]:
    return [replace(row, created=1) for row in rows]


def valid_run() -> Evidence:
    """A run without anomalies, with each kind of excused difference."""
    full = [
        make_write(1, "full", "put.1", seq=1),
        make_write(2, "full", "put.1", DEL, seq=2),
        make_write(3, "full", "purge.6", seq=3),  # rolled up before it was read
        make_write(4, "full", "purge.6", PURGE, seq=4),
        make_write(5, "full", "ttl.7", ttl=45, seq=5),  # expired before it was read
        make_write(6, "full", "put.1", at=61),  # unsure, and stored
        make_write(7, "full", "put.1", at=62),  # unsure, and not stored
        make_write(8, "full", "put.1", DEL, at=63),  # unsure, and stored
        make_write(9, "full", "put.2", seq=9, at=64),
    ]
    marker = Entry(6, "ttl.7", PURGE, None)
    rows = [
        entry_of(full[0]),
        entry_of(full[1]),
        entry_of(full[3]),
        marker,
        entry_of(full[5], 7),
        entry_of(full[7], 8),
        entry_of(full[8]),
    ]
    stream = [make_write(20 + i, "stream", "put.1", seq=i) for i in range(1, 7)]
    messages = [entry_of(write) for write in stream]
    current = [
        make_write(30, "current", "put.1", seq=1),
        make_write(31, "current", "put.1", seq=2),
        make_write(32, "current", "put.2", seq=3),
        make_write(33, "current", "put.2", DEL, seq=4),
        make_write(
            34, "current", "ttl.7", ttl=45, seq=5
        ),  # its marker was written and removed unread
    ]
    return Evidence(
        writes={"full": full, "stream": stream, "current": current},
        messages={
            "full": rows,
            "stream": messages,
            "current": [entry_of(w) for w in current[1::2]],
        },
        messages_read_at=300,
        attempts={
            # The first micro-batch ran twice; in between, the purge rolled a row up.
            "full": {
                0: [
                    with_creation_time([*rows[:2], entry_of(full[2]), *rows[2:4]]),
                    with_creation_time(rows[:4]),
                ],
                1: [with_creation_time(rows[4:])],
            },
            "stream": {
                0: [with_creation_time(messages[:3])],
                2: [with_creation_time(messages[3:])],
                1: [[]],
            },
        },
        table=[entry_of(current[1]), entry_of(current[4])],
        reconciled=[entry_of(current[1])],
        reconciled_at=210,
        buckets=frozenset({"full", "current"}),
        progress={
            "full": QueryProgress(9, completed=((6, 70), (9, 80))),
            "stream": QueryProgress(6, completed=((3, 70), (6, 80))),
            "current": QueryProgress(5, reported_at=(40, 50, 70, 200)),
        },
        stopped=set(),
    )


def set_progress(evidence: Evidence, source: str, **fields: object) -> None:
    evidence.progress[source] = replace(evidence.progress[source], **fields)


def full_rows(evidence: Evidence, batch: int = 1) -> list[Entry]:
    return evidence.attempts["full"][batch][-1]


# -- anomalies -------------------------------------------------------------------------------------


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


# -- queries that stopped after a simulated power loss ---------------------------------------------


def rolled_back() -> Evidence:
    """Three queries that stopped: at second 100 the server lost all but two messages of each."""
    evidence = Evidence(
        writes={
            "full": [],
            "stream": [
                *(make_write(n, "stream", "put.1", seq=n) for n in range(1, 7)),
                make_write(7, "stream", "put.1", seq=3, at=130),
                make_write(8, "stream", "put.1", seq=4, at=131),
            ],
            "current": [
                make_write(30, "current", "put.1", seq=1),
                make_write(31, "current", "put.2", seq=2),
                make_write(32, "current", "put.1", seq=3),
                make_write(33, "current", "put.3", seq=4),
                make_write(34, "current", "put.4", seq=5),  # not read any more
                make_write(35, "current", "put.1", seq=3, at=130),
            ],
        },
        messages={"full": [], "stream": [], "current": []},
        messages_read_at=300,
        attempts={"full": {}, "stream": {}},
        table=[],
        reconciled=None,
        reconciled_at=0,
        buckets=frozenset({"full", "current"}),
        progress={"stream": QueryProgress(5, completed=((5, 20),)), "current": QueryProgress(4)},
        stopped={"full", "stream", "current"},
        rollback=Rollback(100, {"full": 0, "stream": 2, "current": 2}),
    )
    stream, current = ([entry_of(w) for w in evidence.writes[p]] for p in ("stream", "current"))
    evidence.messages["stream"] = [*stream[:2], *stream[6:]]
    evidence.messages["current"] = [current[1], current[5]]
    evidence.attempts["stream"][0] = [with_creation_time(stream[:5])]
    evidence.table = current[1:4]
    return evidence


def test_rolled_back_messages_are_excused() -> None:
    findings = compare_all(rolled_back())
    assert not findings.counts, findings.examples
    assert findings.excused == {"rolled back": 4 + 3}


def test_message_unread_before_rollback_is_found() -> None:
    evidence = rolled_back()
    evidence.attempts["stream"][0][0].pop(3)
    findings = compare_all(evidence)
    assert findings.counts == {"not read": 1}, findings.examples


# -- the row check ---------------------------------------------------------------------------------


ACKNOWLEDGED: dict[int, Written] = {
    1: ("a", b"1"),
    2: ("b", b"2"),
    3: ("a", b"3"),
    4: ("a", Marker.DEL),
    5: ("b", b"5"),
    6: ("a", b"6"),
    7: ("b", Marker.PURGE),
}
ATTEMPTED = Counter(ACKNOWLEDGED.values())


def rows(*seqs: int) -> list[Row]:
    found = []
    for seq in seqs:
        key, content = ACKNOWLEDGED[seq]
        if isinstance(content, Marker):
            found.append(Row(seq, key, None, content.value))
        else:
            found.append(Row(seq, key, content))
    return found


def test_anomaly_of_micro_batches_is_found() -> None:
    done = [MicroBatch(0, 4, True, 4), MicroBatch(4, 7, False, 7)]
    check_batches(rows(2, 4, 5, 6, 7), ACKNOWLEDGED, ATTEMPTED, 64, done)
    with pytest.raises(AssertionError, match=r"^not read \("):
        check_batches(rows(2, 4, 5, 7), ACKNOWLEDGED, ATTEMPTED, 64, done)


def test_anomaly_of_rows_is_found() -> None:
    with pytest.raises(AssertionError, match="another row"):
        check_rows([Row(2, "b", b"5")], ACKNOWLEDGED, ATTEMPTED)
