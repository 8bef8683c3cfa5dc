"""Batches whose oldest messages are removed after the batch was planned.

The error names the messages that were not read by then; those that were read are not a loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError
from nats_stream_source.spark.batch_reader import BatchReader
from nats_stream_source.spark.runner import close_cached_runners
from nats_stream_source.spark.tasks import NatsInputPartition
from tests.faults.conftest import NewRecordedStream
from tests.support.nats.buckets import api
from tests.support.oracle.rows import Row, rows_of
from tests.support.proxy.fault_proxy import Proxy
from tests.support.proxy.verdicts import When
from tests.support.query_driver.batch import batch_options, batch_reader, recorded_kind, tasks_of
from tests.support.recorded_stream import RecordedStream, loss_warnings

COUNT = 800
"""Messages, about 200 of them in each of four tasks."""


@pytest.fixture(params=["all", "stream"])
def what(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def recorded_batch(what: str, new_recorded: NewRecordedStream) -> Iterator[RecordedStream]:
    """The recorded stream of the batch; its consumers must be deleted when the test ends."""
    recorded = new_recorded(recorded_kind(what), COUNT, 1000)
    yield recorded
    close_cached_runners()
    assert recorded.consumers() == []


def planned(
    url: str, options: dict[str, str], tasks: int
) -> tuple[BatchReader, BatchReader, list[NatsInputPartition]]:
    """A reader that refuses loss, one that accepts it, and the tasks that both can read."""
    options = {**options, "minPartitions": str(tasks)}
    reader, accepting = (
        batch_reader(url, failOnDataLoss=fail, **options) for fail in (True, False)
    )
    found = tasks_of(reader)
    assert len(found) == tasks
    return reader, accepting, found


def rows_with(reader: BatchReader, tasks: Iterable[NatsInputPartition]) -> list[Row]:
    return [row for task in tasks for batch in reader.read(task) for row in rows_of(batch)]


def purge(recorded: RecordedStream, through: int) -> None:
    api(recorded.url, f"STREAM.PURGE.{recorded.stream}", {"seq": through + 1})
    assert recorded.state()["first_seq"] == through + 1


def aged_out_text(gone: range) -> str:
    return rf"\b{gone[0]} to {gone[-1]} aged out"


@pytest.mark.parametrize(
    ("through", "done"), [(1, 0), (150, 0), (300, 0), (150, 1), (201, 1), (300, 1), (500, 1)]
)
def test_messages_purged_between_planning_and_reading(
    recorded_batch: RecordedStream,
    what: str,
    caplog: pytest.LogCaptureFixture,
    through: int,
    done: int,
) -> None:
    """All up to ``through`` is purged after ``done`` of four tasks: each task reports its part."""
    reader, accepting, tasks = planned(
        recorded_batch.url, batch_options(recorded_batch, what), tasks=4
    )
    ends = [task.splits[0].split.range.end for task in tasks]
    assert ends == [200, 400, 600, COUNT]
    rows = rows_with(reader, tasks[:done])
    purge(recorded_batch, through)
    told = []
    for task in tasks[done:]:
        plan = task.splits[0].split
        if gone := range(plan.range.start + 1, min(through, plan.range.end) + 1):
            told.append(gone)
            with pytest.raises(DataLossError, match=aged_out_text(gone)):
                rows_with(reader, [task])
        else:
            rows_with(reader, [task])
    caplog.clear()
    rows += rows_with(accepting, tasks[done:])
    recorded_batch.check(rows, lost=range(200 * done + 1, through + 1))
    assert len(rows) == COUNT - sum(map(len, told))
    assert len(loss_warnings(caplog)) == len(told)
    for gone, text in zip(told, loss_warnings(caplog), strict=True):
        assert f" {gone[0]} to {gone[-1]} aged out" in text


@pytest.mark.parametrize("accept", [False, True], ids=["refused", "accepted"])
def test_messages_expire_within_task(
    recorded_batch: RecordedStream,
    shared_server: NatsServer,
    what: str,
    caplog: pytest.LogCaptureFixture,
    accept: bool,
) -> None:
    """The consumer is lost at 300; when it is rebuilt, all up to 450 has expired."""
    gone = range(300, 451)
    fault = When(gone[0], lambda: purge(recorded_batch, gone[-1]))
    with Proxy(shared_server.port, fault) as proxy:
        reader, accepting, tasks = planned(proxy.url, batch_options(recorded_batch, what), tasks=1)
        if not accept:
            with pytest.raises(DataLossError, match=aged_out_text(gone)):
                rows_with(reader, tasks)
        else:
            rows = rows_with(accepting, tasks)
            recorded_batch.check(rows, lost=gone)
            assert len(rows) == COUNT - len(gone)
            (text,) = loss_warnings(caplog)
            assert f" {gone[0]} to {gone[-1]} aged out" in text
        close_cached_runners()
    assert fault.consumer
    assert recorded_batch.state()["first_seq"] == gone.stop
