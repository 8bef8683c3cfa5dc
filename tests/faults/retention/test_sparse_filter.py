"""A message that matches once in many, while others are written and retention moves on."""

from __future__ import annotations

import pytest

from benchmarks.support.raw_connection import fill
from nats_stream_source.embedded import NatsServer
from tests.support.nats.buckets import publish
from tests.support.recorded_stream import KINDS_IN_TURN, RecordedStream, loss_warnings

KEPT = 500
"""Messages that the stream keeps."""


@pytest.mark.parametrize("kind", KINDS_IN_TURN)
def test_rare_match_keeps_offset_moving(
    shared_server: NatsServer, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """The offset follows the stream with empty micro-batches now and then: no false loss."""
    recorded = RecordedStream(kind, shared_server.url).create(max_msgs=KEPT, discard="old")
    subject = f"{recorded.prefix}rare"

    def rare() -> int:
        return publish(recorded.url, [(subject, b"v", None)])[0]

    narrow = {"filterSubjects": subject} if kind == "stream" else {"keys": "rare"}
    with recorded.query(**narrow) as query:
        wanted = [rare()]
        query.drain()
        micro_batches = len(query.offsets)
        for _ in range(8):
            # Less than the stream keeps between two looks of a running query.
            recorded.write(KEPT * 4 // 5)
            query.drain()
            assert query.seq >= recorded.state()["first_seq"] - 1
        assert recorded.state()["first_seq"] > wanted[0] + 2500
        empty = len(query.offsets) - micro_batches
        wanted.append(rare())
        query.until(wanted[-1])
    assert [row.seq for row in query.rows] == wanted
    assert 0 < empty < 20
    assert loss_warnings(caplog) == []


ROUND = 20_000
"""Messages between two looks; a stream keeps twice as many."""


@pytest.mark.parametrize(
    ("kind", "rounds"),
    [
        ("kv", 4),
        pytest.param("kv current", 4, marks=pytest.mark.faults),
        pytest.param("stream", 4, marks=pytest.mark.faults),
        pytest.param("kv", 50, marks=pytest.mark.faults),
        pytest.param("stream", 50, marks=pytest.mark.faults),
    ],
)
def test_single_match_in_million_messages_while_retention_moves(
    shared_server: NatsServer, caplog: pytest.LogCaptureFixture, kind: str, rounds: int
) -> None:
    """Of a bucket, too, though every key that is written is one that no filter matches."""
    recorded = RecordedStream(kind, shared_server.url).create(
        max_msgs=2 * ROUND, discard="old", storage="memory"
    )
    # More keys than the bucket keeps, or their history would be what moves on.
    noise = [(f"{recorded.prefix}noise.{i}", b"", b"") for i in range(3 * ROUND)]
    rare = [(f"{recorded.prefix}rare", b"1", None)]
    narrow = {"filterSubjects": rare[0][0]} if kind == "stream" else {"keys": "rare"}
    with recorded.query(**narrow) as query:
        wanted = publish(recorded.url, rare)
        for i in range(rounds):
            part = i % 3 * ROUND
            fill(shared_server.port, noise[part : part + ROUND])
            query.drain()
        assert recorded.state()["first_seq"] > (rounds - 2) * ROUND
        wanted += publish(recorded.url, rare)
        query.until(wanted[-1])
    assert [row.seq for row in query.rows] == wanted
    assert loss_warnings(caplog) == []
