"""What an ordered reader receives: bytes in, events and bounded batches out, without a server."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

from nats_stream_source.wire.consumer import intake as module
from nats_stream_source.wire.consumer.cursor import Rebuild, State
from nats_stream_source.wire.consumer.deliveries import (
    Deliveries,
    Delivery,
    encode_deliveries,
    encode_delivery,
)
from nats_stream_source.wire.consumer.intake import Batcher, Event, Ignored, Intake, Reply
from nats_stream_source.wire.framing import scanner
from nats_stream_source.wire.framing.frames import Framer, Frames
from tests.unit.wire.reference.streams import using

ENDLESS = (1 << 63) - 1


@pytest.fixture(params=scanner.available(), autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    with using(request.param):
        yield


def delivery(consumer_seq: int, stream_seq: int, subject: str = "$KV.b.k") -> bytes:
    message = Delivery(subject, stream_seq, 1000 + stream_seq, b"", b"v%d" % stream_seq)
    return encode_delivery("KV_b", message, consumer_seq)


def message(block: bytes, reply: bytes = b"") -> bytes:
    words = [b"HMSG _INBOX.1 1", *([reply] if reply else []), b"%d %d" % (len(block), len(block))]
    return b" ".join(words) + b"\r\n" + block + b"\r\n"


def status(line: bytes, *fields: bytes, reply: bytes = b"") -> bytes:
    return message(b"NATS/1.0 %s\r\n%s\r\n" % (line, b"".join(f + b"\r\n" for f in fields)), reply)


def heartbeat(last_consumer: int, last_stream: int, stalled: bytes = b"") -> bytes:
    fields = [b"Nats-Last-Consumer: %d" % last_consumer, b"Nats-Last-Stream: %d" % last_stream]
    fields += [b"Nats-Consumer-Stalled: " + stalled] if stalled else []
    return status(b"100 Idle Heartbeat", *fields)


def flow_control(reply: bytes) -> bytes:
    return status(b"100 FlowControl Request", reply=reply)


def frames(*parts: bytes) -> list[Frames]:
    return [Framer().feed(b"".join(parts))]


def reading(start: int = 0, end: int = ENDLESS, **more: Any) -> Intake:
    intake = Intake(start, end, **more)
    intake.created()
    return intake


def shown(events: Iterator[Event]) -> list[object]:
    """Sequences of batches, and the other events as they are."""
    return [
        event.stream_seq.tolist() if isinstance(event, Deliveries) else event for event in events
    ]


def test_reply_is_yielded_before_later_frames_are_received() -> None:
    intake = reading()
    events = intake.feed(frames(delivery(1, 1), flow_control(b"$JS.FC.a"), delivery(2, 2)))
    assert next(events) == Reply("$JS.FC.a")
    assert intake.cursor.position == 1
    assert shown(events) == []
    assert intake.cursor.position == 2
    assert shown(intake.rest()) == [[1, 2]]


def test_reply_precedes_batches_of_earlier_frames() -> None:
    intake = reading(batch_rows=1)
    received = frames(delivery(1, 1), delivery(2, 2), flow_control(b"$JS.FC.a"))
    assert shown(intake.feed(received)) == [Reply("$JS.FC.a"), [1], [2]]


def test_reply_near_end_is_deferred_until_idle() -> None:
    intake = reading(end=5)
    received = frames(*(delivery(i, i) for i in range(1, 4)), flow_control(b"$JS.FC.a"))
    assert shown(intake.feed(received)) == []
    assert intake.idle() == Reply("$JS.FC.a")
    assert intake.idle() is None


def test_stalled_heartbeat_after_confirmed_reply_loses_consumer() -> None:
    intake = reading()
    stalled = frames(heartbeat(0, 0, b"$JS.FC.a"))
    assert shown(intake.feed(stalled)) == [Reply("$JS.FC.a")]
    assert intake.stalled
    assert shown(intake.feed(stalled)) == []
    intake.confirmed("$JS.FC.a")
    assert shown(intake.feed(stalled)) == []
    assert intake.cursor.rebuilds == [Rebuild.STALLED]
    intake.created()
    assert not intake.stalled


def test_eager_intake_returns_rows_at_once_and_reports_progress() -> None:
    intake = reading(eager=True)
    assert shown(intake.feed(frames(delivery(1, 3)))) == [[3]]
    assert shown(intake.feed(frames(heartbeat(1, 8)))) == [[]]
    assert shown(intake.feed(frames(heartbeat(1, 8)))) == []
    assert shown(intake.feed(frames(heartbeat(1, 9)))) == [[]]
    assert shown(intake.feed(frames(delivery(2, 10), delivery(3, 11)))) == [[10, 11]]


@pytest.mark.parametrize(
    ("lost", "reason", "detail"),
    [
        (status(b"409 Consumer Deleted"), Rebuild.CONSUMER_GONE, "409 Consumer Deleted"),
        (status(b"100 Idle Heartbeat"), Rebuild.GAP, "a heartbeat without its sequences"),
        (heartbeat(7, 7), Rebuild.GAP, ""),
        (delivery(3, 3), Rebuild.GAP, ""),
    ],
)
def test_frames_after_loss_are_ignored(lost: bytes, reason: Rebuild, detail: str) -> None:
    intake = reading(eager=True)
    received = frames(delivery(1, 1), lost, delivery(2, 2), flow_control(b"$JS.FC.a"))
    assert shown(intake.feed(received)) == [[1]]
    assert (intake.cursor.state, intake.cursor.rebuilds) == (State.IDLE, [reason])
    assert intake.loss == detail
    intake.created()
    assert intake.loss == ""
    assert shown(intake.feed(frames(delivery(1, 2)))) == [[2]]


def test_message_of_other_client_is_ignored() -> None:
    intake = reading()
    received = frames(message(b"NATS/1.0\r\nStatus: 409\r\n\r\n"), b"MSG x 1 0\r\n\r\n")
    assert shown(intake.feed(received)) == [Ignored("_INBOX.1"), Ignored("x")]
    assert intake.cursor.state is State.READING


def test_messages_without_prefix_are_left_out_and_counted() -> None:
    intake = reading(eager=True, prefix="$KV.b.")
    received = frames(delivery(1, 1), delivery(2, 2, "other"), delivery(3, 3))
    assert shown(intake.feed(received)) == [[1, 3]]
    assert intake.left_out == 1
    assert intake.cursor.position == 3


def test_filter_of_consumer_selects_its_rows() -> None:
    intake = Intake(0, ENDLESS, eager=True)
    intake.created(lambda rows: rows.select(rows.stream_seq % 2 == 1))
    assert shown(intake.feed(frames(*(delivery(i, i) for i in range(1, 5))))) == [[1, 3]]
    intake.lost(Rebuild.RECONNECTED)
    intake.created()
    assert shown(intake.feed(frames(delivery(1, 5), delivery(2, 6)))) == [[5, 6]]


def test_initial_values_behind_missing_one_are_held_back() -> None:
    intake = reading(end=70, initial_through=70)
    seqs = (0, 10, 20, 30, 40, 50, 60, 70)
    first, second = ([delivery(i, seqs[i]) for i in some] for some in ((1, 3, 4, 6, 7), (1, 2, 3)))
    assert shown(intake.feed(frames(*first))) == []
    assert shown(intake.rest()) == [[10]]
    assert intake.cursor.rebuilds == [Rebuild.GAP]
    intake.created()
    assert shown(intake.feed(frames(*second))) == []
    assert shown(intake.rest()) == [[20, 30, 40]], "60 and 70 wait for 50"
    assert shown(intake.feed(frames(*(delivery(i, seqs[i]) for i in (4, 5, 6))))) == []
    assert shown(intake.rest()) == [[50, 60, 70]]
    assert intake.cursor.done


def test_too_many_held_rows_lose_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_HELD_BYTES", 10)
    intake = reading(end=50, initial_through=50)
    assert shown(intake.feed(frames(delivery(1, 10), delivery(3, 30)))) == []
    assert (intake.cursor.state, intake.loss) == (State.IDLE, "too many rows follow a missing row")


@given(
    kinds=st.lists(st.sampled_from(["row", "flow", "beat"]), max_size=30),
    cuts=st.lists(st.integers(0, 3000), max_size=5),
    batch_rows=st.integers(1, 5),
)
def test_rows_and_replies_do_not_depend_on_chunks(
    kinds: list[str], cuts: list[int], batch_rows: int
) -> None:
    seq, parts, replies = 0, [], []
    for number, kind in enumerate(kinds):
        if kind == "row":
            seq += 1
            parts.append(delivery(seq, seq))
        elif kind == "beat":
            parts.append(heartbeat(seq, seq))
        else:
            replies.append(Reply(f"$JS.FC.{number}"))
            parts.append(flow_control(b"$JS.FC.%d" % number))
    stream = b"".join(parts)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    framer, intake = Framer(), reading(batch_rows=batch_rows)
    received = [framer.feed(stream[a:b]) for a, b in itertools.pairwise(edges)]
    events = list(intake.feed(received))
    batches = [event for event in events if isinstance(event, Deliveries)]
    assert [event for event in events if isinstance(event, Reply)] == replies
    assert all(len(batch) <= batch_rows for batch in batches)
    rows = [seq for batch in (*batches, *intake.rest()) for seq in batch.stream_seq.tolist()]
    assert rows == list(range(1, seq + 1))
    assert intake.last_row == ((seq, 1000 + seq) if seq else None)


def run_of(*payloads: bytes) -> Deliveries:
    return encode_deliveries("S", [Delivery("s", 1, 1, b"", payload) for payload in payloads])


def payloads(frames: Deliveries) -> list[bytes]:
    return [frames.payload(i) for i in range(len(frames))]


def drain(batcher: Batcher) -> list[Deliveries]:
    found = []
    while (batch := batcher.pop_full()) is not None:
        found.append(batch)
    while (batch := batcher.pop()) is not None:
        found.append(batch)
    return found


CASES = {
    "by rows": ((2, 10_000), [b"a", b"b", b"c", b"d", b"e"], [2, 2, 1]),
    "exactly full": ((5, 10_000), [b"a", b"b", b"c", b"d", b"e"], [5]),
    "by bytes": ((100, 300), [b"x" * 45] * 4, [2, 2]),
    "one too large alone": ((100, 100), [b"a", b"x" * 500, b"b"], [1, 1, 1]),
    "nothing": ((2, 10), [], []),
}


@pytest.mark.parametrize(("bounds", "given_payloads", "sizes"), CASES.values(), ids=CASES)
def test_batches(bounds: tuple[int, int], given_payloads: list[bytes], sizes: list[int]) -> None:
    batcher = Batcher(*bounds)
    if given_payloads:
        batcher.add(run_of(*given_payloads))
    found = drain(batcher)
    assert [len(batch) for batch in found] == sizes
    assert [p for batch in found for p in payloads(batch)] == given_payloads


def test_batch_is_returned_when_full() -> None:
    batcher = Batcher(3, 1000)
    batcher.add(run_of(b"a", b"b"))
    assert batcher.pop_full() is None
    batcher.add(run_of(b"c", b"d"))
    full = batcher.pop_full()
    assert full is not None
    assert payloads(full) == [b"a", b"b", b"c"]
    assert batcher.pop_full() is None
    rest = batcher.pop()
    assert rest is not None
    assert payloads(rest) == [b"d"]


@given(
    runs=st.lists(st.lists(st.binary(max_size=60), min_size=1, max_size=8), max_size=12),
    max_rows=st.integers(1, 10),
    max_bytes=st.integers(1, 900),
)
def test_everything_once_in_order_and_bounded(
    runs: list[list[bytes]], max_rows: int, max_bytes: int
) -> None:
    batcher = Batcher(max_rows, max_bytes)
    found: list[Deliveries] = []
    for run in runs:
        batcher.add(run_of(*run))
        while (batch := batcher.pop_full()) is not None:
            found.append(batch)
    found += drain(batcher)
    assert [p for batch in found for p in payloads(batch)] == [p for run in runs for p in run]
    for batch in found:
        assert 1 <= len(batch) <= max_rows
        assert batch.size <= max_bytes or len(batch) == 1


def test_batch_large_enough_ends_with_its_buffer() -> None:
    """So that nothing is copied."""
    framer = Framer()
    line = encode_delivery("S", Delivery("s", 1, 1, b"", bytes(60_000)))
    batcher = Batcher(8192, 4 << 20)
    runs = [Deliveries.of(framer.feed(line * 18)) for _ in range(20)]
    for run in runs:
        batcher.add(run)
    found = drain(batcher)
    assert sum(map(len, found)) == 360
    assert all((1 << 20) <= batch.nbytes <= 4 << 20 for batch in found)
    assert all(any(batch.buffer is run.buffer for run in runs) for batch in found)


def test_few_frames_do_not_keep_their_buffers() -> None:
    batcher = Batcher(100, 1 << 20)
    for _ in range(5):
        received = Framer().feed(
            encode_delivery("S", Delivery("s", 1, 1, b"", b"x")) + b"PING\r\n" * 9000
        )
        batcher.add(Deliveries.of(received.select(slice(0, 1))))
    kept = list(batcher._runs)
    assert [len(run.buffer) == run.nbytes for run in kept] == [True] * 4 + [False]
    assert payloads(drain(batcher)[0]) == [b"x"] * 5
