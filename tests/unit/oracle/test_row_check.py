"""The row check reports wrong rows, and excuses revisions that the bucket removed."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence

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


def check(read: Sequence[int], *done: MicroBatch, history: int = 64) -> None:
    check_batches(rows(*read), ACKNOWLEDGED, ATTEMPTED, history, done)


LIST = MicroBatch(0, 4, True, 4)
REST = MicroBatch(4, 7, False, 7)


@pytest.mark.parametrize(
    ("read", "done", "history", "finding"),
    [
        ([4, 5, 6, 7], [LIST, REST], 64, r"^not read \("),  # a key of the last values
        ([2, 4, 5, 7], [LIST, REST], 64, r"^not read \("),  # a change
        ([2, 3, 6, 7], [MicroBatch(0, 7, False, 7)], 2, r"^not read \("),  # superseded once
        ([2, 3, 4, 5, 6, 7], [LIST, REST], 64, r"^superseded \(1\)"),
        ([2, 4], [LIST], 64, "last writes were not read"),
        ([2, 4, 6, 7], [LIST, MicroBatch(5, 7, False, 7)], 64, "not adjacent"),
    ],
)
def test_anomaly_of_micro_batches_is_found(
    read: list[int], done: list[MicroBatch], history: int, finding: str
) -> None:
    with pytest.raises(AssertionError, match=finding):
        check(read, *done, history=history)


@pytest.mark.parametrize(
    ("wrong", "finding"),
    [
        (rows(2, 2), "read twice"),
        (rows(4, 2), "out of order"),
        ([Row(2, "b", b"5")], "another row"),
        ([Row(4, "a", b"", "DEL")], "another row"),
        ([Row(9, "b", None, "DEL")], "never written"),
        ([*rows(2), Row(9, "b", b"2")], "at two sequences"),
    ],
)
def test_anomaly_of_rows_is_found(wrong: list[Row], finding: str) -> None:
    with pytest.raises(AssertionError, match=finding):
        check_rows(wrong, ACKNOWLEDGED, ATTEMPTED)


@pytest.mark.parametrize(("known", "excused"), [(9, True), (7, False)])
def test_unacknowledged_write_supersedes_only_if_stored_before_read(
    known: int, excused: bool
) -> None:
    acknowledged = {**ACKNOWLEDGED, 10: ("a", b"10")}
    read = [*rows(7), Row(10, "a", b"10")]
    done = [MicroBatch(0, 7, False, known), MicroBatch(7, 10, False, 10)]
    attempted = Counter([*acknowledged.values(), ("a", b"8")])
    missing = pytest.raises(AssertionError, match=r"^not read \(")
    with contextlib.nullcontext() if excused else missing:
        check_batches(read, acknowledged, attempted, 1, done)
