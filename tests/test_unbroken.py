"""How far a range was read without a hole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.source.unbroken import Unbroken

CASES: dict[str, tuple[int, list[list[int]], int]] = {
    "nothing came": (5, [], 4),
    "an empty batch": (5, [[]], 4),
    "all of one batch": (5, [[5, 6, 7]], 7),
    "all of two": (5, [[5, 6], [7, 8]], 8),
    "a hole in a batch": (5, [[5, 6, 8, 9]], 6),
    "a hole between batches": (5, [[5, 6], [8]], 6),
    "what follows a hole does not close it": (5, [[5], [7], [8, 9]], 5),
    "a hole at the beginning": (5, [[6, 7]], 4),
    "what lies before the beginning": (5, [[3, 4, 5, 6]], 6),
}


@pytest.mark.parametrize(("first", "batches", "through"), CASES.values(), ids=CASES)
def test_through(first: int, batches: list[list[int]], through: int) -> None:
    unbroken = Unbroken(first)
    for batch in batches:
        unbroken.add(np.array(batch, dtype=np.int64))
    assert unbroken.through == through


@given(st.sets(st.integers(1, 30)), st.integers(1, 20), st.lists(st.integers(0, 30), max_size=5))
def test_as_one_by_one(came: set[int], first: int, cuts: list[int]) -> None:
    expected = first - 1
    while expected + 1 in came:
        expected += 1
    unbroken = Unbroken(first)
    for batch in np.split(np.array(sorted(came), dtype=np.int64), sorted(cuts)):
        unbroken.add(batch)
    assert unbroken.through == expected
