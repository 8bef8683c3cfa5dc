"""Batch reads under network faults: the same oracle for each kind of batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nats_stream_source.embedded import NatsServer
from tests.support.proxy.fault_proxy import CutAt, Proxy
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
from tests.support.recorded_stream import RecordedStream, use_long_deadlines

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
