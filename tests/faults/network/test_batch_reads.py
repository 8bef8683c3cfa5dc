"""Batches, and a micro-batch of Spark, under network faults: the rows are complete."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nats_stream_source.embedded import NatsServer
from tests.support.nats import buckets
from tests.support.proxy.fault_proxy import CutAt, Proxy, Verdict, is_status, stream_seq
from tests.support.proxy.verdicts import (
    ConsumerDeletedAt,
    ConsumerDeletedEarly,
    FrameFault,
    Nth,
    Published,
    Sequences,
    Silence,
    Status,
    When,
)
from tests.support.query_driver.batch import batch_options, read_sorted, recorded_kind
from tests.support.recorded_stream import AGAIN, RecordedStream, use_long_deadlines
from tests.support.spark.scenario import Create, PutMany, Run, Scene, play

COUNT = 1500
CONSUMERS = {"now": 1, "as of": 2, "all": 4, "stream": 4}
"""How many a batch makes when nothing happens: one a split, two where the range is read twice."""


# In the first split of a batch that has several: what a consumer delivers beyond its split's end
# can be injected without anybody noticing.
FAULTS: dict[str, Callable[[RecordedStream, NatsServer], FrameFault]] = {
    "messages lost": lambda recorded, server: Sequences([1, 300, 301, COUNT]),
    "last lost": lambda recorded, server: Sequences([COUNT // 4, COUNT]),
    "cut": lambda recorded, server: Nth([300], CutAt(30)),
    "silence": lambda recorded, server: Silence(300),
    "restart": lambda recorded, server: When(300, server.restart),
    "deleted early": lambda recorded, server: ConsumerDeletedEarly(recorded.delete_consumers),
    "deleted in the middle": lambda recorded, server: ConsumerDeletedAt(
        recorded.delete_consumers, 300
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "what",
    [
        "now",
        pytest.param("as of", marks=pytest.mark.faults),
        pytest.param("all", marks=pytest.mark.faults),
        "stream",
    ],
)
def test_batch_under_frame_faults(shared_server: NatsServer, what: str, fault: str) -> None:
    recorded = RecordedStream(recorded_kind(what), shared_server.url).create()
    recorded.write(COUNT, size=1000)
    options = batch_options(recorded, what)
    if what == "as of":
        recorded.write(100)
    done = FAULTS[fault](recorded, shared_server)
    with Proxy(shared_server.port, done) as proxy:
        rows = read_sorted(proxy.url, options)
    assert done.done
    if isinstance(done, ConsumerDeletedEarly | ConsumerDeletedAt):
        assert done.gone == proxy.created[:1]
    assert len(proxy.created) > CONSUMERS[what]
    recorded.check(rows, through=COUNT)
    assert len(rows) == COUNT
    assert recorded.consumers() == []


@pytest.fixture(
    params=[
        *(pytest.param(what, marks=pytest.mark.faults) for what in CONSUMERS if what != "stream"),
        "stream",
    ]
)
def what(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def large(what: str, shared_server: NatsServer) -> RecordedStream:
    """Several windows of flow control, in each split."""
    recorded = RecordedStream(recorded_kind(what), shared_server.url).create()
    recorded.write(COUNT, size=20_000)
    return recorded


def test_flow_control_of_batch_is_swallowed(
    large: RecordedStream, shared_server: NatsServer, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_long_deadlines(monkeypatch, heartbeat=1.5)
    fault = Status("FlowControl", most=2)
    with Proxy(shared_server.port, fault, keep=2000) as proxy:
        rows = read_sorted(proxy.url, batch_options(large, what))
    assert fault.done == 2
    assert len(proxy.created) == CONSUMERS[what]
    large.check(rows)
    assert large.consumers() == []


def test_batch_without_flow_control_responses(
    large: RecordedStream, shared_server: NatsServer, what: str
) -> None:
    fault = Published("$JS.FC.")
    with Proxy(shared_server.port, upward=fault, keep=2000) as proxy:
        rows = read_sorted(proxy.url, batch_options(large, what))
    assert fault.done >= 1
    assert proxy.flow_controlled.count(True) == CONSUMERS[what]
    assert proxy.flow_controlled.count(False) >= 1
    large.check(rows)
    assert large.consumers() == []


ROWS = 2000
KEYS = 100


def read_through(scene: Scene, verdict: Verdict) -> Proxy:
    """Run a query to its end through a proxy; all revisions must come, once and in order."""
    with Proxy(scene.server.port, verdict) as proxy:
        options = {"servers": proxy.url, "includeHistory": "true"}
        play(scene, Create(history=64), PutMany(ROWS, KEYS), Run(options))
    assert [row.revision for row in scene.rows] == list(range(1, ROWS + 1))
    assert [bytes(row.value) for row in scene.rows] == [b"%d" % i for i in range(ROWS)]
    assert buckets.consumers(scene.url, scene.bucket) == []
    return proxy


@pytest.mark.parametrize("lost", [{1}, {700, 701, 1500}, {ROWS}], ids=["first", "several", "last"])
def test_lost_messages(scene: Scene, lost: set[int]) -> None:
    proxy = read_through(scene, Sequences(lost))
    assert {stream_seq(frame) for frame in proxy.dropped} == lost


def test_missed_heartbeats(scene: Scene) -> None:
    """The first consumer falls silent permanently; its successor is heard."""
    proxy = read_through(scene, Silence(900))
    assert any(is_status(frame, b"Idle Heartbeat") for frame in proxy.dropped)


def test_deleted_consumer(scene: Scene) -> None:
    """The consumer is deleted when row 900 passes; its deliveries from that row on are lost."""

    def delete() -> list[str]:
        gone = buckets.consumers(scene.url, scene.bucket)
        for name in gone:
            buckets.api(scene.url, f"CONSUMER.DELETE.KV_{scene.bucket}.{name}")
        return gone

    fault = ConsumerDeletedAt(delete, 900)
    read_through(scene, fault)
    assert fault.gone == [fault.consumer]


@pytest.mark.parametrize("how", AGAIN)
def test_server_ends_and_starts(own_scene: Scene, how: str) -> None:
    fault = When(900, lambda: AGAIN[how](own_scene.server), lose=False)
    read_through(own_scene, fault)
    assert fault.consumer
