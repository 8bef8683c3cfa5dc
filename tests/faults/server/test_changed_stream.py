"""A checkpoint that is used again after something happened to its stream.

Purged, aged out, deleted and re-created, set back: what was not read yet and is gone is told, with
the numbers of what is gone, and what was read already is told by nobody and read by nobody again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError
from tests.support.nats.buckets import api, publish
from tests.support.nats.retention import purge
from tests.support.query_driver.driver import QueryDriver
from tests.support.recorded_stream import KINDS, KINDS_IN_TURN, RecordedStream, keep_store, warnings
from tests.support.wait import wait_until

COUNT, MORE = 200, 100

pytestmark = pytest.mark.recorded(kinds=KINDS, count=COUNT)

KEPT = (30, MORE - 1)
"""Of MORE, what a purge leaves: the loss of one is the smallest there is."""
ACCEPT = {"failOnDataLoss": "false"}


def read_all(recorded: RecordedStream) -> QueryDriver:
    with recorded.query() as query:
        query.until(recorded.last)
    return query


def test_purged_after_all_was_read(
    recorded: RecordedStream, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is lost, so nothing is said."""
    first = read_all(recorded)
    purge(recorded, keep=0)
    recorded.write(MORE)
    caplog.clear()
    with recorded.query(offsets=first.offsets) as second:
        second.until(recorded.last)
    recorded.check(first.rows + second.rows)
    assert not [text for text in warnings(caplog) if "aged out" in text]


@pytest.mark.parametrize("kept", KEPT)
def test_purged_with_some_unread(
    recorded: RecordedStream, caplog: pytest.LogCaptureFixture, kept: int
) -> None:
    """Of 100 unread ones 70 are gone, or one; of current values that is the nature."""
    first = read_all(recorded)
    recorded.write(MORE)
    purge(recorded, keep=kept)
    gone = range(COUNT + 1, COUNT + MORE - kept + 1)
    assert recorded.state()["first_seq"] == gone.stop
    if recorded.kind != "kv current":
        lost = pytest.raises(DataLossError, match=f"{gone[0]} to {gone[-1]} aged out")
        with recorded.query(offsets=first.offsets) as refused, lost:
            refused.plan()
        assert refused.rows == []
    caplog.clear()
    with recorded.query(offsets=first.offsets, **ACCEPT) as second:
        second.until(recorded.last)
    recorded.check(first.rows + second.rows, lost=gone)
    assert len(second.rows) == kept
    told = [text for text in warnings(caplog) if f"{gone[0]} to {gone[-1]} aged out" in text]
    assert len(told) == (recorded.kind != "kv current")


@pytest.mark.parametrize("kept", KEPT)
def test_purged_between_planning_and_reading(recorded: RecordedStream, kept: int) -> None:
    first = read_all(recorded)
    recorded.write(MORE)
    gone = range(COUNT + 1, COUNT + MORE - kept + 1)
    with recorded.query(offsets=first.offsets) as refused:
        assert refused.plan()
        purge(recorded, keep=kept)
        if recorded.kind != "kv current":
            with pytest.raises(DataLossError, match=f"{gone[0]} to {gone[-1]} aged out"):
                refused.read()
    with recorded.query(offsets=first.offsets, **ACCEPT) as second:
        second.until(recorded.last)
    recorded.check(first.rows + second.rows, lost=gone)


def test_deleted_and_made_again(recorded: RecordedStream) -> None:
    """The new stream's rows come from its beginning on, in an epoch of their own."""
    first = read_all(recorded)
    recorded.check(first.rows)
    api(recorded.url, f"STREAM.DELETE.{recorded.stream}")
    recorded.acknowledged.clear()
    recorded.create()
    recorded.write(MORE)
    lost = pytest.raises(DataLossError, match="deleted and re-created")
    with recorded.query(offsets=first.offsets) as refused, lost:
        refused.plan()
    with recorded.query(offsets=first.offsets, **ACCEPT) as second:
        second.drain()
    assert second.offsets[-1]["epoch"] == 1
    recorded.check(second.rows)
    assert {row.created for row in first.rows}.isdisjoint({row.created for row in second.rows})


def test_stream_recreated_between_plan_and_read(recorded: RecordedStream) -> None:
    """Rows of two streams are never mixed: the micro-batch fails, whatever is accepted."""
    with recorded.query(**ACCEPT) as query:
        assert query.plan()
        offsets, logged = list(query.offsets), query.logged
        assert logged is not None
        api(recorded.url, f"STREAM.DELETE.{recorded.stream}")
        recorded.acknowledged.clear()
        recorded.create()
        recorded.write(COUNT + MORE)
        with pytest.raises(DataLossError, match="deleted and re-created"):
            query.read()
    with recorded.query(offsets=offsets, **ACCEPT) as second:
        second.plan_logged(logged)
        assert second.read().rows == []
        second.drain()
    recorded.check(second.rows)


# -- set back -------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 40, MORE, 2 * MORE], ids=["", "some", "as many", "more"])
@pytest.mark.parametrize("kind", KINDS_IN_TURN)
def test_restored_to_an_earlier_sequence(
    nats_server: NatsServer, tmp_path: Path, kind: str, after: int
) -> None:
    """With ``after`` more writes before the checkpoint is used again."""
    recorded = RecordedStream(kind, nats_server.url).create()
    recorded.write(COUNT)
    restore = keep_store(nats_server, tmp_path)
    recorded.write(MORE)
    first = read_all(recorded)
    recorded.check(first.rows)

    restore()
    assert recorded.state()["last_seq"] == COUNT
    recorded.remove_after(COUNT)
    if after:
        recorded.write(after)

    lost = pytest.raises(DataLossError, match="was rolled back")
    with recorded.query(offsets=first.offsets) as refused, lost:
        refused.plan()
    with recorded.query(offsets=first.offsets, **ACCEPT) as second:
        second.drain()
    assert second.offsets[-1]["epoch"] == 1
    recorded.check(second.rows, after=COUNT)
    assert len(second.rows) == after


@pytest.mark.parametrize("kind", KINDS_IN_TURN)
def test_set_back_past_a_checkpoint_at_a_hole(
    nats_server: NatsServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    """There was no message at the checkpoint, and now there is one: the stream was set back.

    What the query has read ends at a time that nobody knows, so it goes on after the checkpoint.
    """
    recorded = RecordedStream(kind, nats_server.url).create(max_msgs_per_subject=1)
    recorded.write(COUNT)
    restore = keep_store(nats_server, tmp_path)
    recorded.write(MORE)
    limit = COUNT + MORE // 2
    superseded = recorded.acknowledged[limit][0]
    publish(recorded.url, [(recorded.prefix + superseded, b"again", None)])
    with recorded.query(maxRowsPerTrigger=str(limit)) as first:
        assert first.plan()
        first.read()
    assert first.seq == limit
    assert first.offsets[-1]["time"] is None

    restore()
    recorded.remove_after(COUNT)
    recorded.write(2 * MORE)
    lost = pytest.raises(DataLossError, match="was rolled back")
    with recorded.query(offsets=first.offsets) as refused, lost:
        refused.plan()
    caplog.clear()
    with recorded.query(offsets=first.offsets, **ACCEPT) as second:
        second.drain()
    assert len([text for text in warnings(caplog) if "was rolled back" in text]) == 1
    assert second.offsets[-1]["epoch"] == 1
    recorded.check(second.rows, after=limit)
    assert len(second.rows) == COUNT + 2 * MORE - limit


@pytest.mark.faults  # a replica that lags looks the same for half a minute
@pytest.mark.parametrize("kind", KINDS)
def test_restored_between_planning_and_reading(
    nats_server: NatsServer, tmp_path: Path, kind: str
) -> None:
    """What was planned is not there any more: never a short batch."""
    recorded = RecordedStream(kind, nats_server.url).create()
    recorded.write(COUNT)
    restore = keep_store(nats_server, tmp_path)
    recorded.write(MORE)
    with recorded.query() as query:
        assert query.plan()
        restore()
        with pytest.raises(DataLossError, match="rolled back"):
            query.read()
    wait_until(lambda: recorded.consumers() == [], "no consumer is left")
