"""Ranges over simulated streams: limits that hold, few counts; splits of about as many rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st

from nats_stream_source.errors import ConsumerLimitError
from nats_stream_source.jetstream.stream_info import Replica
from nats_stream_source.spark.planning.limits import (
    BYTES_PER_SPLIT,
    ROWS_PER_SPLIT,
    RangeLimit,
    next_end,
)
from tests.unit.spark.simulated_stream import SimulatedStream, overwritten

MAX_COUNTS = 3


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


def every(step: int) -> Callable[[int], bool]:
    return lambda seq: seq % step == 0


TEN = RangeLimit(10)
LIMIT = RangeLimit(100)
DENSE = range(1, 101)

RESULTS = {
    # stream, start, limit: (end, rows, total), number of counts
    "no limit": (SimulatedStream(DENSE), 0, None, (100, 100, 100), 0),
    "as many rows as the limit": (SimulatedStream(range(1, 11)), 0, TEN, (10, 10, 10), 0),
    "as many sequences as the limit": (SimulatedStream([1, 3, 10]), 0, TEN, (10, 3, 3), 0),
    "dense": (SimulatedStream(DENSE), 0, TEN, (10, 10, 100), 0),
    "dense, one row": (SimulatedStream(DENSE), 50, RangeLimit(1), (51, 1, 50), 0),
    "few holes": (SimulatedStream(seq for seq in DENSE if seq % 25), 0, TEN, (10, 10, 96), 0),
    "bytes": (SimulatedStream(DENSE), 0, RangeLimit(None, 500), (5, 5, 100), 0),
    "rows and bytes": (SimulatedStream(DENSE), 0, RangeLimit(3, 500), (3, 3, 100), 0),
    "starts before the first message": (SimulatedStream(range(90, 201)), 0, TEN, (99, 10, 111), 0),
    "fewer messages than the limit": (SimulatedStream([1, 50, 99]), 0, TEN, (99, 3, 3), 0),
    "fewer rows than the limit": (SimulatedStream([*range(1, 91), 900]), 89, TEN, (900, 2, 2), 1),
    "filter, no limit": (SimulatedStream(DENSE, matches=every(5)), 0, None, (100, 20, 20), 1),
    "filter, dense": (SimulatedStream(DENSE, matches=every(1)), 0, TEN, (10, 10, 100), 1),
    "filter, first match late": (
        SimulatedStream(range(1, 1001), matches=lambda seq: seq > 900),
        0,
        TEN,
        (910, 10, 100),
        1,
    ),
    "filter, no match": (SimulatedStream(DENSE, matches=every(101)), 0, TEN, (100, 0, 0), 1),
}


@pytest.mark.parametrize(
    ("stream", "start", "limit", "expected", "counts"), RESULTS.values(), ids=RESULTS
)
def test_limit(
    stream: SimulatedStream,
    start: int,
    limit: RangeLimit | None,
    expected: tuple[int, int, int],
    counts: int,
) -> None:
    stream.counts.clear()
    assert stream.limit(start, stream.last_seq, limit) == expected
    assert len(stream.counts) == counts


def sample(sequences: range, count: int) -> list[int]:
    return sorted(random.Random(1).sample(sequences, count))


STREAMS = {
    "nine tenths removed at random": sample(range(1, 100_001), 10_000),
    "999 of 1,000 removed at random": sample(range(1, 1_000_001), 1000),
    "overwritten at random": overwritten(100_000, 10_000),
    "some keys overwritten more often": overwritten(100_000, 15_000, skew=2.0),
    "clusters": [start + seq for start in range(0, 200_000, 20_000) for seq in range(1, 1000)],
    "one early message": [1, *range(95_000, 100_001)],
    "holes in the first half": [*sample(range(1, 50_000), 500), *range(90_000, 100_001)],
    "holes in the second half": [*range(1, 10_001), *sample(range(50_000, 100_001), 500)],
}


@pytest.mark.parametrize("step", [None, 3], ids=["all", "filter"])
@pytest.mark.parametrize("stored", STREAMS.values(), ids=STREAMS)
def test_limit_with_holes_leaves_at_least_half(stored: list[int], step: int | None) -> None:
    limit = 200
    stream = SimulatedStream(stored, matches=None if step is None else every(step))
    start, batches, small = 0, 0, 0
    while start < stream.last_seq:
        stream.counts.clear()
        left = stream.rows(start, stream.last_seq)
        end, rows, _ = stream.limit(start, stream.last_seq, RangeLimit(limit))
        assert start < end
        assert stream.rows(start, end) <= rows <= limit
        assert len(stream.counts) <= MAX_COUNTS
        batches += 1
        small += 2 * stream.rows(start, end) < min(limit, left)
        start = end
    # Estimates are wrong for about two batches where rows begin or end to lie close together.
    cliffs = 20 if stored is STREAMS["clusters"] else 2
    assert small <= 2 * cliffs
    assert batches <= 2 * stream.rows(0, stream.last_seq) / limit + 2 * cliffs


STEEP = {
    # of about 20,000 sequences each: rows far apart, then close together, once or repeatedly
    "old entries overwritten": ([*range(1, 20_001, 100), *range(40_001, 100_001)], 6),
    "stretches": ([seq for seq in range(1, 160_001) if seq // 20_000 % 2 or seq % 50 == 0], 12),
    "early entries kept": ([*range(1, 30_001), *range(30_001, 100_001, 100)], 6),
}


@pytest.mark.parametrize("written", [0, 300], ids=["at rest", "under writes"])
@pytest.mark.parametrize("step", [None, 3], ids=["all", "filter"])
@pytest.mark.parametrize(("stored", "most_small"), STEEP.values(), ids=STEEP)
def test_limit_where_density_changes_is_reached_again(
    stored: list[int], most_small: int, step: int | None, written: int
) -> None:
    stream = SimulatedStream(stored, matches=None if step is None else every(step))
    start, last, small = 0, stream.last_seq, 0
    while start < last:
        stream.counts.clear()
        stream.infos = 0
        left = stream.rows(start, stream.last_seq)
        end, rows, _ = stream.limit(start, stream.last_seq, RangeLimit(500))
        assert stream.rows(start, end) <= rows <= 500
        assert len(stream.counts) + stream.infos <= 4
        small += 2 * stream.rows(start, end) < min(500, left)
        stream.write(written)
        start = end
    assert small <= most_small


ENDS = {
    # low, high, limit, density, decay: the sequence up to which to count next
    "even": ((0, 0), (10_000, 1000), 100, None, 0.0, 650),
    "density of the last range": ((0, 0), (10_000, 1000), 100, 0.05, 0.0, 1300),
    "rows up to low": ((1000, 40), (10_000, 1000), 100, 0.05, 0.0, 1500),
    "overwritten at random": ((0, 0), (10_000, 1000), 100, None, 5e-4, 4719),
    "denser than the limit's sequences": ((0, 0), (10_000, 9000), 100, None, 0.0, 100),
    "density was too low, by little": ((0, 0), (1000, 200), 100, 0.065, 0.0, 325),
    "density was too low, by far": ((0, 0), (10_000, 5000), 100, 0.001, 0.0, 1140),
    "no row before low": ((0, 0), (10_000, 5000), 100, 0.0, 0.0, 1140),
    "one row": ((0, 0), (1000, 10), 1, None, 0.0, 100),
    "limit reaches high": ((50, 10), (140, 100), 100, None, 0.0, None),
}


@pytest.mark.parametrize(
    ("low", "high", "limit", "density", "decay", "expected"), ENDS.values(), ids=ENDS
)
def test_next_end(
    low: tuple[int, int],
    high: tuple[int, int],
    limit: int,
    density: float | None,
    decay: float,
    expected: int | None,
) -> None:
    assert next_end(low, high, limit, density, decay) == expected


@given(
    low_seq=st.integers(0, 10**12),
    length=st.integers(1, 10**12),
    low_rows=st.integers(0, 10**6),
    more_rows=st.integers(0, 10**9),
    limit=st.integers(1, 10**7),
    density=st.none() | st.floats(0, 1),
    decay=st.just(0.0) | st.floats(0, 1),
)
def test_next_end_is_beyond_reach_of_limit_and_before_high(
    low_seq: int,
    length: int,
    low_rows: int,
    more_rows: int,
    limit: int,
    density: float | None,
    decay: float,
) -> None:
    low_rows = min(low_rows, (limit - 1) // 2)
    low, high = (low_seq, low_rows), (low_seq + length, limit + more_rows)
    seq = next_end(low, high, limit, density, decay)
    reached = low_seq + limit - low_rows
    assert (seq is None) == (reached >= high[0])
    assert seq is None or reached <= seq < high[0]


@pytest.mark.parametrize("written", [0, 20], ids=["at rest", "under writes"])
@pytest.mark.parametrize("step", [None, 3], ids=["all", "filter"])
@pytest.mark.parametrize("name", ["nine tenths removed at random", "overwritten at random"])
def test_limit_of_steady_batches_sends_few_requests(
    name: str, step: int | None, written: int
) -> None:
    """A count and the stream's state; more for the first batch, and where an estimate is wrong."""
    stream = SimulatedStream(STREAMS[name], matches=None if step is None else every(step))
    start, requests = 0, []
    while start < STREAMS[name][-1]:
        stream.counts.clear()
        stream.infos = 0
        end, rows, _ = stream.limit(start, stream.last_seq, LIMIT)
        assert stream.rows(start, end) <= rows <= 100
        requests.append(len(stream.counts) + stream.infos)
        stream.write(written)
        start = end
    assert requests[0] <= 4
    assert max(requests) <= 4
    assert sum(requests[1:]) <= 2.5 * len(requests[1:])


@pytest.mark.parametrize("limit", [3, 6, 10, 20])
@pytest.mark.parametrize("step", [2, 3, 10, 30])
def test_low_limit_with_regular_holes_leaves_at_least_half(step: int, limit: int) -> None:
    last = 5 * step * limit
    stream = SimulatedStream(range(1, last + 1), matches=every(step))
    start = 0
    while left := stream.rows(start, last):
        end, rows, _ = stream.limit(start, last, RangeLimit(limit))
        assert min(limit, left) <= 2 * stream.rows(start, end) <= 2 * rows <= 2 * limit
        start = end


def test_limit_with_few_holes_left_counts_once() -> None:
    """Most holes are behind the first ranges."""
    stream = SimulatedStream([*sample(range(1, 50_001), 100), *range(50_001, 60_001)])
    start, ends = 50_000, []
    while start < stream.last_seq:
        start, _, _ = stream.limit(start, stream.last_seq, LIMIT)
        ends.append(start)
    assert ends == list(range(50_100, 60_001, 100))
    assert len(stream.counts) == 1


def test_limit_after_dropped_counts_holds() -> None:
    """The stream was rolled back and has grown again: the counts are of other messages."""
    stream = SimulatedStream(range(1, 10_001, 10))
    end, _, _ = stream.limit(0, 10_000, LIMIT)
    stream.stored = [seq for seq in stream.stored if seq <= end] + list(range(end + 1, 10_001))
    stream.limits.forget()
    then, rows, _ = stream.limit(end, 10_000, LIMIT)
    assert stream.rows(end, then) <= rows <= 100


CHANGES = st.lists(
    st.tuples(st.integers(0, 30), st.lists(st.integers(0, 10_000), max_size=30)), max_size=16
)


def changes(events: Iterable[tuple[int, list[int]]]) -> Callable[[SimulatedStream], None]:
    """Others write messages, and remove some of any age."""
    left = iter(events)

    def change(stream: SimulatedStream) -> None:
        written, removed = next(left, (0, []))
        stream.write(written)
        stream.remove(removed)

    return change


@given(
    stored=st.sets(st.integers(1, 3000), min_size=1, max_size=300),
    start=st.integers(0, 2900),
    limit=st.integers(1, 100),
    step=st.sampled_from([None, 1, 3]),
    events=CHANGES,
    names_first=st.booleans(),
)
def test_limit_while_others_write_is_never_exceeded(
    stored: set[int],
    start: int,
    limit: int,
    step: int | None,
    events: list[tuple[int, list[int]]],
    names_first: bool,
) -> None:
    stream = SimulatedStream(
        stored,
        3000,
        matches=None if step is None else every(step),
        change=changes(events),
        names_first=names_first,
    )
    for _ in range(5):
        stream.counts.clear()
        stream.infos = 0
        last = stream.last_seq
        end, rows, _ = stream.limit(start, last, RangeLimit(limit))
        assert start < end <= last
        assert stream.rows(start, end) <= rows <= limit
        assert len(stream.counts) <= MAX_COUNTS
        assert stream.infos <= 1
        start = end
        if start == last:
            break


def test_limit_is_not_exceeded_by_rows_beyond_end() -> None:
    """A run of AvailableNow ends before messages that were written since."""
    stream = SimulatedStream([*range(10, 9001, 10), *range(9001, 29_001)], matches=every(1))
    start, batches = 0, []
    while start < 9000:
        end, _, _ = stream.limit(start, 9000, RangeLimit(100))
        batches.append(stream.rows(start, end))
        start = end
    assert start == 9000
    assert sum(batches) == 900
    assert max(batches) <= 100
    assert len(batches) <= 2 * 9 + 4


SPARSE = range(1, 10_001, 10)
END = SPARSE[-1]
BY_SEQUENCES = (100, 100, 1000)


@pytest.mark.parametrize(
    ("replica", "leader_since", "used"),
    [
        (Replica("b", 0, 1), None, True),
        (Replica("b", 5, 1), None, False),
        (Replica("b", 5, 29 * 10**9), None, False),
        (Replica("b", 5, 31 * 10**9), None, True),  # it is down
        (Replica("b", 5, 0), None, False),  # the server does not report since when
        (Replica("b", 5, 0), "2026-11-25T09:59:50Z", False),
        (Replica("b", 5, 0), "2026-11-25T09:59:00Z", True),
    ],
)
def test_limit_while_replica_lags_is_of_sequences(
    replica: Replica, leader_since: str | None, used: bool
) -> None:
    stream = SimulatedStream(SPARSE)
    stream.replicas, stream.leader_since = (replica,), leader_since
    result = stream.limit(0, END, LIMIT)
    assert (result[0] > 100) is used
    assert bool(stream.counts) is used


@pytest.mark.parametrize(
    "changed", [{"replicas": (Replica("b", 1, 1),)}, {"created": "2026-11-25T11:00:00Z"}], ids=str
)
def test_limit_of_stream_changed_after_counts_is_of_sequences(changed: dict[str, Any]) -> None:
    """A replica lags, or the stream was re-created."""
    stream = SimulatedStream(
        SPARSE, matches=every(1), change=lambda stream: vars(stream).update(changed)
    )
    assert stream.limit(0, END, LIMIT) == BY_SEQUENCES


def no_consumer_left(_: SimulatedStream) -> None:
    raise ConsumerLimitError("maximum consumers limit reached")


@pytest.mark.parametrize("limit", [LIMIT, None])
def test_limit_without_consumer_left_is_of_sequences(limit: RangeLimit | None) -> None:
    stream = SimulatedStream(SPARSE, matches=every(1), change=no_consumer_left)
    assert stream.limit(0, END, limit) == (BY_SEQUENCES if limit else (END, 1000, 1000))


def test_limit_of_many_bytes_and_few_rows() -> None:
    stream = SimulatedStream(STREAMS["nine tenths removed at random"])
    both = replace(LIMIT, max_bytes=50 * 100)
    end, rows, _ = stream.limit(0, stream.last_seq, both)
    assert 25 <= stream.rows(0, end) <= rows <= 50


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
    stream = SimulatedStream(DENSE, matches=every(1), change=no_consumer_left)
    assert stream.split_ends(0, 100, 4) == [25, 50, 75, 100]


def test_small_range_is_one_split_without_request() -> None:
    stream = SimulatedStream(DENSE, matches=every(2))
    assert stream.split_ends(0, 100, 1) == [100]
    assert not stream.counts


def test_range_of_few_sequences_has_split_for_each() -> None:
    assert SimulatedStream([2, 3]).split_ends(0, 3, 8) == [1, 2, 3]
