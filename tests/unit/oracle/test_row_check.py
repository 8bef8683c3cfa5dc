"""The row check reports wrong rows, and excuses revisions that the bucket removed."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.oracle.row_check import check_batches, check_rows
from tests.support.oracle.rows import Marker, Row, Written
from tests.support.query_driver.driver import MicroBatch

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
