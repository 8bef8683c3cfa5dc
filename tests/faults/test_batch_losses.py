"""Batches of all that there is, where the oldest messages go away after the batch was planned.

What was not read by then is told, with its numbers; what was, is no loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from batch_reads import batch_reader, tasks_of
from buckets import api

from faults.batches import kind_of, options_of
from faults.harm import When
from faults.proxy import Proxy
from faults.rows import Row, rows_of
from faults.trial import Trial, told_lost
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError
from nats_stream_source.source.batch import BatchReader, BatchSplit
from nats_stream_source.source.runtime import drop_kept_runners

COUNT = 800
"""Messages, about 200 of them in each of four tasks."""


@pytest.fixture(params=["all", "stream"])
def what(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def trial(what: str, shared_server: NatsServer) -> Iterator[Trial]:
    trial = Trial(kind_of(what), shared_server.url).create()
    trial.write(COUNT, size=1000)
    yield trial
    drop_kept_runners()
    assert trial.consumers() == []


def planned(
    url: str, options: dict[str, str], tasks: int
) -> tuple[BatchReader, BatchReader, list[BatchSplit]]:
    """A reader that refuses loss, one that accepts it, and the tasks that both can read."""
    options = {**options, "minPartitions": str(tasks)}
    reader, accepting = (
        batch_reader(url, failOnDataLoss=fail, **options) for fail in (True, False)
    )
    found = tasks_of(reader)
    assert len(found) == tasks
    return reader, accepting, found


def rows_with(reader: BatchReader, tasks: Iterable[BatchSplit]) -> list[Row]:
    return [row for task in tasks for batch in reader.read(task) for row in rows_of(batch)]


def purge(trial: Trial, through: int) -> None:
    api(trial.url, f"STREAM.PURGE.{trial.stream}", {"seq": through + 1})
    assert trial.state()["first_seq"] == through + 1


def went_away(gone: range) -> str:
    return rf"\b{gone[0]} to {gone[-1]} went away"


@pytest.mark.parametrize(
    ("through", "done"), [(1, 0), (150, 0), (300, 0), (150, 1), (201, 1), (300, 1), (500, 1)]
)
def test_between_planning_and_reading(
    trial: Trial, what: str, caplog: pytest.LogCaptureFixture, through: int, done: int
) -> None:
    """When ``done`` of four tasks are done, all up to ``through`` goes: each task tells its own."""
    reader, accepting, tasks = planned(trial.url, options_of(trial, what), tasks=4)
    ends = [task.task.plan.end for task in tasks]
    assert ends == [200, 400, 600, COUNT]
    rows = rows_with(reader, tasks[:done])
    purge(trial, through)
    told = []
    for task in tasks[done:]:
        plan = task.task.plan
        if gone := range(plan.start + 1, min(through, plan.end) + 1):
            told.append(gone)
            with pytest.raises(DataLossError, match=went_away(gone)):
                rows_with(reader, [task])
        else:
            rows_with(reader, [task])
    caplog.clear()
    rows += rows_with(accepting, tasks[done:])
    trial.check(rows, lost=range(200 * done + 1, through + 1))
    assert len(rows) == COUNT - sum(map(len, told))
    assert len(told_lost(caplog)) == len(told)
    for gone, text in zip(told, told_lost(caplog), strict=True):
        assert f" {gone[0]} to {gone[-1]} went away" in text


@pytest.mark.parametrize("accept", [False, True], ids=["refused", "accepted"])
def test_in_the_middle_of_a_task(
    trial: Trial,
    shared_server: NatsServer,
    what: str,
    caplog: pytest.LogCaptureFixture,
    accept: bool,
) -> None:
    """The consumer is lost at 300; when it is rebuilt, all up to 450 is gone."""
    gone = range(300, 451)
    harm = When(gone[0], lambda: purge(trial, gone[-1]))
    with Proxy(shared_server.port, harm) as proxy:
        reader, accepting, tasks = planned(proxy.url, options_of(trial, what), tasks=1)
        if not accept:
            with pytest.raises(DataLossError, match=went_away(gone)):
                rows_with(reader, tasks)
        else:
            rows = rows_with(accepting, tasks)
            trial.check(rows, lost=gone)
            assert len(rows) == COUNT - len(gone)
            (text,) = told_lost(caplog)
            assert f" {gone[0]} to {gone[-1]} went away" in text
        drop_kept_runners()
    assert harm.consumer
    assert trial.state()["first_seq"] == gone.stop
