"""A message that matches once in many, while others are written and retention moves on."""

from __future__ import annotations

import pytest
from buckets import publish

from benchmarks.raw import fill
from faults.trial import KINDS_IN_TURN, Trial, told_lost
from nats_stream_source.embedded import NatsServer

KEPT = 500
"""Messages that the stream keeps."""


@pytest.mark.parametrize("kind", KINDS_IN_TURN)
def test_a_rare_match(
    shared_server: NatsServer, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """The offset follows the stream with empty micro-batches now and then: no false loss."""
    trial = Trial(kind, shared_server.url).create(max_msgs=KEPT, discard="old")
    subject = f"{trial.prefix}rare"

    def rare() -> int:
        return publish(trial.url, [(subject, b"v", None)])[0]

    narrow = {"filterSubjects": subject} if kind == "stream" else {"keys": "rare"}
    with trial.reading(**narrow) as reading:
        wanted = [rare()]
        reading.drain()
        micro_batches = len(reading.offsets)
        for _ in range(8):
            # Less than the stream keeps between two looks of a running query.
            trial.write(KEPT * 4 // 5)
            reading.drain()
            assert reading.seq >= trial.state()["first_seq"] - 1
        assert trial.state()["first_seq"] > wanted[0] + 2500
        empty = len(reading.offsets) - micro_batches
        wanted.append(rare())
        reading.until(wanted[-1])
    assert [row.seq for row in reading.rows] == wanted
    assert 0 < empty < 20
    assert told_lost(caplog) == []


@pytest.mark.faults
def test_one_match_in_a_million_while_retention_moves_on(
    shared_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    trial = Trial("stream", shared_server.url).create(max_msgs=20_000, storage="memory")
    rare = [(f"{trial.name}.rare", b"1", None)]
    noise = [(f"{trial.name}.noise", b"", b"")] * 10_000
    with trial.reading(filterSubjects=f"{trial.name}.rare") as reading:
        wanted = publish(trial.url, rare)
        for _ in range(100):
            fill(shared_server.port, noise)
            reading.drain()
        assert trial.state()["first_seq"] > 980_000
        wanted += publish(trial.url, rare)
        reading.until(wanted[-1])
    assert [row.seq for row in reading.rows] == wanted
    assert told_lost(caplog) == []
