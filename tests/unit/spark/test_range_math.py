"""The planner's arithmetic without a server: shapes of streams, limits in bytes, positions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.spark.planning.range_math import (
    EVEN,
    RangeLimit,
    Shape,
    first_after,
    should_advance,
)
from tests.unit.spark.range_searches import search_result


@pytest.mark.parametrize(
    ("sequences", "messages", "even"),
    [
        (0, 0, True),
        (100, 100, True),
        (100, 200, True),  # does not occur, but must not fail
        (100, 0, True),
        (1000, 999, False),
        (10_000_000, 1_000_000, False),
        (1 << 62, 1, False),
    ],
)
def test_shape_of_a_stream(sequences: int, messages: int, even: bool) -> None:
    shape = Shape.of(sequences, messages)
    assert (shape == EVEN) is even
    if not even:  # the density falls from 1; its integral is the number of messages
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


@pytest.mark.parametrize(
    ("rows", "nbytes", "mean", "limit"),
    [
        (None, None, 100.0, None),
        (7, None, 100.0, 7),
        (None, 1000, 100.0, 10),
        (7, 1000, 100.0, 7),
        (70, 1000, 100.0, 10),
        (None, 1000, 3000.0, 1),  # one row is read even if it is larger
        (None, 1000, 0.0, 1000),  # an empty stream
    ],
)
def test_row_limit(rows: int | None, nbytes: int | None, mean: float, limit: int | None) -> None:
    assert RangeLimit(rows, nbytes).rows(mean) == limit


@given(low=st.integers(1, 50), size=st.integers(0, 50), point=st.integers(0, 120))
def test_first_after(low: int, size: int, point: int) -> None:
    high = low + size
    assert search_result(first_after(low, high), lambda seq: seq > point) == min(
        max(point + 1, low), high + 1
    )


@pytest.mark.parametrize(
    ("position", "first_seq", "last_seq", "moves"),
    [
        (100, 1, 100, False),  # no new message
        (100, 1, 101, False),  # in the newer half
        (100, 1, 199, False),
        (100, 1, 200, True),  # in the older half
        (100, 90, 111, True),  # retention approaches the position
        (100, 500, 600, True),  # retention has passed the position
        (0, 1, 1, True),
    ],
)
def test_moves_on(position: int, first_seq: int, last_seq: int, moves: bool) -> None:
    assert should_advance(position, first_seq, last_seq) is moves
