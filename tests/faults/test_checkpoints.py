"""A checkpoint that is used again after something happened to its stream.

Purged, aged out, deleted and made again, set back: what was not read yet and is gone is told, with
the numbers of what is gone, and what was read already is told by nobody and read by nobody again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from buckets import api, publish
from topology import wait_until

from faults.losses import purge
from faults.reading import Reading
from faults.trial import KINDS, KINDS_IN_TURN, Trial, keep_store, warnings
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError

COUNT, MORE = 200, 100
KEPT = (30, MORE - 1)
"""Of MORE, what a purge leaves: the loss of one is the smallest there is."""
ACCEPT = {"failOnDataLoss": "false"}


@pytest.fixture(params=KINDS)
def trial(request: pytest.FixtureRequest, shared_server: NatsServer) -> Trial:
    trial = Trial(request.param, shared_server.url).create()
    trial.write(COUNT)
    return trial


def read_all(trial: Trial) -> Reading:
    with trial.reading() as reading:
        reading.until(trial.last)
    return reading


def test_purged_after_all_was_read(trial: Trial, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is lost, so nothing is said."""
    first = read_all(trial)
    purge(trial, keep=0)
    trial.write(MORE)
    caplog.clear()
    with trial.reading(offsets=first.offsets) as second:
        second.until(trial.last)
    trial.check(first.rows + second.rows)
    assert not [text for text in warnings(caplog) if "went away" in text]


@pytest.mark.parametrize("kept", KEPT)
def test_purged_with_some_unread(trial: Trial, caplog: pytest.LogCaptureFixture, kept: int) -> None:
    """Of 100 unread ones 70 are gone, or one; of current values that is the nature."""
    first = read_all(trial)
    trial.write(MORE)
    purge(trial, keep=kept)
    gone = range(COUNT + 1, COUNT + MORE - kept + 1)
    assert trial.state()["first_seq"] == gone.stop
    if trial.kind != "kv current":
        lost = pytest.raises(DataLossError, match=f"{gone[0]} to {gone[-1]} went away")
        with trial.reading(offsets=first.offsets) as refused, lost:
            refused.plan()
        assert refused.rows == []
    caplog.clear()
    with trial.reading(offsets=first.offsets, **ACCEPT) as second:
        second.until(trial.last)
    trial.check(first.rows + second.rows, lost=gone)
    assert len(second.rows) == kept
    told = [text for text in warnings(caplog) if f"{gone[0]} to {gone[-1]} went away" in text]
    assert len(told) == (trial.kind != "kv current")


@pytest.mark.parametrize("kept", KEPT)
def test_purged_between_planning_and_reading(trial: Trial, kept: int) -> None:
    first = read_all(trial)
    trial.write(MORE)
    gone = range(COUNT + 1, COUNT + MORE - kept + 1)
    with trial.reading(offsets=first.offsets) as refused:
        assert refused.plan()
        purge(trial, keep=kept)
        if trial.kind != "kv current":
            with pytest.raises(DataLossError, match=f"{gone[0]} to {gone[-1]} went away"):
                refused.read()
    with trial.reading(offsets=first.offsets, **ACCEPT) as second:
        second.until(trial.last)
    trial.check(first.rows + second.rows, lost=gone)


def test_deleted_and_made_again(trial: Trial) -> None:
    """The new stream's rows come from its beginning on, in an epoch of their own."""
    first = read_all(trial)
    trial.check(first.rows)
    api(trial.url, f"STREAM.DELETE.{trial.stream}")
    trial.acknowledged.clear()
    trial.create()
    trial.write(MORE)
    lost = pytest.raises(DataLossError, match="deleted and made again")
    with trial.reading(offsets=first.offsets) as refused, lost:
        refused.plan()
    with trial.reading(offsets=first.offsets, **ACCEPT) as second:
        second.drain()
    assert second.offsets[-1]["epoch"] == 1
    trial.check(second.rows)
    assert {row.created for row in first.rows}.isdisjoint({row.created for row in second.rows})


def test_made_again_between_planning_and_reading(trial: Trial) -> None:
    """Rows of two streams are never mixed: the micro-batch fails, whatever is accepted."""
    with trial.reading(**ACCEPT) as reading:
        assert reading.plan()
        offsets, logged = list(reading.offsets), reading.logged
        assert logged is not None
        api(trial.url, f"STREAM.DELETE.{trial.stream}")
        trial.acknowledged.clear()
        trial.create()
        trial.write(COUNT + MORE)
        with pytest.raises(DataLossError, match="deleted and made again"):
            reading.read()
    with trial.reading(offsets=offsets, **ACCEPT) as second:
        second.again(logged)
        assert second.read() == []
        second.drain()
    trial.check(second.rows)


# -- set back -------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 40, MORE, 2 * MORE], ids=["", "some", "as many", "more"])
@pytest.mark.parametrize("kind", KINDS_IN_TURN)
def test_restored_to_an_earlier_sequence(
    nats_server: NatsServer, tmp_path: Path, kind: str, after: int
) -> None:
    """With ``after`` more writes before the checkpoint is used again."""
    trial = Trial(kind, nats_server.url).create()
    trial.write(COUNT)
    restore = keep_store(nats_server, tmp_path)
    trial.write(MORE)
    first = read_all(trial)
    trial.check(first.rows)

    restore()
    assert trial.state()["last_seq"] == COUNT
    trial.forget(COUNT)
    if after:
        trial.write(after)

    lost = pytest.raises(DataLossError, match="was set back")
    with trial.reading(offsets=first.offsets) as refused, lost:
        refused.plan()
    with trial.reading(offsets=first.offsets, **ACCEPT) as second:
        second.drain()
    assert second.offsets[-1]["epoch"] == 1
    trial.check(second.rows, after=COUNT)
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
    trial = Trial(kind, nats_server.url).create(max_msgs_per_subject=1)
    trial.write(COUNT)
    restore = keep_store(nats_server, tmp_path)
    trial.write(MORE)
    limit = COUNT + MORE // 2
    superseded = trial.acknowledged[limit][0]
    publish(trial.url, [(trial.prefix + superseded, b"again", None)])
    with trial.reading(maxRowsPerTrigger=str(limit)) as first:
        assert first.plan()
        first.read()
    assert first.seq == limit
    assert first.offsets[-1]["time"] is None

    restore()
    trial.forget(COUNT)
    trial.write(2 * MORE)
    lost = pytest.raises(DataLossError, match="was set back")
    with trial.reading(offsets=first.offsets) as refused, lost:
        refused.plan()
    caplog.clear()
    with trial.reading(offsets=first.offsets, **ACCEPT) as second:
        second.drain()
    assert len([text for text in warnings(caplog) if "was set back" in text]) == 1
    assert second.offsets[-1]["epoch"] == 1
    trial.check(second.rows, after=limit)
    assert len(second.rows) == COUNT + 2 * MORE - limit


@pytest.mark.faults  # a replica that lags looks the same for half a minute
@pytest.mark.parametrize("kind", KINDS)
def test_restored_between_planning_and_reading(
    nats_server: NatsServer, tmp_path: Path, kind: str
) -> None:
    """What was planned is not there any more: never a short batch."""
    trial = Trial(kind, nats_server.url).create()
    trial.write(COUNT)
    restore = keep_store(nats_server, tmp_path)
    trial.write(MORE)
    with trial.reading() as reading:
        assert reading.plan()
        restore()
        with pytest.raises(DataLossError, match="set back"):
            reading.read()
    wait_until("no consumer is left", lambda: trial.consumers() == [])
