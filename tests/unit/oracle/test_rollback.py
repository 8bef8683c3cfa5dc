"""The oracle for queries that stopped after a simulated power loss."""

from __future__ import annotations

from tests.support.oracle.evidence import Evidence, QueryProgress, Rollback
from tests.support.oracle.row_oracle import compare_all
from tests.unit.oracle.evidence_builder import entry_of, make_write, with_creation_time


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
