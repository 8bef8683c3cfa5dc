"""Which sequences of a range did not come, and cannot any more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.rows import data_loss as module
from nats_stream_source.rows.data_loss import SequenceGapTracker

BEYOND = 1000

Gone = tuple[int, int, int]

# First wanted, what came, where the stream begins now, what is gone up to 10.
CASES: dict[str, tuple[int, list[list[int]], int, Gone | None]] = {
    "nothing came, all is gone": (5, [], BEYOND, (5, 10, 6)),
    "nothing came, one is gone": (5, [], 6, (5, 5, 1)),
    "nothing came, nothing is gone": (5, [], 5, None),
    "an empty batch": (5, [[]], 8, (5, 7, 3)),
    "all came": (5, [[5, 6], [7, 8, 9, 10]], BEYOND, None),
    "what comes after the end does not count": (5, [[5, 6, 7, 8, 9, 10]], BEYOND, None),
    "what came aged out later": (5, [[5, 6, 7]], 8, None),
    "the next is gone": (5, [[5, 6, 7]], 9, (8, 8, 1)),
    "a hole in a batch": (5, [[5, 6, 8, 9, 10]], BEYOND, (7, 7, 1)),
    "a hole between batches": (5, [[5, 6], [8, 9, 10]], BEYOND, (7, 7, 1)),
    "a hole that lies ahead is none": (5, [[5, 6, 8]], 7, None),
    "a part of a hole": (5, [[5, 9, 10]], 8, (6, 7, 2)),
    "several holes": (5, [[5, 7], [8, 10]], BEYOND, (6, 9, 2)),
    "holes, and then nothing more": (5, [[5, 7]], BEYOND, (6, 10, 4)),
    "the first one": (5, [[6, 7, 8, 9, 10]], BEYOND, (5, 5, 1)),
    "what lies before the beginning": (5, [[3, 4, 5, 6]], 7, None),
}


@pytest.mark.parametrize(("first", "batches", "first_seq", "gone"), CASES.values(), ids=list(CASES))
def test_aged_out_messages(
    first: int, batches: list[list[int]], first_seq: int, gone: Gone | None
) -> None:
    assert followed(first, batches).aged_out(first_seq, 10) == gone


def followed(
    first: int, batches: list[list[int]], expiry_allowed_through: int = 0
) -> SequenceGapTracker:
    unbroken = SequenceGapTracker(first, expiry_allowed_through)
    for batch in batches:
        unbroken.add(np.array(batch, dtype=np.int64))
    return unbroken


HISTORY: dict[str, tuple[list[list[int]], Gone | None]] = {
    "its first messages went before any came": ([[4, 5, 6, 7, 8, 9, 10]], None),
    "all of it went": ([[9, 10]], None),
    "nothing came at all": ([], (9, 10, 2)),
    "more than history went": ([[10]], (9, 9, 1)),
    "a part of it went after the first came": ([[2, 5, 6, 7, 8, 9, 10]], (3, 4, 2)),
}


@pytest.mark.parametrize(("batches", "gone"), HISTORY.values(), ids=list(HISTORY))
def test_history_reaches_back_as_far_as_it_does(
    batches: list[list[int]], gone: Gone | None
) -> None:
    """1 to 8 were there when the query began."""
    assert followed(1, batches, 8).aged_out(BEYOND, 10) == gone


@given(
    st.sets(st.integers(1, 30)),
    st.integers(1, 20),
    st.lists(st.integers(0, 30), max_size=5),
    st.integers(1, 40),
    st.integers(0, 35),
)
def test_ranges_equal_single_steps(
    came: set[int], first: int, cuts: list[int], first_seq: int, end: int
) -> None:
    missing = [seq for seq in range(first, min(first_seq - 1, end) + 1) if seq not in came]
    batches = np.split(np.array(sorted(came), dtype=np.int64), sorted(cuts))
    expected = (missing[0], missing[-1], len(missing)) if missing else None
    assert (
        followed(first, [batch.tolist() for batch in batches]).aged_out(first_seq, end) == expected
    )


def test_holes_many_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_GAPS", 100)
    unbroken = SequenceGapTracker(1)
    for begin in range(2, 20_002, 200):
        unbroken.add(np.arange(begin, begin + 200, 2, dtype=np.int64))
    assert unbroken.aged_out(BEYOND * 1000, 20_000) == (1, 19_999, 10_000)
    assert sum(map(len, unbroken._gaps)) <= 200
