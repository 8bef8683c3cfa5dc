"""The row check reports wrong rows, and excuses revisions that the bucket removed."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.support.oracle.row_check import check_batches, check_rows
from tests.support.oracle.rows import Marker, Row, Written
from tests.support.query_driver.micro_batch import MicroBatch

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


def test_what_is_right() -> None:
    check([1, 2, 3, 4, 5, 6, 7], MicroBatch(0, 7, False, 7))
    check([2, 4, 5, 6, 7], LIST, REST)
    check_rows(rows(2, 4, 5, 6, 7), ACKNOWLEDGED, ATTEMPTED)


def test_what_was_superseded_before_it_was_read() -> None:
    check([4, 5, 6, 7], MicroBatch(0, 4, True, 5), REST)
    check([2, 5, 6, 7], MicroBatch(0, 4, True, 6), REST)
    check([1, 3, 4, 6, 7], MicroBatch(0, 7, False, 7))  # by the PURGE
    check([6, 7], MicroBatch(0, 7, False, 7), history=1)
    check([4, 6, 7], MicroBatch(0, 7, False, 7), history=2)


@pytest.mark.parametrize(
    ("read", "done", "history"),
    [
        ([4, 5, 6, 7], [LIST, REST], 64),  # a key of the list
        ([2, 5, 6, 7], [LIST, REST], 64),  # a marker of the list
        ([2, 4, 5, 7], [LIST, REST], 64),  # a change
        ([2, 4, 5, 6], [LIST, REST], 64),  # the last one
        ([6, 7], [MicroBatch(0, 4, False, 4), REST], 1),  # superseded later only
        ([2, 3, 6, 7], [MicroBatch(0, 7, False, 7)], 2),  # not yet superseded as often
    ],
)
def test_what_did_not_come(read: list[int], done: list[MicroBatch], history: int) -> None:
    with pytest.raises(AssertionError, match=r"^not read \("):
        check(read, *done, history=history)


def test_a_list_that_went_on_by_sequence() -> None:
    with pytest.raises(AssertionError, match=r"^superseded \(1\)"):
        check([2, 3, 4, 5, 6, 7], LIST, REST)


def test_not_all_was_read() -> None:
    with pytest.raises(AssertionError, match="last writes were not read"):
        check([2, 4], LIST)
    with pytest.raises(AssertionError, match="not adjacent"):
        check([2, 4, 6, 7], LIST, MicroBatch(5, 7, False, 7))


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (rows(2, 2), "read twice"),
        (rows(4, 2), "out of order"),
        ([Row(2, "b", b"5")], "another row"),
        ([Row(2, "a", b"2")], "another row"),
        ([Row(4, "a", None, "PURGE")], "another row"),
        ([Row(4, "a", None)], "another row"),
        ([Row(4, "a", b"", "DEL")], "another row"),
        ([Row(2, "b", None, "DEL")], "another row"),
        ([Row(9, "b", b"9")], "never written"),
        ([Row(9, "b", None, "DEL")], "never written"),
        ([*rows(2), Row(9, "b", b"2")], "at two sequences"),
    ],
)
def test_rows_that_nobody_wrote(wrong: list[Row], what: str) -> None:
    with pytest.raises(AssertionError, match=what):
        check_rows(wrong, ACKNOWLEDGED, ATTEMPTED)


def test_a_write_that_was_not_acknowledged_may_be_there() -> None:
    read = [*rows(2), Row(9, "b", b"unsure"), Row(10, "b", None, "DEL")]
    unsure: list[Written] = [("b", b"unsure"), ("b", Marker.DEL)]
    check_rows(read, ACKNOWLEDGED, ATTEMPTED + Counter(unsure))


@pytest.mark.parametrize(
    ("unsure", "known", "history", "excused"),
    [
        ([("a", b"8")], 9, 1, True),
        ([("a", b"8")], 7, 1, False),  # it came later
        ([("b", b"8")], 9, 1, False),  # of another key
        ([], 9, 1, False),
        ([("a", b"8")], 9, 2, False),  # not superseded as often
        ([("a", b"8"), ("a", b"9")], 9, 2, True),
        ([("a", b"8"), ("a", b"9")], 8, 2, False),  # one sequence for both
        ([("a", b"8"), ("a", Marker.PURGE)], 8, 64, True),
        ([("a", Marker.DEL)], 9, 1, True),  # as another one that was acknowledged
    ],
)
def test_a_write_that_was_not_acknowledged_may_have_superseded_another(
    unsure: list[Written], known: int, history: int, excused: bool
) -> None:
    """It is not seen any more when the next micro-batch is read, nor is what it removed: 6."""
    acknowledged = {**ACKNOWLEDGED, 10: ("a", b"10")}
    read = [*rows(7), Row(10, "a", b"10")]
    done = [MicroBatch(0, 7, False, known), MicroBatch(7, 10, False, 10)]
    attempted = Counter([*acknowledged.values(), *unsure])
    found = (
        contextlib.nullcontext()
        if excused
        else pytest.raises(AssertionError, match=r"^not read \(")
    )
    with found:
        check_batches(read, acknowledged, attempted, history, done)
