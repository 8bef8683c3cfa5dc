"""A stream that was rolled back to an earlier copy: what the matrix of all events does not vary.

How far the stream has grown since, where the query had read to, and how much of a planned
micro-batch was read before.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError
from nats_stream_source.spark.readers import NatsInputPartition
from tests.support.nats.store_files import keep_store
from tests.support.query_driver.driver import QueryDriver
from tests.support.recorded_stream import KINDS, KINDS_IN_TURN, RecordedStream, warnings
from tests.support.wait import wait_until

FIRST, SECOND = 200, 100
"""Messages before the copy, and after it."""
ACCEPT = {"failOnDataLoss": "false"}
LOST = "was rolled back"


def with_copy(
    server: NatsServer,
    directory: Path,
    kind: str,
    *,
    first: int = FIRST,
    then: int = SECOND,
    **config: Any,
) -> tuple[RecordedStream, Callable[[], None]]:
    """A stream whose store was copied between ``first`` and ``then`` messages; puts it back."""
    recorded = RecordedStream(kind, server.url).create(**config)
    recorded.write(first)
    restore = keep_store(server, directory)
    recorded.write(then)
    return recorded, restore


def read_all(recorded: RecordedStream, **options: str) -> list[dict[str, Any]]:
    """The offsets of a query that has read all messages."""
    with recorded.query(**options) as query:
        query.until(recorded.last)
    return query.offsets


def read_on(recorded: RecordedStream, offsets: list[dict[str, Any]], **options: str) -> QueryDriver:
    """The query that accepts the loss, after one that refuses it."""
    lost = pytest.raises(DataLossError, match=LOST)
    with recorded.query(offsets=list(offsets), **options) as refused, lost:
        refused.plan()
    with recorded.query(offsets=list(offsets), **options, **ACCEPT) as query:
        query.drain()
    assert query.offsets[-1]["epoch"] == 1
    return query


@pytest.mark.parametrize("grown", [0, SECOND])
@pytest.mark.parametrize("first", [0, FIRST], ids=["to an empty stream", "to some messages"])
@pytest.mark.parametrize("kind", KINDS_IN_TURN)
def test_stream_not_grown_past_checkpoint(
    nats_server: NatsServer, tmp_path: Path, kind: str, first: int, grown: int
) -> None:
    recorded, restore = with_copy(nats_server, tmp_path, kind, first=first)
    offsets = read_all(recorded)
    restore()
    assert recorded.state()["last_seq"] == first
    recorded.remove_after(first)
    recorded.write(grown)
    query = read_on(recorded, offsets)
    recorded.check(query.rows, after=first)
    assert len(query.rows) == grown
    assert query.seq == first + grown


@pytest.mark.parametrize("options", [{"updatesOnly": "true"}, {"keys": "rare.>"}], ids=str)
def test_query_had_no_row_before(
    nats_server: NatsServer, tmp_path: Path, options: dict[str, str]
) -> None:
    """The position, which is beyond the stream's end now, is not one of a row."""
    recorded, restore = with_copy(nats_server, tmp_path, "kv current")
    with recorded.query(**options) as query:
        query.drain()
    assert (query.rows, query.seq) == ([], FIRST + SECOND)
    restore()
    (seq,) = recorded.put([("rare.1", b"new")])
    assert [row.seq for row in read_on(recorded, query.offsets, **options).rows] == [seq]


@pytest.mark.parametrize("kind", KINDS_IN_TURN)
def test_checkpoint_at_hole(
    nats_server: NatsServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """The stream had no message at the checkpoint, and has one now: it was rolled back.

    The checkpoint has no timestamp of what was read, so the query continues after its sequence.
    """
    recorded, restore = with_copy(nats_server, tmp_path, kind, max_msgs_per_subject=1)
    limit = FIRST + SECOND // 2
    recorded.put([(recorded.acknowledged[limit][0], b"again")])
    with recorded.query(maxRowsPerTrigger=str(limit)) as first:
        assert first.plan()
        first.read()
    assert first.seq == limit
    assert first.offsets[-1]["time"] is None

    restore()
    recorded.remove_after(FIRST)
    recorded.write(2 * SECOND)
    caplog.clear()
    second = read_on(recorded, first.offsets)
    assert len([text for text in warnings(caplog) if LOST in text]) == 1
    recorded.check(second.rows, after=limit)
    assert len(second.rows) == FIRST + 2 * SECOND - limit


@pytest.mark.xfail(
    strict=True,
    reason="a superseded message looks the same, and the offset has nothing else to compare",
)
def test_message_at_checkpoint_superseded_again(nats_server: NatsServer, tmp_path: Path) -> None:
    recorded, restore = with_copy(nats_server, tmp_path, "kv", max_msgs_per_subject=1)
    offsets = read_all(recorded)
    restore()
    recorded.remove_after(FIRST)
    recorded.write(SECOND)
    recorded.put([(recorded.acknowledged[FIRST + SECOND][0], b"again")])
    with recorded.query(offsets=offsets) as refused, pytest.raises(DataLossError, match=LOST):
        refused.plan()


# -- planned micro-batches ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS_IN_TURN)
def test_planned_micro_batch_of_several_splits(
    nats_server: NatsServer, tmp_path: Path, kind: str
) -> None:
    """The stream has grown past the planned end: no row is in two micro-batches."""
    recorded, restore = with_copy(nats_server, tmp_path, kind)
    given = {**ACCEPT, "minPartitions": "3"}
    with recorded.query(**given) as first:
        assert first.plan()
        assert len(first.splits) == (1 if kind == "kv current" else 3)
        offsets, logged = list(first.offsets), first.logged
        assert logged is not None
        restore()
        assert recorded.state()["last_seq"] == FIRST
        recorded.remove_after(FIRST)
        recorded.write(2 * SECOND)
        with pytest.raises(DataLossError, match=LOST):
            first.read()
    lost = pytest.raises(DataLossError, match=f"its messages after {FIRST} are missing")
    with recorded.query(offsets=list(offsets)) as refused, lost:
        refused.plan_logged(logged)
    with recorded.query(offsets=offsets, **given) as second:
        second.plan_logged(logged)
        second.read()
        assert len(second.rows) == FIRST
        second.drain()
    assert second.offsets[-1]["epoch"] == 1
    recorded.check(second.rows)


@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_rollback_between_two_splits(nats_server: NatsServer, tmp_path: Path, kind: str) -> None:
    """The stream has grown past the end of the split that is read, not to the planned end."""
    recorded, restore = with_copy(nats_server, tmp_path, kind, then=4 * FIRST)
    with recorded.query(minPartitions="2") as query:
        assert query.plan()
        first, second = query.splits
        rows = sum(len(batch) for batch in query.read_task(NatsInputPartition((second,))))
        assert rows == second.range.end - second.range.start
        restore()
        recorded.write(first.range.end - FIRST + 50)
        assert first.range.end < recorded.state()["last_seq"] < second.range.end
        with pytest.raises(DataLossError, match=LOST):
            list(query.read_task(NatsInputPartition((first,))))


@pytest.mark.faults  # a replica that lags looks the same for half a minute
@pytest.mark.parametrize("kind", KINDS)
def test_planned_range_beyond_end_of_stream(
    nats_server: NatsServer, tmp_path: Path, kind: str
) -> None:
    recorded, restore = with_copy(nats_server, tmp_path, kind)
    with recorded.query() as query:
        assert query.plan()
        restore()
        with pytest.raises(DataLossError, match="rolled back"):
            query.read()
    wait_until(lambda: recorded.consumers() == [], "no consumer is left")
