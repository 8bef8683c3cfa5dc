"""The cursor over initial values: rows behind a gap are kept, and all arrive in spite of losses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from nats_stream_source.wire.consumer.cursor import Coverage, Cursor, Rebuild, State

ENDLESS = 10**9


def deliver(target: Cursor, *pairs: tuple[int, int]) -> list[int]:
    """Deliver (consumer_seq, stream_seq) pairs as the reader does; the rows that are kept."""
    consumer_seq, stream_seq = (np.array(one, np.int64) for one in zip(*pairs, strict=True))
    ends = (np.diff(stream_seq) <= 0) | (np.diff(consumer_seq) != 1)
    kept: list[int] = []
    bounds = (0, *(np.flatnonzero(ends) + 1).tolist(), len(pairs))
    for begin, end in itertools.pairwise(bounds):
        step = target.deliver(consumer_seq[begin:end], stream_seq[begin:end])
        rows = stream_seq[begin + step.first : begin + step.stop]
        kept += (rows if step.rows is None else rows[step.rows]).tolist()
    return kept


def listing(end: int = 100) -> Cursor:
    target = Cursor(0, end, initial_through=100)
    target.created()
    return target


def test_rows_behind_gap_are_kept_and_wait_for_missing_one() -> None:
    target = listing()
    assert deliver(target, (1, 10), (3, 30), (4, 40)) == [10, 30, 40]
    assert (target.state, target.position, target.seen_through) == (State.READING, 10, 10)
    target.heartbeat(4, 100, None)
    assert (target.state, target.rebuilds) == (State.IDLE, [Rebuild.GAP])
    target.created()
    assert deliver(target, (1, 10), (2, 20)) == [20]
    assert (target.position, target.state) == (20, State.READING)
    assert deliver(target, (3, 30)) == []
    assert target.done, "what follows 30 was received from the first consumer"
    assert target.position == 40


def test_message_repeated_is_not_gap() -> None:
    target = listing()
    assert deliver(target, (1, 10), (1, 10), (2, 20), (1, 10), (3, 30)) == [10, 20, 30]
    assert (target.position, target.rebuilds) == (30, [])


def test_initial_values_end_without_row() -> None:
    target = listing()
    deliver(target, (1, 10), (2, 101))
    assert target.done
    target = listing()
    deliver(target, (2, 20), (3, 101))
    assert (target.state, target.rebuilds) == (State.IDLE, [Rebuild.GAP])


def test_endless_reader_continues_after_initial_values() -> None:
    target = listing(end=ENDLESS)
    deliver(target, (1, 10), (3, 30))
    target.heartbeat(3, 110, None)
    assert (target.state, target.seen_through) == (State.IDLE, 10), "initial values are missing"
    target.created()
    assert deliver(target, (1, 10), (2, 20), (3, 30), (4, 120)) == [20, 120]
    assert (target.state, target.position, target.seen_through) == (State.READING, 120, 120)
    assert deliver(target, (6, 140)) == []
    assert target.rebuilds == [Rebuild.GAP, Rebuild.GAP], "then a gap ends the consumer"


def test_row_is_progress() -> None:
    """A loss that stops every consumer at another row does not add up to a failure."""
    target = Cursor(0, 1000, initial_through=1000)
    seqs = list(range(1, 1001))
    for lost in range(1, 30):
        target.created()
        deliver(target, *((n, n) for n in seqs if n not in (1, 40 * lost)))
        if target.state is State.READING:
            target.heartbeat(1000, 1000, None)
        assert target.failed_rebuilds <= lost
        if lost == 1:
            assert target.failed_rebuilds == 1
    assert target.position == 0


COVERED: list[tuple[list[tuple[int, int, int]], int, int]] = [
    ([(0, 5, 4)], 5, 4),
    ([(3, 5, 5)], 0, 0),
    ([(3, 5, 5), (0, 3, 2)], 5, 5),
    ([(3, 5, 5), (7, 9, 9), (0, 8, 8)], 9, 9),
    ([(7, 9, 9), (3, 5, 5), (5, 7, 5), (0, 1, 0)], 1, 0),
    ([(7, 9, 9), (3, 5, 5), (5, 7, 5), (0, 3, 0)], 9, 9),
]


@pytest.mark.parametrize(("added", "prefix", "last_row"), COVERED)
def test_covered_ranges(added: list[tuple[int, int, int]], prefix: int, last_row: int) -> None:
    coverage = Coverage(0)
    assert all(coverage.add(*one) for one in added)
    assert (coverage.prefix, coverage.last_row) == (prefix, last_row)
    assert not any(coverage.add(*one) for one in added), "again, it is not progress"


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=12))
def test_coverage_is_that_of_set(ranges: list[tuple[int, int]]) -> None:
    coverage, model = Coverage(0), set[int]()
    for low, length in ranges:
        new = set(range(low + 1, low + length + 1))
        assert coverage.add(low, low + length, low) == bool(new - model)
        model |= new
        missing = coverage.missing(np.arange(1, 45))
        assert missing.tolist() == [seq not in model for seq in range(1, 45)]
        assert coverage.prefix == next(n for n in itertools.count() if n + 1 not in model)


@given(
    seqs=st.lists(st.integers(1, 80), unique=True, max_size=40).map(sorted),
    end=st.integers(1, 80),
    faults=st.lists(st.sampled_from(["lost", "twice", "late"]), max_size=40),
    superseded=st.lists(st.integers(0, 40), max_size=5),
    data=st.data(),
)
def test_initial_values_are_complete_in_spite_of_losses(
    seqs: list[int], end: int, faults: list[str], superseded: list[int], data: st.DataObject
) -> None:
    """A model server has initial values for each consumer; its frames are lost, doubled and late.

    Between two consumers a subject may get a newer message, beyond the end: its row is not in the
    next initial values any more.
    """
    target = Cursor(0, end, initial_through=end)
    stored, gone = list(seqs), set[int]()
    kept: list[int] = []
    to_supersede = [stored[i] for i in superseded if i < len(stored)]
    for _ in range(200):
        if target.done:
            break
        if target.state is State.IDLE:
            target.created()
            frames = [(n, seq) for n, seq in enumerate((s for s in stored if s not in gone), 1)]
            arrived: list[tuple[int, int]] = []
            late: list[tuple[int, int]] = []
            for frame in frames:
                fault = faults.pop() if faults and data.draw(st.booleans()) else ""
                if fault != "lost":
                    (late if fault == "late" else arrived).append(frame)
                if fault == "twice":
                    arrived.append(frame)
                elif late and not fault:
                    arrived.append(late.pop())
            if arrived:
                kept += deliver(target, *arrived)
            if target.state is State.READING:  # type: ignore[comparison-overlap]
                target.heartbeat(len(frames), max([end, *stored]), None)
            if to_supersede:
                gone.add(to_supersede.pop())
    assert target.done
    assert len(kept) == len(set(kept)), "no row is kept twice"
    expected = {seq for seq in seqs if seq <= end}
    assert expected - gone <= set(kept) <= expected
