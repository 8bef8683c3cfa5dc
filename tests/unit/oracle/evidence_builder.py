"""Evidence of a run without anomalies, for the tests of the oracle."""

from __future__ import annotations

from dataclasses import replace

from tests.support.oracle.evidence import Entry, Evidence, QueryProgress
from tests.support.oracle.ledger import DEL, PURGE, PUT, Write, value_of


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
