"""The oracle of a copied stream finds what is missing, stored twice, or not from the stream."""

from __future__ import annotations

import pytest

from tests.support.oracle.copy_oracle import compare_copy
from tests.support.oracle.evidence import Entry
from tests.support.oracle.ledger import PUT, value_of

MESSAGES = [Entry(seq, f"put.{seq % 2}", PUT, value_of(seq)) for seq in range(1, 5)]
COPIES = [Entry(seq + 10, entry.key, PUT, entry.value) for seq, entry in enumerate(MESSAGES)]


def test_a_copy_has_other_sequences() -> None:
    assert not compare_copy(MESSAGES, COPIES).counts


@pytest.mark.parametrize(
    ("copied", "kind"),
    [
        (COPIES[:-1], "not read"),
        ([*COPIES, COPIES[1]], "read twice"),
        ([*COPIES, Entry(99, "put.1", PUT, value_of(99))], "not written"),
    ],
)
def test_anomalies(copied: list[Entry], kind: str) -> None:
    assert compare_copy(MESSAGES, copied).counts == {kind: 1}
