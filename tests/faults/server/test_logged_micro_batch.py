"""A micro-batch that was planned and logged, but not done, when something happened to its stream.

Spark reads it first after a restart, without asking for its end again. That its stream has lost
something of it meanwhile is told then, as it would be of any other; also again, until somebody
accepts it, when an earlier attempt failed with just that error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError
from tests.support.nats.buckets import api
from tests.support.query_driver.micro_batch import MicroBatchQuery
from tests.support.workload import KINDS, KINDS_IN_TURN, Workload, keep_store, told_lost

COUNT, MORE = 200, 100
ACCEPT = {"failOnDataLoss": "false"}
GONE = range(COUNT + 1, COUNT + 71)
REFUSED = rf"\b{GONE[0]} to {GONE[-1]} aged out"


def logged_of(reading: MicroBatchQuery) -> dict[str, Any]:
    assert reading.logged is not None
    return reading.logged


@pytest.mark.parametrize("attempt", [False, True], ids=["not read", "its reader failed"])
@pytest.mark.parametrize("kind", KINDS)
def test_purged_before_the_restart(
    shared_server: NatsServer, caplog: pytest.LogCaptureFixture, kind: str, attempt: bool
) -> None:
    """70 of 100 are gone; of current values that is the nature."""
    workload = Workload(kind, shared_server.url).create()
    workload.write(COUNT)
    loses = kind != "kv current"
    with workload.reading() as first:
        first.until(COUNT)
        workload.write(MORE)
        assert first.plan()
        offsets, logged = list(first.offsets), logged_of(first)
        api(workload.url, f"STREAM.PURGE.{workload.stream}", {"seq": GONE.stop})
        if attempt and loses:
            with pytest.raises(DataLossError, match=REFUSED):
                first.read()
    for _ in range(2 if loses else 0):
        lost = pytest.raises(DataLossError, match=REFUSED)
        with workload.reading(offsets=list(offsets)) as refused, lost:
            refused.plan_logged(logged)
    caplog.clear()
    with workload.reading(offsets=offsets, **ACCEPT) as second:
        second.plan_logged(logged)
        second.read()
        second.drain()
    workload.check(first.rows + second.rows, lost=GONE)
    assert len(second.rows) == MORE - len(GONE)
    assert [REFUSED[2:] in text for text in told_lost(caplog)] == ([True] if loses else [])


@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_history_that_went_before_the_restart(shared_server: NatsServer, kind: str) -> None:
    """Of the first micro-batch, nothing was read yet: history reaches back as far as it does."""
    workload = Workload(kind, shared_server.url).create()
    workload.write(COUNT)
    with workload.reading() as first:
        assert first.plan()
        offsets, logged = list(first.offsets), logged_of(first)
    api(workload.url, f"STREAM.PURGE.{workload.stream}", {"seq": 51})
    with workload.reading(offsets=offsets) as second:
        second.plan_logged(logged)
        second.read()
        second.drain()
    workload.check(second.rows, after=50)


# -- set back, and grown again -------------------------------------------------------------------


@pytest.mark.parametrize("splits", ["1", "3"], ids=["one split", "three splits"])
@pytest.mark.parametrize("kind", KINDS_IN_TURN)
def test_set_back_and_grown_before_it_is_read(
    nats_server: NatsServer, tmp_path: Path, kind: str, splits: str
) -> None:
    """Other messages are there than were planned: none of them comes in two micro-batches."""
    workload = Workload(kind, nats_server.url).create()
    workload.write(COUNT)
    restore = keep_store(nats_server, tmp_path)
    workload.write(MORE)
    given = {**ACCEPT, "minPartitions": splits}
    with workload.reading(**given) as first:
        assert first.plan()
        assert len(first.splits) == (1 if kind == "kv current" else int(splits))
        offsets, logged = list(first.offsets), logged_of(first)
        restore()
        assert workload.state()["last_seq"] == COUNT
        workload.forget(COUNT)
        workload.write(2 * MORE)
        with pytest.raises(DataLossError, match="was rolled back"):
            first.read()
    lost = pytest.raises(DataLossError, match=f"its messages after {COUNT} are missing")
    with workload.reading(offsets=list(offsets)) as refused, lost:
        refused.plan_logged(logged)
    with workload.reading(offsets=offsets, **given) as second:
        second.plan_logged(logged)
        second.read()
        assert len(second.rows) == COUNT
        second.drain()
    assert second.offsets[-1]["epoch"] == 1
    workload.check(second.rows)


@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_set_back_between_two_splits(nats_server: NatsServer, tmp_path: Path, kind: str) -> None:
    """It has grown past the end of the split that is read then, not to where the range ends."""
    workload = Workload(kind, nats_server.url).create()
    workload.write(COUNT)
    restore = keep_store(nats_server, tmp_path)
    workload.write(4 * COUNT)
    with workload.reading(minPartitions="2") as reading:
        assert reading.plan()
        first, second = reading.splits
        reading.splits = [second]
        assert len(reading.read()) == second.end - second.start
        restore()
        workload.write(first.end - COUNT + 50)
        assert first.end < workload.state()["last_seq"] < second.end
        reading.splits = [first]
        with pytest.raises(DataLossError, match="was rolled back"):
            reading.read()
