"""The soak's oracle finds each anomaly; the schedule is the seed's; a short soak passes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from soak import collect
from soak.ledger import DEL, PURGE, PUT, Ledger, Write, number_of, read_ledger, value_of
from soak.oracle import Entry, Evidence, judge
from soak.processes import Memory
from soak.run import Settings, clean, growth, run, summary
from soak.schedule import BETWEEN_KINDS, DRIVER_KINDS, SERVER_KINDS, schedule

# The ledger


def test_a_ledger_tells_acknowledged_from_unsure_writes(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = Ledger(path)
    for number in (1, 2, 3):
        ledger.send(Write(number, "full", f"put.{number}", PUT, 45 * (number == 3)))
    ledger.ack(2, 17)
    ledger.lose(1, TimeoutError())
    ledger.close()
    with path.open("a") as file:
        file.write("ack\t3\t18")  # the generator was cut off in the middle of this line

    assert read_ledger(path) == [
        Write(1, "full", "put.1"),
        Write(2, "full", "put.2", seq=17),
        Write(3, "full", "put.3", ttl=45),
    ]


@pytest.mark.parametrize("number", [0, 1, 6, 7, 12345, 997 * 3])
def test_a_value_tells_its_number_only_when_it_is_whole(number: int) -> None:
    value = value_of(number)
    assert number_of(value) == number
    assert number_of(value[:-1]) is None
    assert number_of(value + b"x") is None
    assert number_of(b"x" + value) is None


# The schedule


def test_the_seed_decides_the_schedule() -> None:
    assert schedule(7, 1800) == schedule(7, 1800)
    assert schedule(7, 1800) != schedule(8, 1800)


def test_a_schedule_has_every_kind_and_ends_in_time() -> None:
    faults = schedule(1, 1800)
    assert {one.kind for one in faults} == {*SERVER_KINDS, *BETWEEN_KINDS, *DRIVER_KINDS}
    assert all(8 <= one.at <= 1792 for one in faults)
    assert faults == sorted(faults, key=lambda one: one.at)


def test_the_last_driver_of_a_long_run_lives_on() -> None:
    assert max(one.at for one in schedule(1, 1800) if one.lane == "driver") < 1350
    assert max(one.at for one in schedule(1, 1800) if one.lane == "servers") > 1700


def test_a_single_server_gets_no_fault_of_a_cluster() -> None:
    kinds = {one.kind for one in schedule(1, 1800, "single")}
    assert not kinds & {"kill leader", "step down meta", "kill all servers", "rolling restart"}
    assert {"kill server", "restart server", "kill driver", "drop deliveries"} <= kinds


# The oracle


def entry(write: Write, seq: int | None = None) -> Entry:
    value = value_of(write.number) if write.operation == PUT else None
    seq = write.seq if seq is None else seq
    assert seq is not None
    return Entry(seq, write.key, write.operation, value)


def created(rows: list[Entry]) -> list[Entry]:
    return [replace(row, created=1) for row in rows]


def sound() -> Evidence:
    """A run without an anomaly, with all that is excused."""
    full = [
        Write(1, "full", "put.1", seq=1),
        Write(2, "full", "put.1", DEL, seq=2),
        Write(3, "full", "purge.6", seq=3),  # rolled up before it was read
        Write(4, "full", "purge.6", PURGE, seq=4),
        Write(5, "full", "ttl.7", ttl=45, seq=5),  # expired before it was read
        Write(6, "full", "put.1"),  # unsure, and stored
        Write(7, "full", "put.1"),  # unsure, and not stored
        Write(8, "full", "put.1", DEL),  # unsure, and stored
        Write(9, "full", "put.2", seq=9),
    ]
    marker = Entry(6, "ttl.7", PURGE, None)
    rows = [
        entry(full[0]),
        entry(full[1]),
        entry(full[3]),
        marker,
        entry(full[5], 7),
        entry(full[7], 8),
        entry(full[8]),
    ]
    stream = [Write(20 + i, "stream", "put.1", seq=i) for i in range(1, 7)]
    messages = [entry(write) for write in stream]
    current = [
        Write(30, "current", "put.1", seq=1),
        Write(31, "current", "put.1", seq=2),
        Write(32, "current", "put.2", seq=3),
        Write(33, "current", "put.2", DEL, seq=4),
        Write(34, "current", "ttl.7", ttl=45, seq=5),
    ]
    return Evidence(
        writes={"full": full, "stream": stream, "current": current},
        held={"full": rows, "stream": messages, "current": [entry(w) for w in current[1::2]]},
        attempts={
            # The first micro-batch ran twice; in between, the purge rolled a row up.
            "full": {
                0: [
                    created([*rows[:2], entry(full[2]), *rows[2:4]]),
                    created(rows[:4]),
                ],
                1: [created(rows[4:])],
            },
            "stream": {0: [created(messages[:3])], 2: [created(messages[3:])], 1: [[]]},
        },
        tables=[[entry(current[1]), entry(current[4])], [entry(current[1])]],
        buckets=frozenset({"full", "current"}),
        stopped=set(),
    )


def test_a_sound_run_has_no_anomalies() -> None:
    findings = judge(sound())
    assert not findings.counts, findings.examples
    assert findings.excused == {"purged": 1, "TTL": 1, "expired": 1}


def full_rows(evidence: Evidence, batch: int = 1) -> list[Entry]:
    return evidence.attempts["full"][batch][-1]


def unread(evidence: Evidence) -> None:
    full_rows(evidence).pop()


def unread_and_gone(evidence: Evidence) -> None:
    # Acknowledged, neither read nor held: what no purge and no TTL explains.
    evidence.held["full"] = evidence.held["full"][:-1]
    full_rows(evidence).pop()


def unsure_but_stored_unread(evidence: Evidence) -> None:
    full_rows(evidence).pop(0)


def twice(evidence: Evidence) -> None:
    evidence.attempts["stream"][2][0].insert(1, evidence.attempts["stream"][2][0][0])


def twice_in_two_batches(evidence: Evidence) -> None:
    evidence.attempts["stream"][2][0].insert(0, evidence.attempts["stream"][0][0][-1])


def swapped(evidence: Evidence) -> None:
    evidence.attempts["stream"][0][0].reverse()


def swapped_batches(evidence: Evidence) -> None:
    attempts = evidence.attempts["stream"]
    attempts[0], attempts[2] = attempts[2], attempts[0]


def changed(row: int, **fields: object) -> Callable[[Evidence], None]:
    def change(evidence: Evidence) -> None:
        rows = full_rows(evidence)
        rows[row] = replace(rows[row], **fields)

    return change


def two_streams(evidence: Evidence) -> None:
    rows = evidence.attempts["stream"][2][0]
    rows.insert(1, replace(rows[0], created=2))


def invented_marker(evidence: Evidence) -> None:
    full_rows(evidence).append(Entry(10, "put.1", DEL, None, 1))


def unsure_marker_twice(evidence: Evidence) -> None:
    full_rows(evidence).append(Entry(10, "put.1", DEL, None, 1))
    evidence.held["full"] = [*evidence.held["full"], Entry(10, "put.1", DEL, None)]


def another_replay(evidence: Evidence) -> None:
    evidence.attempts["full"][0][0].pop(0)


def row_missing_in_table(evidence: Evidence) -> None:
    evidence.tables[1].clear()


def row_too_many_in_table(evidence: Evidence) -> None:
    evidence.tables[1].append(entry(evidence.writes["current"][2]))


def old_row_in_table(evidence: Evidence) -> None:
    evidence.tables[0][0] = entry(evidence.writes["current"][0])


def lost_by_the_server(evidence: Evidence) -> None:
    evidence.held["full"] = evidence.held["full"][:-1]


def lost_by_the_server_in_bucket(evidence: Evidence) -> None:
    evidence.writes["current"].append(Write(35, "current", "put.2", seq=9))


@pytest.mark.parametrize(
    ("tamper", "kinds"),
    [
        (unread, {"not read": 1}),
        (unread_and_gone, {"server lost": 1}),
        (unsure_but_stored_unread, {"not read": 1}),
        (twice, {"read twice": 1}),
        (twice_in_two_batches, {"read twice": 1}),
        (two_streams, {"not written": 1}),
        (swapped, {"out of order": 2}),
        (swapped_batches, {"out of order": 3}),
        (changed(-1, value=value_of(9) + b"x"), {"not written": 1, "not read": 1}),
        (changed(-1, value=value_of(1)), {"not written": 1, "not read": 1}),
        (changed(-1, key="put.1"), {"not written": 1, "not read": 1}),
        (changed(-1, seq=10), {"not written": 1, "not read": 1}),
        (changed(-1, operation=DEL, value=None), {"not written": 1, "not read": 1}),
        (invented_marker, {"not written": 1}),
        (unsure_marker_twice, {"not written": 1}),
        (another_replay, {"replayed": 1}),
        (row_missing_in_table, {"unequal": 1}),
        (row_too_many_in_table, {"unequal": 1}),
        (old_row_in_table, {"unequal": 1}),
        (lost_by_the_server, {"server lost": 1, "loss unnoticed": 1}),
        (lost_by_the_server_in_bucket, {"server lost": 2}),
    ],
    ids=lambda one: one.__name__ if callable(one) else None,
)
def test_the_oracle_finds(tamper: Callable[[Evidence], None], kinds: dict[str, int]) -> None:
    evidence = copy.deepcopy(sound())
    tamper(evidence)
    findings = judge(evidence)
    assert findings.counts == kinds, findings.examples


def test_what_is_superseded_is_still_due() -> None:
    """However often its key was written since."""
    evidence = sound()
    key = evidence.writes["stream"][0].key
    later = [Write(100 + i, "stream", key, seq=10 + i) for i in range(200)]
    evidence.writes["stream"] += later
    evidence.held["stream"] += [entry(write) for write in later]
    rows = evidence.attempts["stream"][2][-1]
    rows += [replace(entry(write), created=rows[-1].created) for write in later]
    assert not judge(evidence).counts
    del rows[-150:-100]
    assert judge(evidence).counts == {"not read": 50}


def test_a_query_that_stopped_for_data_loss_owes_nothing_later() -> None:
    evidence = sound()
    lost_by_the_server(evidence)
    evidence.held["full"].append(Entry(10, "put.9", PUT, value_of(9)))
    evidence.stopped.add("full")
    assert set(judge(evidence).counts) == {"server lost"}


# What is collected


def test_only_whole_attempts_count_and_partitions_keep_their_order(tmp_path: Path) -> None:
    def part(attempt: str, number: int, *sequences: int, whole: bool = True) -> None:
        place = tmp_path / "stream" / "00000000" / attempt
        place.mkdir(parents=True, exist_ok=True)
        when = pa.array([0] * len(sequences), pa.timestamp("us", tz="UTC"))
        columns = {
            "sequence": pa.array(sequences, pa.int64()),
            "subject": [f"events.put.{seq}" for seq in sequences],
            "data": [b"x"] * len(sequences),
            "stream_created": when,
        }
        pq.write_table(pa.table(columns), place / f"part-{number:05}-abc.snappy.parquet")
        if whole:
            (place / "_SUCCESS").touch()

    part("1000", 0, 1, 2, whole=False)
    part("1001", 1, 3)
    part("1001", 0, 1, 2)
    (tmp_path / "stream" / "00000001" / "1002").mkdir(parents=True)  # nothing of it was written

    found = collect.attempts(tmp_path, "stream")

    assert list(found) == [0]
    assert [[row.seq for row in rows] for rows in found[0]] == [[1, 2, 3]]
    assert found[0][0][0].key == "put.1"


def test_failures_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    said = [
        {"event": "started", "serial": 1},
        {"event": "batch", "query": "full", "batch": 0, "start": 0, "end": 9, "rows": 9},
        {"event": "failed", "query": "full", "text": "nats_stream_source.errors.ConnectError: no"},
        {"event": "failed", "query": "stream", "text": "x.DataLossError: gone"},
        {"event": "failed", "query": "current", "text": "KeyError: 'Nats'"},
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in said) + '{"event": "ba')

    events = collect.events(path)

    assert events.failures == {"ConnectError": 1, "unexpected": 1}
    assert list(events.lost) == ["stream"]
    assert len(events.unexpected) == 1
    assert events.rows == {"full": 9}
    assert not collect.lively(path, 1)


def test_a_worker_that_grows_is_seen() -> None:
    def life(*worker: float) -> list[tuple[int, float, Memory]]:
        return [(1, 5.0 * i, Memory(50, 900, one, 3)) for i, one in enumerate(worker)]

    assert growth(life(*[60, 90, *[100] * 60])) is None
    assert growth(life(*range(100, 200))) is not None
    assert growth(life(*range(100, 130))) is None  # it did not live for long enough to tell


# All of it


@pytest.mark.faults
def test_a_short_soak_passes_and_what_is_missing_would_be_seen() -> None:
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
    assert judge(evidence).counts["not read"] == 1
    attempts[-1].insert(strict, removed)
    attempts[-1].insert(strict, removed)
    assert judge(evidence).counts["read twice"] == 1, batch
    attempts[-1].pop(strict)
    assert not judge(evidence).counts
    clean(outcome)
