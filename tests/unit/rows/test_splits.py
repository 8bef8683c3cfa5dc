"""The splits of a range, over simulated streams: their number, and about as many rows in each."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.errors import ConsumerLimitError
from nats_stream_source.spark.planning.limits import BYTES_PER_SPLIT, ROWS_PER_SPLIT
from tests.unit.spark.simulated_stream import SimulatedStream
from tests.unit.spark.test_limits import CHANGES, DENSE, STREAMS, changes, every

ROWS, BYTES = ROWS_PER_SPLIT, BYTES_PER_SPLIT


@pytest.mark.parametrize(
    ("last", "size", "min_splits", "cores", "splits"),
    [
        (ROWS, 1, 1, 8, 1),
        (2 * ROWS - 1, 1, 1, 8, 1),
        (2 * ROWS, 1, 1, 8, 2),
        (10 * ROWS, 1, 1, 8, 8),
        (10 * ROWS, 1, 3, 2, 3),
        (100, BYTES // 16, 1, 8, 6),
        (2, 3 * BYTES, 1, 8, 2),
        (100, 1, 30, 8, 30),
    ],
)
def test_number_of_splits(last: int, size: int, min_splits: int, cores: int, splits: int) -> None:
    stream = SimulatedStream(range(1, last + 1), message_size=size, cores=cores)
    assert len(stream.split_ends(0, last, min_splits)) == splits


def test_range_of_removed_messages_is_one_split() -> None:
    stream = SimulatedStream([1, 100 * ROWS], cores=8)
    assert stream.split_ends(0, stream.last_seq, 1) == [stream.last_seq]


@pytest.mark.parametrize("step", [None, 3], ids=["all", "filter"])
@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("stored", STREAMS.values(), ids=STREAMS)
def test_splits_with_holes_are_balanced_within_factor_2(
    stored: list[int], parts: int, step: int | None
) -> None:
    stream = SimulatedStream(stored, matches=None if step is None else every(step))
    ends = stream.split_ends(0, stream.last_seq, parts)
    rows = [stream.rows(low, high) for low, high in pairwise([0, *ends])]
    assert len(rows) == parts
    assert sum(rows) == stream.rows(0, stream.last_seq)
    assert max(rows) <= 2 * min(rows)


def test_splits_of_range_before_stream_end_are_balanced() -> None:
    stream = SimulatedStream([*range(10, 10_001, 10), *range(10_001, 30_001)])
    ends = stream.split_ends(0, 10_000, 4)
    rows = [stream.rows(low, high) for low, high in pairwise([0, *ends])]
    assert max(rows) <= 2 * min(rows)


@given(
    stored=st.sets(st.integers(1, 3000), max_size=300),
    start=st.integers(0, 2990),
    length=st.integers(1, 3000),
    parts=st.integers(1, 70),
    events=CHANGES,
)
def test_splits_while_others_write_cover_range(
    stored: set[int], start: int, length: int, parts: int, events: list[tuple[int, list[int]]]
) -> None:
    stream = SimulatedStream(stored, 3000, change=changes(events))
    end = min(start + length, 3000)
    ends = stream.split_ends(start, end, parts)
    assert ends[-1] == end
    assert all(low < high for low, high in pairwise([start, *ends]))


@pytest.mark.parametrize(("left", "splits"), [(-1, 8), (3, 3), (1, 1)])
def test_splits_are_at_most_consumers_left(left: int, splits: int) -> None:
    assert len(SimulatedStream(DENSE, max_consumers=left).split_ends(0, 100, 8)) == splits


def test_splits_without_consumer_left_are_of_sequences() -> None:
    def change(_: SimulatedStream) -> None:
        raise ConsumerLimitError("maximum consumers limit reached")

    stream = SimulatedStream(DENSE, matches=every(1), change=change)
    assert stream.split_ends(0, 100, 4) == [25, 50, 75, 100]


def test_small_range_is_one_split_without_request() -> None:
    stream = SimulatedStream(DENSE, matches=every(2))
    assert stream.split_ends(0, 100, 1) == [100]
    assert not stream.counts


def test_range_of_few_sequences_has_split_for_each() -> None:
    assert SimulatedStream([2, 3]).split_ends(0, 3, 8) == [1, 2, 3]
