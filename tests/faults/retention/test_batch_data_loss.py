"""Messages that are removed or expire after they were planned: an error names those unread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError
from nats_stream_source.options import stream_options
from nats_stream_source.rows.base import Split
from nats_stream_source.rows.formats import StreamFormat
from nats_stream_source.spark.readers import BatchReader, NatsInputPartition
from nats_stream_source.spark.reading.split_reader import read_splits
from nats_stream_source.spark.runner import close_cached_runners
from tests.faults.conftest import NewRecordedStream
from tests.support.nats import buckets
from tests.support.nats.buckets import api
from tests.support.nats.streams import create_stream, stream_state
from tests.support.oracle.row_check import Row, rows_of
from tests.support.proxy.fault_proxy import Proxy
from tests.support.proxy.verdicts import When
from tests.support.query_driver.batch import batch_options, batch_reader, recorded_kind, tasks_of
from tests.support.query_driver.driver import new_query
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
    ends = [task.splits[0].range.end for task in tasks]
    assert ends == [200, 400, 600, COUNT]
    rows = rows_with(reader, tasks[:done])
    purge(recorded_batch, through)
    told = []
    for task in tasks[done:]:
        plan = task.splits[0]
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


MANY = 12_000  # more than one batch of rows
# Who names a sequence wants all from there on; else history goes as far back as it does.
FROM_THE_FIRST = {"startSequence": "1"}


@pytest.fixture(autouse=True)
def no_connection_left() -> Iterator[None]:
    yield
    close_cached_runners()


def make_stream(url: str, name: str, messages: int, **config: Any) -> None:
    create_stream(url, name, **config)
    buckets.publish(url, [(f"{name}.{n % 7}", b"%d" % n, None) for n in range(messages)])


def planned_split(url: str, name: str, **options: str) -> tuple[dict[str, str], Split]:
    """The one split of all that the stream has, and the options of its query."""
    with new_query(url, stream=name, cores=1, **options) as query:
        assert query.plan()
        (plan,) = query.splits
    return {"servers": url, "stream": name, **options}, plan


def sequences(given: dict[str, str], plan: Split) -> list[int]:
    batches = read_splits((plan,), StreamFormat(stream_options(given)))
    return [seq for batch in batches for seq in batch["sequence"].to_pylist()]


def test_expiry_behind_reader_is_not_loss(shared_server: NatsServer) -> None:
    url = shared_server.url
    make_stream(url, "BEHIND", MANY, max_msgs=MANY)
    given, plan = planned_split(url, "BEHIND")
    assert (plan.range.start, plan.range.end, plan.required_from) == (0, MANY, 1)
    batches = read_splits((plan,), StreamFormat(stream_options(given)))
    found = next(batches)["sequence"].to_pylist()
    buckets.publish(url, [("BEHIND.x", b"", None)] * 3000)
    first_seq = stream_state(url, "BEHIND")["first_seq"]
    assert 1 < first_seq <= found[-1]
    for batch in batches:
        found += batch["sequence"].to_pylist()
    assert found == list(range(1, MANY + 1))


@pytest.mark.parametrize("gone", [1, 10])
@pytest.mark.parametrize("span", [20, MANY], ids=["small", "large"])
def test_expiry_before_read_is_loss(shared_server: NatsServer, span: int, gone: int) -> None:
    url, name = shared_server.url, f"BEFORE{span}-{gone}"
    make_stream(url, name, span)
    given, plan = planned_split(url, name, **FROM_THE_FIRST)
    buckets.api(url, f"STREAM.PURGE.{name}", {"seq": gone + 1})
    told = f"sequences 1 to {gone} aged out"
    with pytest.raises(DataLossError, match=told):
        sequences(given, plan)
    given["failOnDataLoss"] = "false"
    assert sequences(given, plan) == list(range(gone + 1, span + 1))


def test_expiry_beyond_range_is_not_counted(shared_server: NatsServer) -> None:
    url = shared_server.url
    make_stream(url, "BEYOND", 40)
    given, plan = planned_split(url, "BEYOND", **FROM_THE_FIRST)
    buckets.api(url, "STREAM.PURGE.BEYOND", {"seq": 31})
    plan = replace(plan, range=replace(plan.range, end=20))
    with pytest.raises(
        DataLossError,
        match=r"first sequence is 31, expected 1 or lower \(sequences 1 to 20 aged out",
    ):
        sequences(given, plan)


@pytest.mark.parametrize("span", [20, MANY], ids=["small", "large"])
def test_history_reaches_back_as_far_as_it_does(shared_server: NatsServer, span: int) -> None:
    """A query from the first message accepts expiry before its first row."""
    url, name = shared_server.url, f"HISTORY{span}"
    make_stream(url, name, span)
    given, plan = planned_split(url, name)
    assert plan.expiry_allowed_through == span
    buckets.api(url, f"STREAM.PURGE.{name}", {"seq": 11})
    assert sequences(given, plan) == list(range(11, span + 1))


def test_messages_after_hole_are_not_counted(shared_server: NatsServer) -> None:
    """A deleted message, and then retention that passes it behind the reader."""
    url, name = shared_server.url, "HOLE"
    make_stream(url, name, MANY, max_msgs=MANY)
    buckets.api(url, f"STREAM.MSG.DELETE.{name}", {"seq": 100})
    given, plan = planned_split(url, name, failOnDataLoss="true")
    batches = read_splits((plan,), StreamFormat(stream_options(given)))
    found = next(batches)["sequence"].to_pylist()
    buckets.publish(url, [(f"{name}.x", b"", None)] * 3000)
    assert 100 < stream_state(url, name)["first_seq"] < found[-1]
    with pytest.raises(DataLossError, match="sequences 100 to 100 aged out"):
        found.extend(seq for batch in batches for seq in batch["sequence"].to_pylist())
    assert found == [*range(1, 100), *range(101, MANY + 1)]
