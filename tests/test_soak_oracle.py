"""The soak's oracle finds each anomaly, and excuses what the ledger explains and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
from soak.findings import Entry, Evidence, Loss, Reading, same
from soak.ledger import DEL, PURGE, PUT, Write, value_of
from soak.oracle import judge


def wrote(
    number: int,
    place: str,
    key: str,
    operation: str = PUT,
    *,
    seq: int | None = None,
    ttl: int = 0,
    at: float | None = None,
) -> Write:
    """A write at second ``number``, or ``at``; its PubAck, if any, came at once."""
    at = float(number) if at is None else at
    return Write(number, place, key, operation, ttl, seq, at, 0.0 if seq is None else at + 0.1)


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
        wrote(1, "full", "put.1", seq=1),
        wrote(2, "full", "put.1", DEL, seq=2),
        wrote(3, "full", "purge.6", seq=3),  # rolled up before it was read
        wrote(4, "full", "purge.6", PURGE, seq=4),
        wrote(5, "full", "ttl.7", ttl=45, seq=5),  # expired before it was read
        wrote(6, "full", "put.1", at=61),  # unsure, and stored
        wrote(7, "full", "put.1", at=62),  # unsure, and not stored
        wrote(8, "full", "put.1", DEL, at=63),  # unsure, and stored
        wrote(9, "full", "put.2", seq=9, at=64),
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
    stream = [wrote(20 + i, "stream", "put.1", seq=i) for i in range(1, 7)]
    messages = [entry(write) for write in stream]
    current = [
        wrote(30, "current", "put.1", seq=1),
        wrote(31, "current", "put.1", seq=2),
        wrote(32, "current", "put.2", seq=3),
        wrote(33, "current", "put.2", DEL, seq=4),
        wrote(34, "current", "ttl.7", ttl=45, seq=5),  # its marker came and went unread
    ]
    return Evidence(
        writes={"full": full, "stream": stream, "current": current},
        held={"full": rows, "stream": messages, "current": [entry(w) for w in current[1::2]]},
        held_at=300,
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
        table=[entry(current[1]), entry(current[4])],
        reconciled=[entry(current[1])],
        reconciled_at=210,
        buckets=frozenset({"full", "current"}),
        readings={
            "full": Reading(9, spans=((6, 70), (9, 80))),
            "stream": Reading(6, spans=((3, 70), (6, 80))),
            "current": Reading(5, reports=(40, 50, 70, 200)),
        },
        stopped=set(),
    )


def reading(evidence: Evidence, place: str, **fields: object) -> None:
    evidence.readings[place] = replace(evidence.readings[place], **fields)  # type: ignore[arg-type]


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
        rows[row] = replace(rows[row], **fields)  # type: ignore[arg-type]

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
    assert evidence.reconciled
    evidence.reconciled.clear()


def row_too_many_in_table(evidence: Evidence) -> None:
    evidence.table.append(entry(evidence.writes["current"][2]))


def old_row_in_table(evidence: Evidence) -> None:
    evidence.table[0] = entry(evidence.writes["current"][0])


def lost_by_the_server(evidence: Evidence) -> None:
    evidence.held["full"] = evidence.held["full"][:-1]


def lost_by_the_server_in_bucket(evidence: Evidence) -> None:
    evidence.writes["current"].append(wrote(35, "current", "put.2", seq=9))


def unsure_value_that_nobody_holds(evidence: Evidence) -> None:
    full_rows(evidence).append(Entry(10, "put.1", PUT, value_of(7), 1))


def unsure_value_twice(evidence: Evidence) -> None:
    write = wrote(10, "full", "ttl.15", ttl=45, at=65)
    evidence.writes["full"].append(write)
    full_rows(evidence).extend(created([entry(write, 10), entry(write, 11)]))


def another_value_in_the_place_of_an_unsure_one(evidence: Evidence) -> None:
    evidence.held["full"][4] = replace(evidence.held["full"][4], value=value_of(999))
    full_rows(evidence)[0] = replace(full_rows(evidence)[0], value=value_of(999))


def unsure_value_in_the_place_of_an_acknowledged_one(evidence: Evidence) -> None:
    evidence.writes["full"].append(wrote(10, "full", "ttl.7", ttl=45, at=5))
    full_rows(evidence, 0).insert(3, Entry(5, "ttl.7", PUT, value_of(10), 1))


def another_value_in_the_bucket(evidence: Evidence) -> None:
    other = replace(evidence.held["current"][0], value=value_of(30))
    evidence.held["current"][0] = evidence.table[0] = other
    evidence.reconciled = [other]


def marker_of_nothing(evidence: Evidence) -> None:
    marker = Entry(10, "ttl.15", PURGE, None)
    full_rows(evidence).extend(created([marker]))
    evidence.held["full"] = [*evidence.held["full"], marker]


def marker_in_the_bucket_of_nothing(evidence: Evidence) -> None:
    evidence.held["current"].append(Entry(6, "ttl.15", PURGE, None, at=90))


def unread_before_it_expired(evidence: Evidence) -> None:
    reading(evidence, "full", spans=((5, 30), (6, 70), (9, 80)))


def unread_before_it_was_purged(evidence: Evidence) -> None:
    evidence.writes["full"][3] = wrote(4, "full", "purge.6", PURGE, seq=4, at=90)


def gone_before_it_expired(evidence: Evidence) -> None:
    evidence.held_at = 70


def row_stays_for_ever(evidence: Evidence) -> None:
    reading(evidence, "current", reports=tuple(range(40, 300, 10)))


def row_stays_long_after(evidence: Evidence) -> None:
    # A time without a micro-batch, but long after the marker must have come.
    reading(evidence, "current", reports=tuple(range(40, 270, 10)))
    evidence.held_at = 500


def row_stays_and_there_is_no_marker(evidence: Evidence) -> None:
    evidence.held_at = 110


def row_stays_though_its_marker_was_read(evidence: Evidence) -> None:
    evidence.held["current"].append(Entry(6, "ttl.7", PURGE, None, at=80))
    reading(evidence, "current", through=6)


def row_of_an_earlier_entry(evidence: Evidence) -> None:
    evidence.writes["current"].append(wrote(35, "current", "ttl.7", ttl=45, seq=6, at=60))
    reading(evidence, "current", reports=(40, 50, 70, 80, 90, 250))


def expired_row_after_reconcile(evidence: Evidence) -> None:
    assert evidence.reconciled
    evidence.reconciled.append(entry(evidence.writes["current"][4]))


def expired_row_whose_marker_was_there_to_reconcile(evidence: Evidence) -> None:
    evidence.held["current"].append(Entry(6, "ttl.7", PURGE, None, at=205))
    expired_row_after_reconcile(evidence)


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
        (lost_by_the_server_in_bucket, {"server lost": 1}),
        (unsure_value_that_nobody_holds, {"not written": 1}),
        (unsure_value_twice, {"not written": 1}),
        (another_value_in_the_place_of_an_unsure_one, {"not written": 1}),
        (unsure_value_in_the_place_of_an_acknowledged_one, {"not written": 1}),
        (another_value_in_the_bucket, {"server lost": 1, "not written": 1}),
        (marker_of_nothing, {"not written": 1}),
        (marker_in_the_bucket_of_nothing, {"not written": 1}),
        (unread_before_it_expired, {"not read": 1}),
        (unread_before_it_was_purged, {"not read": 1}),
        (gone_before_it_expired, {"server lost": 1, "unequal": 1}),
        (row_stays_for_ever, {"unequal": 1}),
        (row_stays_long_after, {"unequal": 1}),
        (row_stays_and_there_is_no_marker, {"unequal": 1}),
        (row_stays_though_its_marker_was_read, {"unequal": 1}),
        (row_of_an_earlier_entry, {"unequal": 1}),
        (expired_row_after_reconcile, {"unequal": 1}),
        (expired_row_whose_marker_was_there_to_reconcile, {"unequal": 1}),
    ],
    ids=lambda one: one.__name__ if callable(one) else None,
)
def test_the_oracle_finds(tamper: Callable[[Evidence], None], kinds: dict[str, int]) -> None:
    evidence = copy.deepcopy(sound())
    tamper(evidence)
    findings = judge(evidence)
    assert findings.counts == kinds, findings.examples


@pytest.mark.parametrize(("before", "kinds"), [(10, {}), (100, {"not read": 1})])
def test_an_unsure_purge_may_be_stored_late(before: float, kinds: dict[str, int]) -> None:
    """A server that hangs stores it when it goes on: after what another one took meanwhile."""
    evidence = sound()
    unread_before_it_was_purged(evidence)
    full = evidence.writes["full"]
    purge = wrote(0, "full", "purge.6", PURGE, seq=None)
    full.insert(0, replace(purge, sent_at=full[2].sent_at - before))
    findings = judge(evidence)
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
def test_a_marker_may_take_what_was_written_meanwhile(
    expired_at: float, marked: bool, sent_since: float, kinds: dict[str, int]
) -> None:
    """Its key's older entry expired, and the leader had not stored the newer one yet."""
    evidence = sound()
    evidence.writes["full"] += [
        wrote(10, "full", "ttl.8", ttl=45, seq=10, at=expired_at - 45),
        wrote(11, "full", "ttl.8", ttl=45, seq=11, at=64.5),
        wrote(12, "full", "put.3", seq=12, at=sent_since),
    ]
    rows = [entry(evidence.writes["full"][-1])]
    if marked:
        rows.append(Entry(13, "ttl.8", PURGE, None))
    older = entry(evidence.writes["full"][-3])
    evidence.attempts["full"][1][-1] += created([older, *rows])
    evidence.held["full"] += rows
    reading(evidence, "full", through=13, spans=((6, 70), (rows[-1].seq, 80)))
    findings = judge(evidence)
    assert {"not read": findings.counts["not read"]} == {"not read": 0, **kinds}, findings.examples


def test_what_is_superseded_is_still_due() -> None:
    """However often its key was written since."""
    evidence = sound()
    key = evidence.writes["stream"][0].key
    later = [wrote(100 + i, "stream", key, seq=10 + i) for i in range(200)]
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


# What is excused


def test_a_row_may_stay_until_its_marker_is_read() -> None:
    evidence = sound()
    evidence.held["current"].append(Entry(6, "ttl.7", PURGE, None, at=250))
    assert not judge(evidence).counts


def test_a_marker_may_be_still_to_come() -> None:
    evidence = sound()
    evidence.held_at, evidence.reconciled_at = 90, 75
    expired_row_after_reconcile(evidence)
    assert not judge(evidence).counts


def test_a_row_of_an_earlier_entry_may_stay_where_nothing_since_was_read() -> None:
    evidence = sound()
    evidence.writes["current"].append(wrote(35, "current", "ttl.7", ttl=45, seq=6, at=60))
    reading(evidence, "current", reports=(40, 50, 60, 250))
    assert not judge(evidence).counts


def test_what_was_overwritten_while_it_was_read_may_be_missed() -> None:
    evidence = sound()
    for number, at in ((35, 60), (36, 68)):
        write = wrote(number, "current", "ttl.7", ttl=45, seq=number - 29, at=at)
        evidence.writes["current"].append(write)
    reading(evidence, "current", reports=(40, 50, 66, 72, 250))
    assert not judge(evidence).counts


@pytest.mark.parametrize("at", [None, 215.0])
def test_a_reconciled_table_may_have_what_expired_since(at: float | None) -> None:
    evidence = sound()
    evidence.reconciled_at = 75 if at is None else 210
    if at is not None:
        evidence.held["current"].append(Entry(6, "ttl.7", PURGE, None, at=at))
    expired_row_after_reconcile(evidence)
    assert not judge(evidence).counts


def test_an_unsure_write_may_be_in_the_bucket() -> None:
    evidence = sound()
    write = wrote(35, "current", "put.1")
    evidence.writes["current"].append(write)
    evidence.held["current"][0] = evidence.table[0] = entry(write, 6)
    evidence.reconciled = [entry(write, 6)]
    assert not judge(evidence).counts


# A power loss


def bereaved() -> Evidence:
    """Three queries that stopped: at second 100 the server lost all but two messages of each."""
    evidence = Evidence(
        writes={
            "full": [],
            "stream": [
                *(wrote(n, "stream", "put.1", seq=n) for n in range(1, 7)),
                wrote(7, "stream", "put.1", seq=3, at=130),
                wrote(8, "stream", "put.1", seq=4, at=131),
            ],
            "current": [
                wrote(30, "current", "put.1", seq=1),
                wrote(31, "current", "put.2", seq=2),
                wrote(32, "current", "put.1", seq=3),
                wrote(33, "current", "put.3", seq=4),
                wrote(34, "current", "put.4", seq=5),  # not read any more
                wrote(35, "current", "put.1", seq=3, at=130),
            ],
        },
        held={"full": [], "stream": [], "current": []},
        held_at=300,
        attempts={"full": {}, "stream": {}},
        table=[],
        reconciled=None,
        reconciled_at=0,
        buckets=frozenset({"full", "current"}),
        readings={"stream": Reading(5, spans=((5, 20),)), "current": Reading(4)},
        stopped={"full", "stream", "current"},
        loss=Loss(100, {"full": 0, "stream": 2, "current": 2}),
    )
    stream, current = ([entry(w) for w in evidence.writes[p]] for p in ("stream", "current"))
    evidence.held["stream"] = [*stream[:2], *stream[6:]]
    evidence.held["current"] = [current[1], current[5]]
    evidence.attempts["stream"][0] = [created(stream[:5])]
    evidence.table = current[1:4]
    return evidence


def test_what_a_power_loss_takes_is_excused() -> None:
    findings = judge(bereaved())
    assert not findings.counts, findings.examples
    assert findings.excused == {"lost on purpose": 4 + 3}


@pytest.mark.parametrize(
    ("purged_at", "purge_seq", "kinds"),
    [
        (15, 4, {}),
        (25, 4, {"not read": 1}),  # it had been read by then
        (15, 2, {"not read": 1}),  # the loss did not take that one
        (110, 4, {"not read": 1}),  # nobody had written it when the query stopped
    ],
)
def test_what_a_purge_removed_may_be_back_unread(
    purged_at: float, purge_seq: int, kinds: dict[str, int]
) -> None:
    """The power loss took the purge, after the query had passed where its key's entry was."""
    evidence = bereaved()
    put = wrote(10, "full", "purge.6", seq=1)
    evidence.writes["full"] = [
        put,
        wrote(11, "full", "purge.6", PURGE, seq=purge_seq, at=purged_at),
        wrote(12, "full", "put.1", seq=3),
    ]
    evidence.held["full"] = [replace(entry(put), at=10)]
    evidence.attempts["full"][0] = [created([entry(evidence.writes["full"][2])])]
    evidence.readings["full"] = Reading(3, spans=((3, 20),))
    assert evidence.loss is not None
    evidence.loss.kept["full"] = 2
    findings = judge(evidence)
    assert {"not read": findings.counts["not read"]} == {"not read": 0, **kinds}, findings.examples


def unread_before_the_loss(evidence: Evidence) -> None:
    evidence.attempts["stream"][0][0].pop(3)


def unread_and_kept(evidence: Evidence) -> None:
    evidence.attempts["stream"][0][0].pop(1)


def read_after_the_loss(evidence: Evidence) -> None:
    evidence.attempts["stream"][0][0][2] = replace(entry(evidence.writes["stream"][6]), created=1)


def gone_though_kept(evidence: Evidence) -> None:
    evidence.held["stream"].pop(0)


def key_missing(evidence: Evidence) -> None:
    evidence.table = [row for row in evidence.table if row.key != "put.3"]


def key_of_the_day_before(evidence: Evidence) -> None:
    first, last = evidence.writes["current"][0], evidence.writes["current"][2]
    evidence.table = [entry(first) if same(last, row) else row for row in evidence.table]


def key_of_after_the_loss(evidence: Evidence) -> None:
    late, last = evidence.writes["current"][5], evidence.writes["current"][2]
    evidence.table = [entry(late) if same(last, row) else row for row in evidence.table]


@pytest.mark.parametrize(
    ("tamper", "kinds"),
    [
        (unread_before_the_loss, {"not read": 1}),
        (unread_and_kept, {"not read": 1}),
        (read_after_the_loss, {"not read": 1, "loss unnoticed": 1}),
        (gone_though_kept, {"server lost": 1}),
        (key_missing, {"unequal": 1}),
        (key_of_the_day_before, {"unequal": 1}),
        (key_of_after_the_loss, {"unequal": 1, "loss unnoticed": 1}),
    ],
    ids=lambda one: one.__name__ if callable(one) else None,
)
def test_a_query_that_stopped_owes_what_it_had_read(
    tamper: Callable[[Evidence], None], kinds: dict[str, int]
) -> None:
    evidence = bereaved()
    tamper(evidence)
    findings = judge(evidence)
    assert findings.counts == kinds, findings.examples


def test_an_unsure_write_may_be_why_a_stopped_query_has_no_row() -> None:
    evidence = bereaved()
    evidence.writes["current"].append(wrote(40, "current", "put.3", DEL))
    key_missing(evidence)
    assert not judge(evidence).counts
