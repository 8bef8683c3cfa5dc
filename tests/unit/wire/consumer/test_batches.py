"""Batches are bounded, in order, and hold everything once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.wire.consumer.batches import Batcher
from nats_stream_source.wire.consumer.deliveries import Deliveries
from nats_stream_source.wire.encode import Delivery, encode_deliveries, encode_delivery
from nats_stream_source.wire.framing.frames import Framer


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
