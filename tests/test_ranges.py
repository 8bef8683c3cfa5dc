"""The planner's arithmetic, without a server."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.source.ranges import (
    BYTES_PER_SPLIT,
    EVEN,
    ROWS_PER_SPLIT,
    Shape,
    borders,
    first_after,
    limited_end,
    moves_on,
    row_limit,
    split_count,
)

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


def ask_limit(
    stored: list[int], start: int, end: int, limit: int, shape: Shape = EVEN
) -> tuple[int, int, int]:
    """(limited end, rows, number of questions) over a stream that holds ``stored``."""
    asked: list[int] = []

    def rows_after(seq: int) -> int:
        assert start <= seq < end
        asked.append(seq)
        return sum(1 for s in stored if seq < s <= end)

    return (*answered(limited_end(start, end, limit, shape=shape), rows_after), len(asked))


def test_rows_behind_the_end_make_no_range_full() -> None:
    """What is written while AvailableNow runs is counted too, and lies behind its target."""
    stored = [*range(10, 9001, 10), *range(9001, 29001)]

    def rows_after(seq: int) -> int:
        return sum(1 for s in stored if s > seq)

    shape = Shape.of(29_000, len(stored))
    start, held = 0, []
    while start < 9000:
        total = rows_after(start)
        questions = limited_end(start, 9000, 50, shape=shape, total=total, behind=20_000)
        end, _ = answered(questions, rows_after)
        held.append(total - rows_after(end))
        start = end
    assert sum(held) == 900
    assert max(held) <= 50
    assert len(held) < 25


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


@given(missing=st.sets(st.integers(1, 300), max_size=60), limit=st.integers(3, 200))
def test_where_questions_would_not_make_ranges_fewer_there_are_none(
    missing: set[int], limit: int
) -> None:
    stored = [s for s in range(1, 301) if s not in missing]
    start = 0
    while start < 300:
        sequences, rows = 300 - start, sum(1 for s in stored if s > start)
        asked: list[int] = []

        def answer(seq: int, asked: list[int] = asked) -> int:
            asked.append(seq)
            return sum(1 for s in stored if s > seq)

        questions = limited_end(start, 300, limit, gaps=sequences - rows)
        limited, most = answered(questions, answer)
        assert start < limited
        assert sum(1 for s in stored if start < s <= limited) <= most <= limit
        if math.ceil(sequences / limit) <= math.ceil(rows / (0.9 * limit)):
            assert not asked
        start = limited


def test_a_total_tells_that_few_sequences_have_no_row() -> None:
    stored = [s for s in range(1, 1001) if s % 20]
    assert ask_limit(stored, 0, 1000, 100) == (100, 100, 1)


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


def test_a_total_that_is_known_is_not_asked() -> None:
    stored = list(range(1, 101))
    asked: list[int] = []

    def rows_after(seq: int) -> int:
        asked.append(seq)
        return sum(1 for one in stored if one > seq)

    limited, rows = answered(limited_end(0, 100, 10, total=100), rows_after)
    assert (limited, rows) == (10, 10)
    assert 0 not in asked
    assert answered(limited_end(0, 1000, 10, total=7), rows_after) == (1000, 7)


def test_a_limit_below_one_row_is_refused() -> None:
    with pytest.raises(ValueError, match="less than one"):
        next(limited_end(0, 10, 0))


# -- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sequences", "messages", "even"),
    [
        (0, 0, True),
        (100, 100, True),
        (100, 200, True),  # never, but no reason to fail
        (100, 0, True),
        (1000, 999, False),
        (10_000_000, 1_000_000, False),
        (1 << 62, 1, False),
    ],
)
def test_shape_of_a_stream(sequences: int, messages: int, even: bool) -> None:
    shape = Shape.of(sequences, messages)
    assert (shape == EVEN) is even
    if not even:  # the density falls from 1 so that all is accounted for
        assert shape.decay > 0
        total = -math.expm1(-shape.decay * sequences) / shape.decay
        assert total == pytest.approx(messages, rel=1e-3)


@given(
    low=st.integers(0, 1 << 50),
    length=st.integers(2, 1 << 50),
    share=st.floats(-1, 2),
    left=st.floats(0.0001, 1),
)
def test_what_lies_between_is_between(low: int, length: int, share: float, left: float) -> None:
    shape = Shape.of(length, max(1, int(left * length)))
    assert low < shape.between(low, low + length, share) < low + length
    assert low < shape.between(low, low + length, 0.0) <= low + length // 2 + 1


def overwritten(writes: int, keys: int, seed: int = 1) -> list[int]:
    """The sequences that are left when ``keys`` keys are written at random."""
    chance = random.Random(seed)
    return sorted({chance.randrange(keys): seq for seq in range(1, writes + 1)}.values())


def test_a_bucket_that_is_overwritten_at_random_is_guessed_at_once() -> None:
    stored = overwritten(100_000, 10_000)
    end = stored[-1]
    shape = Shape.of(end - stored[0] + 1, len(stored))
    _, rows, asked = ask_limit(stored, stored[0] - 1, end, 2000, shape)
    assert 1800 <= rows <= 2000
    assert asked <= 3
    assert ask_limit(stored, stored[0] - 1, end, 2000)[2] > asked


# -- limits in bytes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "nbytes", "mean", "limit"),
    [
        (None, None, 100.0, None),
        (7, None, 100.0, 7),
        (None, 1000, 100.0, 10),
        (7, 1000, 100.0, 7),
        (70, 1000, 100.0, 10),
        (None, 1000, 3000.0, 1),  # a row is read though it is larger
        (None, 1000, 0.0, 1000),  # an empty stream
    ],
)
def test_row_limit(rows: int | None, nbytes: int | None, mean: float, limit: int | None) -> None:
    assert row_limit(rows, nbytes, mean) == limit


# -- splits ---------------------------------------------------------------------------------------

ROWS, BYTES = ROWS_PER_SPLIT, BYTES_PER_SPLIT


@pytest.mark.parametrize(
    ("sequences", "rows", "nbytes", "at_least", "cores", "splits"),
    [
        (1, 1, 10, 1, 8, 1),
        (ROWS, ROWS, 10, 1, 8, 1),
        (2 * ROWS, 2 * ROWS - 1, 10, 1, 8, 1),
        (2 * ROWS, 2 * ROWS, 10, 1, 8, 2),
        (100 * ROWS, 100 * ROWS, 10, 1, 8, 8),
        (100 * ROWS, 100, 10, 1, 8, 1),  # mostly holes
        (100, 100, 5 * BYTES, 1, 8, 5),
        (100, 100, 10, 3, 8, 3),
        (100, 100, 10, 30, 8, 30),
        (2, 2, 10, 30, 8, 2),
        (100 * ROWS, 100 * ROWS, 10, 3, 8, 8),
        (2, 2, 5 * BYTES, 1, 8, 2),
        (1, 0, 0, 1, 1, 1),
    ],
)
def test_split_count(
    sequences: int, rows: int, nbytes: int, at_least: int, cores: int, splits: int
) -> None:
    assert split_count(sequences, rows, nbytes, at_least=at_least, cores=cores) == splits


def cut(
    stored: list[int], start: int, end: int, parts: int, shape: Shape = EVEN
) -> tuple[list[int], int]:
    """The rows of each split, and the number of questions."""
    asked = 0

    def rows_after(sequences: list[int]) -> list[int]:
        nonlocal asked
        assert all(start < seq < end for seq in sequences)
        asked += len(sequences)
        return [sum(1 for one in stored if seq < one <= end) for seq in sequences]

    total = sum(1 for one in stored if start < one <= end)
    ends = answered(borders(start, end, parts, total, shape=shape), rows_after)
    edges = [start, *ends]
    return [
        sum(1 for one in stored if low < one <= high)
        for low, high in zip(edges, ends, strict=False)
    ], asked


STREAMS = {
    "dense": (list(range(1, 10_001)), 1.02),
    "every hundredth": (list(range(100, 1_000_001, 100)), 1.2),
    "overwritten at random": (overwritten(100_000, 10_000), 1.25),
    "two clusters": ([*range(1, 2001), *range(900_000, 908_000)], 1.6),
}


@pytest.mark.parametrize(("stored", "most"), STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("parts", [2, 3, 8, 64])
def test_splits_have_about_as_many_rows(stored: list[int], most: float, parts: int) -> None:
    start, end = stored[0] - 1, stored[-1]
    shape = Shape.of(end - start, len(stored))
    rows, asked = cut(stored, start, end, parts, shape)
    assert sum(rows) == len(stored)
    assert asked <= 49
    if parts <= 8:
        assert max(rows) <= most * len(stored) / parts


@given(
    start=st.integers(0, 1000),
    length=st.integers(1, 5000),
    parts=st.integers(1, 70),
    total=st.integers(0, 9000),
    messages=st.integers(0, 6000),
    answers=st.lists(st.none() | st.integers(-10, 9000), min_size=40, max_size=40),
)
def test_splits_cover_the_range_whatever_the_answers_are(
    start: int, length: int, parts: int, total: int, messages: int, answers: list[int | None]
) -> None:
    parts = min(parts, length)
    end = start + length
    given_answers = iter(answers)
    ends = answered(
        borders(start, end, parts, total, shape=Shape.of(length, messages)),
        lambda sequences: [next(given_answers) for _ in sequences],
    )
    assert len(ends) == parts
    assert ends[-1] == end
    assert all(low < high for low, high in itertools.pairwise([start, *ends]))


def test_no_time_to_ask_for_borders() -> None:
    asked: list[int] = []

    def nothing(sequences: list[int]) -> list[None]:
        asked.extend(sequences)
        return [None for _ in sequences]

    assert answered(borders(0, 100, 4, 50), nothing) == [24, 50, 74, 100]
    assert len(asked) == 1


def test_more_splits_than_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be cut into 4 splits"):
        next(borders(0, 3, 4, 3))


# -- positions ------------------------------------------------------------------------------------


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
