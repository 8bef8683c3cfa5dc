"""The soak: its ledger, its schedule, and short runs of all of it."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
from soak.ledger import PUT, Acknowledged, Ledger, Write, number_of, read_ledger, value_of
from soak.oracle import judge
from soak.outcome import Settings, summary
from soak.run import clean, run
from soak.schedule import BETWEEN_KINDS, DRIVER_KINDS, POWER_LOSS, SERVER_KINDS, schedule

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

    writes = read_ledger(path)
    assert [replace(one, sent_at=0.0, acked_at=0.0) for one in writes] == [
        Write(1, "full", "put.1"),
        Write(2, "full", "put.2", seq=17),
        Write(3, "full", "put.3", ttl=45),
    ]
    assert 0 < writes[0].sent_at <= writes[1].sent_at <= writes[1].acked_at
    assert not writes[0].acked_at


def test_acknowledgements_are_counted_while_they_come(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    acknowledged = Acknowledged(path)
    assert not acknowledged.look()
    ledger = Ledger(path)
    for number, place in enumerate(("full", "full", "stream", "current"), 1):
        ledger.send(Write(number, place, "put.1", PUT))
    ledger.ack(1, 10)
    ledger.lose(2, TimeoutError())
    assert acknowledged.look() == {"full": 1}
    with path.open("a") as file:
        file.write("ack\t3")
    assert acknowledged.look() == {"full": 1}
    with path.open("a") as file:
        file.write("\t11\t5.0\n")
    ledger.ack(4, 12)
    ledger.close()
    assert acknowledged.look() == {"full": 1, "stream": 1, "current": 1}


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


@pytest.mark.faults
def test_where_the_power_is_lost_every_query_stops() -> None:
    lines: list[str] = []
    settings = Settings(seed=3, minutes=0.4, topology="power-loss", rate=150, spark=False)
    outcome = run(settings, lines.append)
    result = summary(outcome)
    assert not result["anomalies"], (result, lines)
    assert result["faults"][POWER_LOSS] == 1
    assert result["data_loss"].keys() == {"full", "current", "stream"}
    # What was acknowledged is gone, and what had been read of it is in the sinks.
    loss, evidence = outcome.loss, outcome.evidence
    assert loss is not None
    assert evidence is not None
    assert result["excused"]["lost on purpose"] > 0
    lost = {
        write.seq
        for write in evidence.writes["stream"]
        if write.seq is not None and loss.takes(write) and write.acked_at < loss.at
    }
    rows = evidence.attempts["stream"]
    batch, row = next(
        (batch, row)
        for batch, attempts in rows.items()
        for row in attempts[-1]
        if row.seq in lost and row.seq <= evidence.readings["stream"].through
    )
    without = copy.deepcopy(evidence)
    without.attempts["stream"][batch][-1].remove(row)
    assert judge(without).counts["not read"] == 1
    clean(outcome)
