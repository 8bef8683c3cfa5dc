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
from nats_stream_source.spark.tasks import NatsInputPartition
from tests.support.nats.buckets import api
from tests.support.query_driver.driver import QueryDriver
from tests.support.recorded_stream import (
    KINDS,
    KINDS_IN_TURN,
    RecordedStream,
    keep_store,
    loss_warnings,
)

COUNT, MORE = 200, 100
ACCEPT = {"failOnDataLoss": "false"}
GONE = range(COUNT + 1, COUNT + 71)
REFUSED = rf"\b{GONE[0]} to {GONE[-1]} aged out"


def logged_of(query: QueryDriver) -> dict[str, Any]:
    assert query.logged is not None
    return query.logged


@pytest.mark.parametrize("attempt", [False, True], ids=["not read", "its reader failed"])
@pytest.mark.parametrize("kind", KINDS)
def test_purged_before_the_restart(
    shared_server: NatsServer, caplog: pytest.LogCaptureFixture, kind: str, attempt: bool
) -> None:
    """70 of 100 are gone; of current values that is the nature."""
    recorded = RecordedStream(kind, shared_server.url).create()
    recorded.write(COUNT)
    loses = kind != "kv current"
    with recorded.query() as first:
        first.until(COUNT)
        recorded.write(MORE)
        assert first.plan()
        offsets, logged = list(first.offsets), logged_of(first)
        api(recorded.url, f"STREAM.PURGE.{recorded.stream}", {"seq": GONE.stop})
        if attempt and loses:
            with pytest.raises(DataLossError, match=REFUSED):
                first.read()
    for _ in range(2 if loses else 0):
        lost = pytest.raises(DataLossError, match=REFUSED)
        with recorded.query(offsets=list(offsets)) as refused, lost:
            refused.plan_logged(logged)
    caplog.clear()
    with recorded.query(offsets=offsets, **ACCEPT) as second:
        second.plan_logged(logged)
        second.read()
        second.drain()
    recorded.check(first.rows + second.rows, lost=GONE)
    assert len(second.rows) == MORE - len(GONE)
    assert [REFUSED[2:] in text for text in loss_warnings(caplog)] == ([True] if loses else [])


@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_history_that_went_before_the_restart(shared_server: NatsServer, kind: str) -> None:
    """Of the first micro-batch, nothing was read yet: history reaches back as far as it does."""
    recorded = RecordedStream(kind, shared_server.url).create()
    recorded.write(COUNT)
    with recorded.query() as first:
        assert first.plan()
        offsets, logged = list(first.offsets), logged_of(first)
    api(recorded.url, f"STREAM.PURGE.{recorded.stream}", {"seq": 51})
    with recorded.query(offsets=offsets) as second:
        second.plan_logged(logged)
        second.read()
        second.drain()
    recorded.check(second.rows, after=50)


# -- set back, and grown again -------------------------------------------------------------------


@pytest.mark.parametrize("splits", ["1", "3"], ids=["one split", "three splits"])
@pytest.mark.parametrize("kind", KINDS_IN_TURN)
def test_set_back_and_grown_before_it_is_read(
    nats_server: NatsServer, tmp_path: Path, kind: str, splits: str
) -> None:
    """Other messages are there than were planned: none of them comes in two micro-batches."""
    recorded = RecordedStream(kind, nats_server.url).create()
    recorded.write(COUNT)
    restore = keep_store(nats_server, tmp_path)
    recorded.write(MORE)
    given = {**ACCEPT, "minPartitions": splits}
    with recorded.query(**given) as first:
        assert first.plan()
        assert len(first.splits) == (1 if kind == "kv current" else int(splits))
        offsets, logged = list(first.offsets), logged_of(first)
        restore()
        assert recorded.state()["last_seq"] == COUNT
        recorded.remove_after(COUNT)
        recorded.write(2 * MORE)
        with pytest.raises(DataLossError, match="was rolled back"):
            first.read()
    lost = pytest.raises(DataLossError, match=f"its messages after {COUNT} are missing")
    with recorded.query(offsets=list(offsets)) as refused, lost:
        refused.plan_logged(logged)
    with recorded.query(offsets=offsets, **given) as second:
        second.plan_logged(logged)
        second.read()
        assert len(second.rows) == COUNT
        second.drain()
    assert second.offsets[-1]["epoch"] == 1
    recorded.check(second.rows)


@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_set_back_between_two_splits(nats_server: NatsServer, tmp_path: Path, kind: str) -> None:
    """It has grown past the end of the split that is read then, not to where the range ends."""
    recorded = RecordedStream(kind, nats_server.url).create()
    recorded.write(COUNT)
    restore = keep_store(nats_server, tmp_path)
    recorded.write(4 * COUNT)
    with recorded.query(minPartitions="2") as query:
        assert query.plan()
        first, second = query.splits
        rows = sum(len(batch) for batch in query.read_task(NatsInputPartition((second,))))
        assert rows == second.end - second.start
        restore()
        recorded.write(first.end - COUNT + 50)
        assert first.end < recorded.state()["last_seq"] < second.end
        with pytest.raises(DataLossError, match="was rolled back"):
            list(query.read_task(NatsInputPartition((first,))))
