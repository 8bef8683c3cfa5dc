"""The ledger of writes and its values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.support.oracle.ledger import (
    PUT,
    AckCounter,
    Ledger,
    Write,
    number_of,
    read_ledger,
    value_of,
)


def test_ledger_separates_acknowledged_from_unsure_writes(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = Ledger(path)
    for number in (1, 2, 3):
        ledger.sent(Write(number, "full", f"put.{number}", PUT, 45 * (number == 3)))
    ledger.acked(2, 17)
    ledger.unsure(1, TimeoutError())
    ledger.close()
    with path.open("a") as file:
        file.write("ack\t3\t18")  # the generator was killed while it wrote this line

    writes = read_ledger(path)
    assert [replace(one, sent_at=0.0, acked_at=0.0) for one in writes] == [
        Write(1, "full", "put.1"),
        Write(2, "full", "put.2", seq=17),
        Write(3, "full", "put.3", ttl=45),
    ]
    assert 0 < writes[0].sent_at <= writes[1].sent_at <= writes[1].acked_at
    assert not writes[0].acked_at


def test_acks_are_counted_while_the_ledger_grows(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    acks = AckCounter(path)
    assert not acks.update()
    ledger = Ledger(path)
    for number, source in enumerate(("full", "full", "stream", "current"), 1):
        ledger.sent(Write(number, source, "put.1", PUT))
    ledger.acked(1, 10)
    ledger.unsure(2, TimeoutError())
    assert acks.update() == {"full": 1}
    with path.open("a") as file:
        file.write("ack\t3")
    assert acks.update() == {"full": 1}
    with path.open("a") as file:
        file.write("\t11\t5.0\n")
    ledger.acked(4, 12)
    ledger.close()
    assert acks.update() == {"full": 1, "stream": 1, "current": 1}


def test_value_has_number_only_if_complete() -> None:
    number = 997 * 3
    value = value_of(number)
    assert number_of(value) == number
    assert number_of(value[:-1]) is None
    assert number_of(value + b"x") is None
    assert number_of(b"x" + value) is None
