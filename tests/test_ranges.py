"""The planner's arithmetic, without a server."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.source.ranges import first_after, limited_end, moves_on

T = TypeVar("T")


def answered(questions: Generator[int, Any, T], answer: Callable[[int], Any]) -> T:
    """Run a question generator to its result."""
    try:
        question = next(questions)
        while True:
            question = questions.send(answer(question))
    except StopIteration as stop:
        result: T = stop.value
        return result


def ask_limit(stored: list[int], start: int, end: int, limit: int) -> tuple[int, int, int]:
    """(limited end, rows, number of questions) over a stream that holds ``stored``."""
    asked: list[int] = []

    def rows_after(seq: int) -> int:
        assert start <= seq < end
        asked.append(seq)
        return sum(1 for s in stored if seq < s <= end)

    return (*answered(limited_end(start, end, limit), rows_after), len(asked))


LIMITS = {
    # stored, start, end, limit: limited end, rows, questions
    "fewer sequences than the limit: no question": ([1, 2, 3], 0, 3, 5, (3, 3, 0)),
    "as many as the limit: no question": ([1, 2, 3], 0, 3, 3, (3, 3, 0)),
    "fewer rows than the limit: one question": ([1, 90], 0, 100, 5, (100, 2, 1)),
    "dense": (list(range(1, 101)), 0, 100, 10, (10, 10, 2)),
    "one row a batch, dense": (list(range(1, 101)), 50, 100, 1, (51, 1, 3)),
}


@pytest.mark.parametrize(
    ("stored", "start", "end", "limit", "expected"), LIMITS.values(), ids=LIMITS
)
def test_limited_end(
    stored: list[int], start: int, end: int, limit: int, expected: tuple[int, int, int]
) -> None:
    limited, rows, asked = ask_limit(stored, start, end, limit)
    true_rows = sum(1 for s in stored if start < s <= limited)
    assert true_rows <= limit
    assert asked <= expected[2] + 10
    if expected[2] <= 1:
        assert (limited, rows, asked) == expected
    else:
        assert true_rows >= 0.9 * limit


def test_a_bucket_of_mostly_holes_is_cut_by_rows_not_by_sequences() -> None:
    stored = list(range(100, 1_000_001, 100))  # 10,000 rows in a million sequences
    limited, rows, asked = ask_limit(stored, 0, 1_000_000, 1000)
    assert 900 <= rows <= 1000
    assert rows == sum(1 for s in stored if s <= limited)
    assert asked <= 12


def test_holes_in_one_cluster() -> None:
    stored = [*range(1, 50), *range(1_000_000, 1_002_000)]
    limited, rows, asked = ask_limit(stored, 0, 1_002_000, 1000)
    assert rows <= 1000
    assert asked <= 12
    assert limited >= 1000


@given(
    stored=st.lists(st.integers(1, 3000), unique=True, max_size=300),
    start=st.integers(0, 2000),
    length=st.integers(1, 3000),
    limit=st.integers(1, 200),
)
def test_a_limit_is_never_exceeded_and_always_moves_on(
    stored: list[int], start: int, length: int, limit: int
) -> None:
    end = start + length
    limited, rows, asked = ask_limit(stored, start, end, limit)
    assert start < limited <= end
    true_rows = sum(1 for s in stored if start < s <= limited)
    assert true_rows <= rows <= max(limit, length if length <= limit else limit)
    assert true_rows <= limit
    assert asked <= 12


@given(
    length=st.integers(2, 5000),
    limit=st.integers(1, 300),
    answers=st.lists(st.integers(0, 6000), min_size=12, max_size=12),
)
def test_answers_that_contradict_each_other_still_move_on(
    length: int, limit: int, answers: list[int]
) -> None:
    """Ranks are of different moments while others write and the bucket compacts."""
    given_answers = iter(answers)
    limited, _ = answered(limited_end(0, length, limit), lambda seq: next(given_answers))
    assert 0 < limited <= length


def test_no_time_for_questions() -> None:
    assert answered(limited_end(10, 1000, 7), lambda seq: None) == (17, 7)
    first = iter([500, None])
    assert answered(limited_end(10, 1000, 7), lambda seq: next(first)) == (17, 7)


def test_a_limit_below_one_row_is_refused() -> None:
    with pytest.raises(ValueError, match="less than one"):
        next(limited_end(0, 10, 0))


@given(low=st.integers(1, 50), size=st.integers(0, 50), point=st.integers(0, 120))
def test_first_after(low: int, size: int, point: int) -> None:
    high = low + size
    assert answered(first_after(low, high), lambda seq: seq > point) == min(
        max(point + 1, low), high + 1
    )


@pytest.mark.parametrize(
    ("position", "first_seq", "last_seq", "moves"),
    [
        (100, 1, 100, False),  # nothing new at all
        (100, 1, 101, False),  # in the newer half
        (100, 1, 199, False),
        (100, 1, 200, True),  # the older half begins
        (100, 90, 111, True),  # retention comes near
        (100, 500, 600, True),  # retention has passed it
        (0, 1, 1, True),
    ],
)
def test_moves_on(position: int, first_seq: int, last_seq: int, moves: bool) -> None:
    assert moves_on(position, first_seq, last_seq) is moves
