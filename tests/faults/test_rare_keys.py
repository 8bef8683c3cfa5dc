"""A bucket's key that is written once in many entries, while others are and retention moves on."""

from __future__ import annotations

import logging

import pytest
from buckets import put

from faults.trial import KINDS_IN_TURN, Trial
from nats_stream_source.embedded import NatsServer

KEPT = 500
"""Messages that the bucket keeps."""


@pytest.mark.parametrize("kind", KINDS_IN_TURN[:2])
def test_a_rare_key(shared_server: NatsServer, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """The offset follows the bucket with empty micro-batches now and then: no false loss."""
    trial = Trial(kind, shared_server.url).create(max_msgs=KEPT, discard="old")

    def rare(number: int) -> int:
        return put(trial.url, trial.name, "rare", b"%d" % number)

    with trial.reading(keys="rare") as reading:
        wanted = [rare(0)]
        reading.drain()
        micro_batches = len(reading.offsets)
        for _ in range(8):
            # Less than the bucket keeps between two looks of a running query.
            trial.write(KEPT * 4 // 5)
            reading.drain()
            assert reading.seq >= trial.state()["first_seq"] - 1
        assert trial.state()["first_seq"] > wanted[0] + 2500
        empty = len(reading.offsets) - micro_batches
        wanted.append(rare(1))
        reading.until(wanted[-1])
    assert [row.seq for row in reading.rows] == wanted
    assert 0 < empty < 20
    told = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert not [text for text in told if "went away" in text]
