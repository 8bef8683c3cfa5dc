"""Batches of all that there is, where the oldest messages go away after the batch was planned.

What was not read by then is told, with its numbers; what was, is no loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError
from nats_stream_source.spark.batch_reader import BatchReader
from nats_stream_source.spark.input_partition import NatsInputPartition
from nats_stream_source.spark.reading.event_loop import close_cached_runners
from tests.faults.conftest import NewWorkload
from tests.support.nats.buckets import api
from tests.support.oracle.rows import Row, rows_of
from tests.support.proxy.fault_proxy import Proxy
from tests.support.proxy.verdicts import When
from tests.support.query_driver.batch import batch_options, batch_reader, tasks_of, workload_kind
from tests.support.workload import Workload, told_lost

COUNT = 800
"""Messages, about 200 of them in each of four tasks."""


@pytest.fixture(params=["all", "stream"])
def what(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def batch_workload(what: str, new_workload: NewWorkload) -> Iterator[Workload]:
    """The workload of the batch; its consumers must be deleted when the test ends."""
    workload = new_workload(workload_kind(what), COUNT, 1000)
    yield workload
    close_cached_runners()
    assert workload.consumers() == []


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


def purge(workload: Workload, through: int) -> None:
    api(workload.url, f"STREAM.PURGE.{workload.stream}", {"seq": through + 1})
    assert workload.state()["first_seq"] == through + 1


def went_away(gone: range) -> str:
    return rf"\b{gone[0]} to {gone[-1]} aged out"


@pytest.mark.parametrize(
    ("through", "done"), [(1, 0), (150, 0), (300, 0), (150, 1), (201, 1), (300, 1), (500, 1)]
)
def test_between_planning_and_reading(
    batch_workload: Workload, what: str, caplog: pytest.LogCaptureFixture, through: int, done: int
) -> None:
    """When ``done`` of four tasks are done, all up to ``through`` goes: each task tells its own."""
    reader, accepting, tasks = planned(
        batch_workload.url, batch_options(batch_workload, what), tasks=4
    )
    ends = [task.splits[0].split.end for task in tasks]
    assert ends == [200, 400, 600, COUNT]
    rows = rows_with(reader, tasks[:done])
    purge(batch_workload, through)
    told = []
    for task in tasks[done:]:
        plan = task.splits[0].split
        if gone := range(plan.start + 1, min(through, plan.end) + 1):
            told.append(gone)
            with pytest.raises(DataLossError, match=went_away(gone)):
                rows_with(reader, [task])
        else:
            rows_with(reader, [task])
    caplog.clear()
    rows += rows_with(accepting, tasks[done:])
    batch_workload.check(rows, lost=range(200 * done + 1, through + 1))
    assert len(rows) == COUNT - sum(map(len, told))
    assert len(told_lost(caplog)) == len(told)
    for gone, text in zip(told, told_lost(caplog), strict=True):
        assert f" {gone[0]} to {gone[-1]} aged out" in text


@pytest.mark.parametrize("accept", [False, True], ids=["refused", "accepted"])
def test_in_the_middle_of_a_task(
    batch_workload: Workload,
    shared_server: NatsServer,
    what: str,
    caplog: pytest.LogCaptureFixture,
    accept: bool,
) -> None:
    """The consumer is lost at 300; when it is rebuilt, all up to 450 is gone."""
    gone = range(300, 451)
    harm = When(gone[0], lambda: purge(batch_workload, gone[-1]))
    with Proxy(shared_server.port, harm) as proxy:
        reader, accepting, tasks = planned(proxy.url, batch_options(batch_workload, what), tasks=1)
        if not accept:
            with pytest.raises(DataLossError, match=went_away(gone)):
                rows_with(reader, tasks)
        else:
            rows = rows_with(accepting, tasks)
            batch_workload.check(rows, lost=gone)
            assert len(rows) == COUNT - len(gone)
            (text,) = told_lost(caplog)
            assert f" {gone[0]} to {gone[-1]} aged out" in text
        close_cached_runners()
    assert harm.consumer
    assert batch_workload.state()["first_seq"] == gone.stop
