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
from tests.support.query_driver.micro_batch import MicroBatchQuery
from tests.support.wait import wait_until
from tests.support.workload import KINDS, KINDS_IN_TURN, Workload, keep_store, warnings

COUNT, MORE = 200, 100

pytestmark = pytest.mark.workload(kinds=KINDS, count=COUNT)

KEPT = (30, MORE - 1)
"""Of MORE, what a purge leaves: the loss of one is the smallest there is."""
ACCEPT = {"failOnDataLoss": "false"}


def read_all(workload: Workload) -> MicroBatchQuery:
    with workload.reading() as reading:
        reading.until(workload.last)
    return reading


def test_purged_after_all_was_read(workload: Workload, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is lost, so nothing is said."""
    first = read_all(workload)
    purge(workload, keep=0)
    workload.write(MORE)
    caplog.clear()
    with workload.reading(offsets=first.offsets) as second:
        second.until(workload.last)
    workload.check(first.rows + second.rows)
    assert not [text for text in warnings(caplog) if "aged out" in text]


@pytest.mark.parametrize("kept", KEPT)
def test_purged_with_some_unread(
    workload: Workload, caplog: pytest.LogCaptureFixture, kept: int
) -> None:
    """Of 100 unread ones 70 are gone, or one; of current values that is the nature."""
    first = read_all(workload)
    workload.write(MORE)
    purge(workload, keep=kept)
    gone = range(COUNT + 1, COUNT + MORE - kept + 1)
    assert workload.state()["first_seq"] == gone.stop
    if workload.kind != "kv current":
        lost = pytest.raises(DataLossError, match=f"{gone[0]} to {gone[-1]} aged out")
        with workload.reading(offsets=first.offsets) as refused, lost:
            refused.plan()
        assert refused.rows == []
    caplog.clear()
    with workload.reading(offsets=first.offsets, **ACCEPT) as second:
        second.until(workload.last)
    workload.check(first.rows + second.rows, lost=gone)
    assert len(second.rows) == kept
    told = [text for text in warnings(caplog) if f"{gone[0]} to {gone[-1]} aged out" in text]
    assert len(told) == (workload.kind != "kv current")


@pytest.mark.parametrize("kept", KEPT)
def test_purged_between_planning_and_reading(workload: Workload, kept: int) -> None:
    first = read_all(workload)
    workload.write(MORE)
    gone = range(COUNT + 1, COUNT + MORE - kept + 1)
    with workload.reading(offsets=first.offsets) as refused:
        assert refused.plan()
        purge(workload, keep=kept)
        if workload.kind != "kv current":
            with pytest.raises(DataLossError, match=f"{gone[0]} to {gone[-1]} aged out"):
                refused.read()
    with workload.reading(offsets=first.offsets, **ACCEPT) as second:
        second.until(workload.last)
    workload.check(first.rows + second.rows, lost=gone)


def test_deleted_and_made_again(workload: Workload) -> None:
    """The new stream's rows come from its beginning on, in an epoch of their own."""
    first = read_all(workload)
    workload.check(first.rows)
    api(workload.url, f"STREAM.DELETE.{workload.stream}")
    workload.acknowledged.clear()
    workload.create()
    workload.write(MORE)
    lost = pytest.raises(DataLossError, match="deleted and re-created")
    with workload.reading(offsets=first.offsets) as refused, lost:
        refused.plan()
    with workload.reading(offsets=first.offsets, **ACCEPT) as second:
        second.drain()
    assert second.offsets[-1]["epoch"] == 1
    workload.check(second.rows)
    assert {row.created for row in first.rows}.isdisjoint({row.created for row in second.rows})


def test_made_again_between_planning_and_reading(workload: Workload) -> None:
    """Rows of two streams are never mixed: the micro-batch fails, whatever is accepted."""
    with workload.reading(**ACCEPT) as reading:
        assert reading.plan()
        offsets, logged = list(reading.offsets), reading.logged
        assert logged is not None
        api(workload.url, f"STREAM.DELETE.{workload.stream}")
        workload.acknowledged.clear()
        workload.create()
        workload.write(COUNT + MORE)
        with pytest.raises(DataLossError, match="deleted and re-created"):
            reading.read()
    with workload.reading(offsets=offsets, **ACCEPT) as second:
        second.plan_logged(logged)
        assert second.read() == []
        second.drain()
    workload.check(second.rows)


# -- set back -------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 40, MORE, 2 * MORE], ids=["", "some", "as many", "more"])
@pytest.mark.parametrize("kind", KINDS_IN_TURN)
def test_restored_to_an_earlier_sequence(
    nats_server: NatsServer, tmp_path: Path, kind: str, after: int
) -> None:
    """With ``after`` more writes before the checkpoint is used again."""
    workload = Workload(kind, nats_server.url).create()
    workload.write(COUNT)
    restore = keep_store(nats_server, tmp_path)
    workload.write(MORE)
    first = read_all(workload)
    workload.check(first.rows)

    restore()
    assert workload.state()["last_seq"] == COUNT
    workload.forget(COUNT)
    if after:
        workload.write(after)

    lost = pytest.raises(DataLossError, match="was rolled back")
    with workload.reading(offsets=first.offsets) as refused, lost:
        refused.plan()
    with workload.reading(offsets=first.offsets, **ACCEPT) as second:
        second.drain()
    assert second.offsets[-1]["epoch"] == 1
    workload.check(second.rows, after=COUNT)
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
    workload = Workload(kind, nats_server.url).create(max_msgs_per_subject=1)
    workload.write(COUNT)
    restore = keep_store(nats_server, tmp_path)
    workload.write(MORE)
    limit = COUNT + MORE // 2
    superseded = workload.acknowledged[limit][0]
    publish(workload.url, [(workload.prefix + superseded, b"again", None)])
    with workload.reading(maxRowsPerTrigger=str(limit)) as first:
        assert first.plan()
        first.read()
    assert first.seq == limit
    assert first.offsets[-1]["time"] is None

    restore()
    workload.forget(COUNT)
    workload.write(2 * MORE)
    lost = pytest.raises(DataLossError, match="was rolled back")
    with workload.reading(offsets=first.offsets) as refused, lost:
        refused.plan()
    caplog.clear()
    with workload.reading(offsets=first.offsets, **ACCEPT) as second:
        second.drain()
    assert len([text for text in warnings(caplog) if "was rolled back" in text]) == 1
    assert second.offsets[-1]["epoch"] == 1
    workload.check(second.rows, after=limit)
    assert len(second.rows) == COUNT + 2 * MORE - limit


@pytest.mark.faults  # a replica that lags looks the same for half a minute
@pytest.mark.parametrize("kind", KINDS)
def test_restored_between_planning_and_reading(
    nats_server: NatsServer, tmp_path: Path, kind: str
) -> None:
    """What was planned is not there any more: never a short batch."""
    workload = Workload(kind, nats_server.url).create()
    workload.write(COUNT)
    restore = keep_store(nats_server, tmp_path)
    workload.write(MORE)
    with workload.reading() as reading:
        assert reading.plan()
        restore()
        with pytest.raises(DataLossError, match="rolled back"):
            reading.read()
    wait_until(lambda: workload.consumers() == [], "no consumer is left")
