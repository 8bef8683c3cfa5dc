"""The end of a range with a row limit: at most the limit, in few requests, at a higher sequence."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.spark.planning.range_math import (
    Shape,
    limited_end,
)
from tests.unit.spark.range_searches import overwritten, search_limit, search_result


def test_rows_behind_the_end_make_no_range_full() -> None:
    """Messages written while AvailableNow runs are counted too, and follow its target."""
    stored = [*range(10, 9001, 10), *range(9001, 29001)]

    def rows_after(seq: int) -> int:
        return sum(1 for s in stored if s > seq)

    shape = Shape.of(29_000, len(stored))
    start, held = 0, []
    while start < 9000:
        total = rows_after(start)
        search = limited_end(start, 9000, 50, shape=shape, total=total, rows_beyond=20_000)
        end, _ = search_result(search, rows_after)
        held.append(total - rows_after(end))
        start = end
    assert sum(held) == 900
    assert max(held) <= 50
    assert len(held) < 25


LIMITS = {
    # stored, start, end, limit: limited end, rows, requests
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
    limited, rows, requests = search_limit(stored, start, end, limit)
    true_rows = sum(1 for s in stored if start < s <= limited)
    assert true_rows <= limit
    assert requests <= expected[2] + 10
    if expected[2] <= 1:
        assert (limited, rows, requests) == expected
    else:
        assert true_rows >= 0.9 * limit


def test_a_bucket_of_mostly_holes_is_cut_by_rows_not_by_sequences() -> None:
    stored = list(range(100, 1_000_001, 100))  # 10,000 rows in a million sequences
    limited, rows, requests = search_limit(stored, 0, 1_000_000, 1000)
    assert 900 <= rows <= 1000
    assert rows == sum(1 for s in stored if s <= limited)
    assert requests <= 12


@given(missing=st.sets(st.integers(1, 300), max_size=60), limit=st.integers(3, 200))
def test_where_questions_would_not_make_ranges_fewer_there_are_none(
    missing: set[int], limit: int
) -> None:
    stored = [s for s in range(1, 301) if s not in missing]
    start = 0
    while start < 300:
        sequences, rows = 300 - start, sum(1 for s in stored if s > start)
        requests: list[int] = []

        def respond(seq: int, requests: list[int] = requests) -> int:
            requests.append(seq)
            return sum(1 for s in stored if s > seq)

        search = limited_end(start, 300, limit, gaps=sequences - rows)
        limited, upper_bound = search_result(search, respond)
        assert start < limited
        assert sum(1 for s in stored if start < s <= limited) <= upper_bound <= limit
        if math.ceil(sequences / limit) <= math.ceil(rows / (0.9 * limit)):
            assert not requests
        start = limited


def test_a_total_tells_that_few_sequences_have_no_row() -> None:
    stored = [s for s in range(1, 1001) if s % 20]
    assert search_limit(stored, 0, 1000, 100) == (100, 100, 1)


def test_holes_in_one_cluster() -> None:
    stored = [*range(1, 50), *range(1_000_000, 1_002_000)]
    limited, rows, requests = search_limit(stored, 0, 1_002_000, 1000)
    assert rows <= 1000
    assert requests <= 12
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
    limited, rows, requests = search_limit(stored, start, end, limit)
    assert start < limited <= end
    true_rows = sum(1 for s in stored if start < s <= limited)
    assert true_rows <= rows <= max(limit, length if length <= limit else limit)
    assert true_rows <= limit
    assert requests <= 12


@given(
    length=st.integers(2, 5000),
    limit=st.integers(1, 300),
    answers=st.lists(st.integers(0, 6000), min_size=12, max_size=12),
)
def test_answers_that_contradict_each_other_still_move_on(
    length: int, limit: int, answers: list[int]
) -> None:
    """Responses have different times while other clients write and the server compacts."""
    given_answers = iter(answers)
    limited, _ = search_result(limited_end(0, length, limit), lambda seq: next(given_answers))
    assert 0 < limited <= length


def test_no_time_for_questions() -> None:
    assert search_result(limited_end(10, 1000, 7), lambda seq: None) == (17, 7)
    first = iter([500, None])
    assert search_result(limited_end(10, 1000, 7), lambda seq: next(first)) == (17, 7)


def test_a_total_that_is_known_is_not_asked() -> None:
    stored = list(range(1, 101))
    requests: list[int] = []

    def rows_after(seq: int) -> int:
        requests.append(seq)
        return sum(1 for one in stored if one > seq)

    limited, rows = search_result(limited_end(0, 100, 10, total=100), rows_after)
    assert (limited, rows) == (10, 10)
    assert 0 not in requests
    assert search_result(limited_end(0, 1000, 10, total=7), rows_after) == (1000, 7)


def test_a_limit_below_one_row_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 row"):
        next(limited_end(0, 10, 0))


def test_a_bucket_that_is_overwritten_at_random_is_guessed_at_once() -> None:
    stored = overwritten(100_000, 10_000)
    end = stored[-1]
    shape = Shape.of(end - stored[0] + 1, len(stored))
    _, rows, requests = search_limit(stored, stored[0] - 1, end, 2000, shape)
    assert 1800 <= rows <= 2000
    assert requests <= 3
    assert search_limit(stored, stored[0] - 1, end, 2000)[2] > requests
