"""The splits of a range: their number, and ends that give each about as many rows."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.spark.planning.range_math import (
    BYTES_PER_SPLIT,
    EVEN,
    ROWS_PER_SPLIT,
    Shape,
    split_count,
    split_ends,
)
from tests.unit.spark.range_searches import overwritten, search_result

ROWS, BYTES = ROWS_PER_SPLIT, BYTES_PER_SPLIT


@pytest.mark.parametrize(
    ("sequences", "rows", "nbytes", "at_least", "cores", "splits"),
    [
        (1, 1, 10, 1, 8, 1),
        (ROWS, ROWS, 10, 1, 8, 1),
        (2 * ROWS, 2 * ROWS - 1, 10, 1, 8, 1),
        (2 * ROWS, 2 * ROWS, 10, 1, 8, 2),
        (100 * ROWS, 100 * ROWS, 10, 1, 8, 8),
        (100 * ROWS, 100, 10, 1, 8, 1),  # mostly deleted sequences
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
    """Return the rows of each split, and the number of requested sequences."""
    requests = 0

    def rows_after(sequences: list[int]) -> list[int]:
        nonlocal requests
        assert all(start < seq < end for seq in sequences)
        requests += len(sequences)
        return [sum(1 for one in stored if seq < one <= end) for seq in sequences]

    total = sum(1 for one in stored if start < one <= end)
    ends = search_result(split_ends(start, end, parts, total, shape=shape), rows_after)
    edges = [start, *ends]
    return [
        sum(1 for one in stored if low < one <= high)
        for low, high in zip(edges, ends, strict=False)
    ], requests


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
    rows, requests = cut(stored, start, end, parts, shape)
    assert sum(rows) == len(stored)
    assert requests <= 49
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
    ends = search_result(
        split_ends(start, end, parts, total, shape=Shape.of(length, messages)),
        lambda sequences: [next(given_answers) for _ in sequences],
    )
    assert len(ends) == parts
    assert ends[-1] == end
    assert all(low < high for low, high in itertools.pairwise([start, *ends]))


def test_no_time_to_ask_for_borders() -> None:
    requests: list[int] = []

    def nothing(sequences: list[int]) -> list[None]:
        requests.extend(sequences)
        return [None for _ in sequences]

    assert search_result(split_ends(0, 100, 4, 50), nothing) == [24, 50, 74, 100]
    assert len(requests) == 1


def test_more_splits_than_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be cut into 4 splits"):
        next(split_ends(0, 3, 4, 3))
