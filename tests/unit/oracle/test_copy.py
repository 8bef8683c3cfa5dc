"""The oracle of a copied stream finds what is missing, stored twice, or not from the stream."""

from __future__ import annotations

from tests.support.oracle.copy_oracle import compare_copy
from tests.support.oracle.evidence import Entry
from tests.support.oracle.ledger import PUT, value_of

MESSAGES = [Entry(seq, f"put.{seq % 2}", PUT, value_of(seq)) for seq in range(1, 5)]
COPIES = [Entry(seq + 10, entry.key, PUT, entry.value) for seq, entry in enumerate(MESSAGES)]


def test_anomalies_of_copy_are_found() -> None:
    assert not compare_copy(MESSAGES, COPIES).counts
    other = Entry(99, "put.1", PUT, value_of(99))
    counts = compare_copy(MESSAGES, [*COPIES[:-1], COPIES[1], other]).counts
    assert counts == {"not read": 1, "read twice": 1, "not written": 1}
