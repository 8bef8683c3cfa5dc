"""The cursor's transitions as tables, and the property that loss anywhere ends in complete rows."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, strategies as st

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire.consumer.cursor import Cursor, CursorAction, Rebuild, State


def cursor(start: int = 10, end: int = 20) -> Cursor:
    made = Cursor(start, end)
    made.created()
    return made


def deliver(target: Cursor, *pairs: tuple[int, int]) -> list[int]:
    """Deliver (consumer_seq, stream_seq) pairs; the stream sequences that are kept."""
    consumer_seq = np.array([pair[0] for pair in pairs], dtype=np.int64)
    stream_seq = np.array([pair[1] for pair in pairs], dtype=np.int64)
    in_sequence = bool((np.diff(consumer_seq) == 1).all() and (np.diff(stream_seq) > 0).all())
    # With and without the caller's knowledge the cursor does the same.
    other = copy.deepcopy(target)
    step = target.deliver(consumer_seq, stream_seq)
    if in_sequence:
        same = other.deliver(consumer_seq, stream_seq, in_sequence=True)
        assert (same.first, same.stop, repr(other)) == (step.first, step.stop, repr(target))
    rows = stream_seq[step.first : step.stop]
    return (rows if step.rows is None else rows[step.rows]).tolist()


CASES = {
    "rows inside the range are kept": ([(1, 11), (2, 13)], [11, 13], State.READING, []),
    "the end's own row is kept and ends": ([(1, 11), (2, 20)], [11, 20], State.DONE, []),
    "a row beyond the end ends, unkept": ([(1, 11), (2, 25)], [11], State.DONE, []),
    "only a row beyond the end": ([(1, 21)], [], State.DONE, []),
    "rows up to the start are skipped": ([(1, 9), (2, 10), (3, 11)], [11], State.READING, []),
    "first message lost": ([(2, 12)], [], State.IDLE, [Rebuild.GAP]),
    "a message lost between": ([(1, 11), (3, 13)], [11], State.IDLE, [Rebuild.GAP]),
    "a message twice": ([(1, 11), (1, 11)], [11], State.IDLE, [Rebuild.GAP]),
    "a gap after the end is none of ours": ([(1, 20), (3, 22)], [20], State.DONE, []),
    "nothing": ([], [], State.READING, []),
}


@pytest.mark.parametrize(("pairs", "kept", "state", "rebuilds"), CASES.values(), ids=CASES)
def test_deliver(
    pairs: list[tuple[int, int]], kept: list[int], state: State, rebuilds: list[Rebuild]
) -> None:
    target = cursor()
    assert deliver(target, *pairs) == kept
    assert (target.state, target.rebuilds) == (state, rebuilds)
    assert target.kept == len(kept)


def test_empty_range_is_done_at_once() -> None:
    assert Cursor(5, 5).done


@pytest.mark.parametrize(("start", "end"), [(5, 4), (-1, 3)])
def test_range_invalid(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="not a range"):
        Cursor(start, end)


HEARTBEATS = {
    "nothing new": (2, 12, None, State.READING, None),
    "ours, and looked at all": (2, 20, None, State.DONE, None),
    "ours, beyond the end": (2, 99, None, State.DONE, None),
    "looked at all, but one is missing": (3, 20, None, State.IDLE, None),
    "a message behind": (1, 12, None, State.IDLE, None),
    "stalled": (2, 12, "$JS.FC.x", State.READING, "$JS.FC.x"),
    "stalled at the end": (2, 20, "$JS.FC.x", State.DONE, None),
}


@pytest.mark.parametrize(
    ("last_consumer", "last_stream", "stalled", "state", "answer"),
    HEARTBEATS.values(),
    ids=HEARTBEATS,
)
def test_heartbeat(
    last_consumer: int, last_stream: int, stalled: str | None, state: State, answer: str | None
) -> None:
    target = cursor()
    deliver(target, (1, 11), (2, 12))
    assert target.heartbeat(last_consumer, last_stream, stalled) == CursorAction(reply=answer)
    assert target.state is state


def test_heartbeat_before_first_message_ends_empty_range() -> None:
    target = cursor()
    target.heartbeat(0, 20, None)
    assert target.done


def listing(end: int = 20) -> Cursor:
    """A consumer with initial values up to 20, of which it delivered two."""
    made = Cursor(10, end, initial_through=20)
    made.created()
    deliver(made, (1, 11), (2, 12))
    return made


def test_initial_values_without_messages_are_requested_again() -> None:
    """The server skips one removed message with each of its heartbeats."""
    target = listing()
    for seq in (13, 14, 15):
        target.heartbeat(2, seq, None)
        assert target.state is State.READING
    target.heartbeat(2, 16, None)
    assert (target.state, target.rebuilds) == (State.IDLE, [Rebuild.STALE_LIST])
    target.created()
    # It begins with what came before, of which nothing is kept again.
    assert deliver(target, (1, 12), (2, 19)) == [19]
    target.heartbeat(2, 20, None)
    assert target.done


def test_message_removed_is_counted() -> None:
    """A delivery between two of them does not complete the initial values."""
    target = Cursor(0, 1000, initial_through=1000)
    target.created()
    for i in range(1, 5):
        assert target.state is State.READING
        assert deliver(target, (i, 10 * i)) == [10 * i]
        target.heartbeat(i, 10 * i + 1, None)
    assert target.rebuilds == [Rebuild.STALE_LIST]


def test_lagging_replica_causes_few_rebuilds() -> None:
    """It looks the same; and it is not what ends the reader."""
    target = listing()
    made = 1
    for _ in range(60):  # half a minute
        target.heartbeat(target.consumer_seq, 12, None)
        if target.state is State.IDLE:
            target.created()
            made += 1
            assert deliver(target, (1, 11), (2, 12)) == []
    assert made == 5
    assert target.failed_rebuilds <= 1


def test_heartbeats_after_initial_values_count() -> None:
    target = listing(end=99)
    target.heartbeat(2, 20, None)
    target.heartbeat(2, 20, None)
    assert (target.state, target.rebuilds) == (State.READING, [])


def test_initial_values_stalled_wait_for_response() -> None:
    target = listing()
    assert target.heartbeat(2, 12, "$JS.FC.x").reply == "$JS.FC.x"
    assert (target.state, target.rebuilds) == (State.READING, [])


def test_flow_control_is_answered_once() -> None:
    target = cursor()
    assert target.flow_control("$JS.FC.1").reply == "$JS.FC.1"
    assert target.flow_control("$JS.FC.1").reply is None
    assert target.heartbeat(0, 10, "$JS.FC.1").reply is None
    assert target.flow_control("$JS.FC.2").reply == "$JS.FC.2"


def test_flow_control_response_held_back_near_end() -> None:
    """The rest is in flight: a response would bring messages beyond the end."""
    target = cursor(0, 20)
    deliver(target, *((n, n) for n in range(1, 6)))
    assert target.flow_control("$JS.FC.1").reply == "$JS.FC.1"  # 15 left, 5 came
    deliver(target, *((n, n) for n in range(6, 15)))
    assert target.flow_control("$JS.FC.2") == CursorAction()  # 6 left, 9 came
    assert target.defers_reply
    assert target.flow_control("$JS.FC.2") == CursorAction()
    deliver(target, *((n, n) for n in range(15, 21)))
    assert target.done
    assert not target.defers_reply
    assert target.idle() == CursorAction()


def test_response_held_back_is_sent_when_idle() -> None:
    target = cursor(0, 20)
    deliver(target, *((n, n) for n in range(1, 19)))
    assert target.flow_control("$JS.FC.1") == CursorAction()
    assert target.idle().reply == "$JS.FC.1"
    assert not target.defers_reply
    assert target.idle() == CursorAction()
    assert target.unconfirmed_reply == "$JS.FC.1"


def test_stalled_heartbeat_requests_held_response() -> None:
    target = cursor(0, 20)
    deliver(target, *((n, n) for n in range(1, 19)))
    assert target.flow_control("$JS.FC.1") == CursorAction()
    assert target.heartbeat(18, 18, "$JS.FC.1").reply == "$JS.FC.1"
    assert not target.defers_reply


def test_rebuilt_consumer_owes_no_response() -> None:
    target = cursor(0, 20)
    deliver(target, *((n, n) for n in range(1, 19)))
    target.flow_control("$JS.FC.1")
    target.lost(Rebuild.RECONNECTED)
    assert target.idle() == CursorAction()
    target.created()
    assert not target.defers_reply


def test_flow_control_after_end_is_not_answered() -> None:
    target = cursor()
    deliver(target, (1, 20))
    assert target.flow_control("$JS.FC.1") == CursorAction()
    assert target.heartbeat(1, 30, "$JS.FC.1") == CursorAction()


def test_stall_counts_after_response_arrived() -> None:
    target = cursor()
    target.heartbeat(0, 10, "$JS.FC.1")
    target.heartbeat(0, 10, "$JS.FC.1")
    assert (target.state, target.unconfirmed_reply) == (State.READING, "$JS.FC.1")
    target.confirmed("$JS.FC.1")
    target.heartbeat(0, 10, "$JS.FC.1")
    assert (target.state, target.rebuilds) == (State.IDLE, [Rebuild.STALLED])


def test_progress_after_flow_control_response() -> None:
    target = cursor()
    target.heartbeat(0, 10, "$JS.FC.1")
    target.confirmed("$JS.FC.1")
    deliver(target, (1, 11))
    target.heartbeat(1, 11, "$JS.FC.1")
    assert target.state is State.READING


def test_frames_of_earlier_consumer_are_ignored() -> None:
    target = cursor()
    target.lost(Rebuild.MISSED_HEARTBEAT)
    assert deliver(target, (1, 11)) == []
    assert target.heartbeat(7, 99, "$JS.FC.1") == CursorAction()
    assert target.flow_control("$JS.FC.1") == CursorAction()
    assert (target.state, target.position) == (State.IDLE, 10)


def test_rebuilt_consumer_counts_from_one_and_skips_kept() -> None:
    target = cursor()
    deliver(target, (1, 11), (2, 14))
    target.lost(Rebuild.CONSUMER_GONE)
    assert target.position == 14
    target.created()
    assert deliver(target, (1, 11), (2, 14), (3, 15)) == [15]


def test_second_creation_is_refused_and_changes_nothing() -> None:
    target = cursor()
    deliver(target, (1, 11))
    with pytest.raises(RuntimeError):
        target.created()
    assert target.consumer_seq == 1


def test_stream_sequences_that_go_backwards() -> None:
    target = cursor()
    with pytest.raises(ProtocolError):
        deliver(target, (1, 12), (2, 11))
    assert target.position == 10


@pytest.mark.parametrize("later", [0, 11, 12])
def test_stream_sequences_that_go_backwards_from_one_call_to_next(later: int) -> None:
    """Else the message in whose place it came would be taken for deleted."""
    target = cursor()
    assert deliver(target, (1, 12)) == [12]
    with pytest.raises(ProtocolError):
        deliver(target, (2, later), (3, 14))
    assert target.position == 12


def test_initial_values_may_repeat_concurrent_writes() -> None:
    target = Cursor(0, 100, 50)
    target.created()
    assert deliver(target, (1, 20), (2, 54)) == [20, 54]
    assert deliver(target, (3, 51), (4, 52)) == []
    assert deliver(target, (5, 54), (6, 55)) == [55]
    assert target.rebuilds == []


def test_first_stream_seq_impossible() -> None:
    for target in (Cursor(0, 20), Cursor(0, 20, 10)):
        target.created()
        with pytest.raises(ProtocolError):
            deliver(target, (1, 0), (2, 2))


def test_fruitless_counts_failed_rebuilds() -> None:
    target = cursor()
    target.lost(Rebuild.NO_ANSWER)
    target.lost(Rebuild.NO_ANSWER)
    assert target.failed_rebuilds == 2
    target.created()
    target.heartbeat(0, 15, None)  # nothing matched, but the server has looked further
    assert target.failed_rebuilds == 0


def test_loss_after_end_is_ignored() -> None:
    target = cursor()
    deliver(target, (1, 20))
    target.lost(Rebuild.RECONNECTED)
    assert (target.done, target.rebuilds) == (True, [])


def test_repr_reads_well() -> None:
    target = cursor()
    deliver(target, (1, 11))
    assert repr(target) == "<Cursor (10, 20] reading at 11 consumer_seq=1 kept=1 rebuilds=0>"


@given(
    stored=st.lists(st.integers(1, 60), unique=True, max_size=40).map(sorted),
    bounds=st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted),
    losses=st.lists(st.integers(0, 50), max_size=6),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=20),
)
def test_rows_complete_under_random_losses(
    stored: list[int], bounds: list[int], losses: list[int], sizes: list[int]
) -> None:
    """A model server delivers in chunks; the n-th message ever sent is dropped for n in losses."""
    start, end = bounds
    target = Cursor(start, end)
    kept: list[int] = []
    sent = 0
    dropped = set(losses)
    chunks = _endless(sizes)
    for _ in range(500):
        if target.done:
            break
        if target.state is State.IDLE:
            target.created()
            waiting = list(enumerate([s for s in stored if s > target.position], start=1))
            delivered = 0
        take, waiting = waiting[: (n := next(chunks))], waiting[n:]
        arrived = []
        for pair in take:
            delivered = pair[0]
            if sent not in dropped:
                arrived.append(pair)
            sent += 1
        kept += deliver(target, *arrived)
        if not waiting and target.state is State.READING:
            target.heartbeat(delivered, max([*stored[-1:], end]), None)
    assert target.done
    assert kept == [s for s in stored if start < s <= end]


def _endless(sizes: list[int]) -> Iterator[int]:
    while True:
        yield from sizes
