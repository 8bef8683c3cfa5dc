"""The longest runs that did not come, against counting them one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.source.holes import Holes

CASES: dict[str, tuple[list[list[int]], list[tuple[int, int]]]] = {
    "all came": ([[11, 12], [13, 14, 15, 16, 17, 18, 19, 20]], []),
    "nothing came": ([], [(11, 20)]),
    "the first did not": ([[13, 14, 15, 16, 17, 18, 19, 20]], [(11, 12)]),
    "the last did not": ([[11, 12, 13], [14, 15, 16, 17, 18]], [(19, 20)]),
    "between two calls": ([[11, 12], [], [15, 16, 17, 18, 19, 20]], [(13, 14)]),
    "only the longest": ([[12, 15], [17, 18, 20]], [(11, 11), (13, 14)]),
}


@pytest.mark.parametrize(("calls", "holes"), CASES.values(), ids=CASES)
def test_cases(calls: list[list[int]], holes: list[tuple[int, int]]) -> None:
    found = Holes(10, 2)
    for call in calls:
        found.add(np.array(call, np.int64))
    longest = found.longest(20)
    assert longest[1:] == holes[1:]
    assert [last - first for first, last in longest] == [last - first for first, last in holes]
    assert found.longest(20) == longest


@given(st.sets(st.integers(6, 60)), st.integers(1, 8), st.integers(1, 12))
def test_they_are_the_longest(came: set[int], most: int, size: int) -> None:
    sequences = np.array(sorted(came), np.int64)
    found = Holes(5, most)
    for begin in range(0, len(sequences), size):
        found.add(sequences[begin : begin + size])
    every: list[tuple[int, int]] = []
    for seq in sorted(set(range(6, 61)) - came):
        if every and every[-1][1] == seq - 1:
            every[-1] = (every[-1][0], seq)
        else:
            every.append((seq, seq))
    longest = found.longest(60)
    assert set(longest) <= set(every)
    lengths = sorted((last - first for first, last in every), reverse=True)[:most]
    assert sorted((last - first for first, last in longest), reverse=True) == lengths
