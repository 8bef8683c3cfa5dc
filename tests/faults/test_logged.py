"""A micro-batch that was planned and logged, but not done, when something happened to its stream.

Spark reads it first after a restart, without asking for its end again. That its stream has lost
something of it meanwhile is told then, as it would be of any other; also again, until somebody
accepts it, when an earlier attempt failed with just that error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from buckets import api

from faults.reading import Reading
from faults.trial import KINDS, KINDS_IN_TURN, Trial, keep_store, told_lost
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError

COUNT, MORE = 200, 100
ACCEPT = {"failOnDataLoss": "false"}
GONE = range(COUNT + 1, COUNT + 71)
REFUSED = rf"\b{GONE[0]} to {GONE[-1]} went away"


def logged_of(reading: Reading) -> dict[str, Any]:
    assert reading.logged is not None
    return reading.logged


@pytest.mark.parametrize("attempt", [False, True], ids=["not read", "its reader failed"])
@pytest.mark.parametrize("kind", KINDS)
def test_purged_before_the_restart(
    shared_server: NatsServer, caplog: pytest.LogCaptureFixture, kind: str, attempt: bool
) -> None:
    """70 of 100 are gone; of current values that is the nature."""
    trial = Trial(kind, shared_server.url).create()
    trial.write(COUNT)
    loses = kind != "kv current"
    with trial.reading() as first:
        first.until(COUNT)
        trial.write(MORE)
        assert first.plan()
        offsets, logged = list(first.offsets), logged_of(first)
        api(trial.url, f"STREAM.PURGE.{trial.stream}", {"seq": GONE.stop})
        if attempt and loses:
            with pytest.raises(DataLossError, match=REFUSED):
                first.read()
    for _ in range(2 if loses else 0):
        lost = pytest.raises(DataLossError, match=REFUSED)
        with trial.reading(offsets=list(offsets)) as refused, lost:
            refused.again(logged)
    caplog.clear()
    with trial.reading(offsets=offsets, **ACCEPT) as second:
        second.again(logged)
        second.read()
        second.drain()
    trial.check(first.rows + second.rows, lost=GONE)
    assert len(second.rows) == MORE - len(GONE)
    assert [REFUSED[2:] in text for text in told_lost(caplog)] == ([True] if loses else [])


@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_history_that_went_before_the_restart(shared_server: NatsServer, kind: str) -> None:
    """Of the first micro-batch, nothing was read yet: history reaches back as far as it does."""
    trial = Trial(kind, shared_server.url).create()
    trial.write(COUNT)
    with trial.reading() as first:
        assert first.plan()
        offsets, logged = list(first.offsets), logged_of(first)
    api(trial.url, f"STREAM.PURGE.{trial.stream}", {"seq": 51})
    with trial.reading(offsets=offsets) as second:
        second.again(logged)
        second.read()
        second.drain()
    trial.check(second.rows, after=50)


# -- set back, and grown again -------------------------------------------------------------------


@pytest.mark.parametrize("splits", ["1", "3"], ids=["one split", "three splits"])
@pytest.mark.parametrize("kind", KINDS_IN_TURN)
def test_set_back_and_grown_before_it_is_read(
    nats_server: NatsServer, tmp_path: Path, kind: str, splits: str
) -> None:
    """Other messages are there than were planned: none of them comes in two micro-batches."""
    trial = Trial(kind, nats_server.url).create()
    trial.write(COUNT)
    restore = keep_store(nats_server, tmp_path)
    trial.write(MORE)
    given = {**ACCEPT, "minPartitions": splits}
    with trial.reading(**given) as first:
        assert first.plan()
        assert len(first.splits) == (1 if kind == "kv current" else int(splits))
        offsets, logged = list(first.offsets), logged_of(first)
        restore()
        assert trial.state()["last_seq"] == COUNT
        trial.forget(COUNT)
        trial.write(2 * MORE)
        with pytest.raises(DataLossError, match="was set back"):
            first.read()
    lost = pytest.raises(DataLossError, match=f"what came after {COUNT} is gone")
    with trial.reading(offsets=list(offsets)) as refused, lost:
        refused.again(logged)
    with trial.reading(offsets=offsets, **given) as second:
        second.again(logged)
        second.read()
        assert len(second.rows) == COUNT
        second.drain()
    assert second.offsets[-1]["epoch"] == 1
    trial.check(second.rows)


@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_set_back_between_two_splits(nats_server: NatsServer, tmp_path: Path, kind: str) -> None:
    """It has grown past the end of the split that is read then, not to where the range ends."""
    trial = Trial(kind, nats_server.url).create()
    trial.write(COUNT)
    restore = keep_store(nats_server, tmp_path)
    trial.write(4 * COUNT)
    with trial.reading(minPartitions="2") as reading:
        assert reading.plan()
        first, second = reading.splits
        reading.splits = [second]
        assert len(reading.read()) == second.end - second.start
        restore()
        trial.write(first.end - COUNT + 50)
        assert first.end < trial.state()["last_seq"] < second.end
        reading.splits = [first]
        with pytest.raises(DataLossError, match="was set back"):
            reading.read()
