"""A server's store that was damaged while it was down: what it then has, it has.

It drops what it cannot read and goes on, so acknowledged writes are gone, and often nothing tells.
Where the checkpoint shows it, the query stops; what nobody can know is at least never worse than
that: what is left comes in order, and what is written later comes too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from faults.store import directory_of, flip
from faults.trial import KINDS, Trial
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import BucketNotFoundError, DataLossError, StreamNotFoundError

COUNT, SIZE = 1500, 10_000
MORE = 100


@pytest.fixture(params=KINDS)
def trial(request: pytest.FixtureRequest, nats_server: NatsServer) -> Trial:
    trial = Trial(request.param, nats_server.url).create()
    trial.write(COUNT, SIZE)
    return trial


def damage(server: NatsServer, trial: Trial, work: Callable[[Path], object]) -> None:
    """Kill the server, give its directory of the stream to ``work``, and start it again."""
    server.kill()
    work(directory_of(server, trial.stream))
    server.start()


def last_block(directory: Path) -> Path:
    return max(directory.glob("msgs/*.blk"), key=lambda file: int(file.stem))


def test_the_end_is_lost_which_was_read(nats_server: NatsServer, trial: Trial) -> None:
    with trial.reading() as first:
        first.until(trial.last)
    damage(nats_server, trial, lambda directory: flip(last_block(directory), 0.5))
    left = trial.state()["last_seq"]
    assert 0 < left < COUNT
    lost = pytest.raises(DataLossError, match=f"was set back: it now ends at {left}")
    with trial.reading(offsets=first.offsets) as refused, lost:
        refused.plan()
    trial.forget(left)
    trial.write(MORE)
    with trial.reading(offsets=first.offsets, failOnDataLoss="false") as second:
        second.drain()
    assert second.seq == trial.last
    trial.check(second.rows, after=left)


def test_what_was_not_read_is_lost(nats_server: NatsServer, trial: Trial) -> None:
    """In the middle: as if it had been deleted, and so it is in no message of the server."""
    damage(nats_server, trial, lambda directory: flip(directory / "msgs" / "1.blk", 0.5))
    state = trial.state()
    assert (state["first_seq"], state["last_seq"]) == (1, COUNT)
    assert state["messages"] < COUNT
    trial.write(MORE)
    with trial.reading(minPartitions="4") as reading:
        reading.until(trial.last)
    read = {row.seq for row in reading.rows}
    trial.check(reading.rows, lost=set(trial.acknowledged) - read)
    assert len(read) == state["messages"] + MORE
    assert set(range(COUNT + 1, COUNT + MORE + 1)) <= read


def test_the_whole_stream_is_gone(nats_server: NatsServer, trial: Trial) -> None:
    """A server that cannot read a stream's own description does not have it any more."""
    gone = (StreamNotFoundError, BucketNotFoundError)
    with trial.reading() as first:
        first.until(trial.last)
        trial.write(MORE)
        assert first.plan()
        damage(nats_server, trial, lambda directory: flip(directory / "meta.inf", 0.5))
        with pytest.raises(gone):
            first.read()
        with pytest.raises(gone):
            first.plan()
    with trial.reading(offsets=first.offsets, failOnDataLoss="false") as second:
        with pytest.raises(gone):
            second.plan()
        trial.acknowledged.clear()
        trial.create()
        trial.write(MORE)
        second.drain()
    assert second.offsets[-1]["epoch"] == 1
    trial.check(second.rows)
