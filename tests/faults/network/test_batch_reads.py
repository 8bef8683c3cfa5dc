"""Batch reads in trouble: the same oracle, for each kind of batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nats_stream_source.embedded import NatsServer
from tests.support.proxy.fault_proxy import CutAt, Proxy
from tests.support.proxy.verdicts import (
    DeletedEarly,
    DeletedInTheMiddle,
    Harm,
    Nth,
    Published,
    Sequences,
    Silence,
    Status,
    When,
)
from tests.support.query_driver.batch import batch_options, read_sorted, workload_kind
from tests.support.workload import Workload, be_patient

COUNT = 1500
CONSUMERS = {"now": 1, "as of": 2, "all": 4, "stream": 4}
"""How many a batch makes when nothing happens: one a split, two where the range is read twice."""


# In the first split of a batch that has several: what a consumer delivers beyond its split's end
# can be harmed without anybody noticing.
HARMS: dict[str, Callable[[Workload, NatsServer], Harm]] = {
    "messages lost": lambda workload, server: Sequences([1, 300, 301, COUNT]),
    "last lost": lambda workload, server: Sequences([COUNT // 4, COUNT]),
    "cut": lambda workload, server: Nth([300], CutAt(30)),
    "silence": lambda workload, server: Silence(300),
    "restart": lambda workload, server: When(300, server.restart),
    "deleted early": lambda workload, server: DeletedEarly(workload.delete_consumers),
    "deleted in the middle": lambda workload, server: DeletedInTheMiddle(
        workload.delete_consumers, 300
    ),
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize(
    "what",
    [
        "now",
        pytest.param("as of", marks=pytest.mark.faults),
        pytest.param("all", marks=pytest.mark.faults),
        "stream",
    ],
)
def test_a_batch_in_trouble(shared_server: NatsServer, what: str, harm: str) -> None:
    workload = Workload(workload_kind(what), shared_server.url).create()
    workload.write(COUNT, size=1000)
    options = batch_options(workload, what)
    if what == "as of":
        workload.write(100)
    done = HARMS[harm](workload, shared_server)
    with Proxy(shared_server.port, done) as proxy:
        rows = read_sorted(proxy.url, options)
    assert done.done
    if isinstance(done, DeletedEarly | DeletedInTheMiddle):
        assert done.gone == proxy.created[:1]
    assert len(proxy.created) > CONSUMERS[what]
    workload.check(rows, through=COUNT)
    assert len(rows) == COUNT
    assert workload.consumers() == []


@pytest.fixture(
    params=[
        *(pytest.param(what, marks=pytest.mark.faults) for what in CONSUMERS if what != "stream"),
        "stream",
    ]
)
def what(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def large(what: str, shared_server: NatsServer) -> Workload:
    """Several windows of flow control, in each split."""
    workload = Workload(workload_kind(what), shared_server.url).create()
    workload.write(COUNT, size=20_000)
    return workload


def test_flow_control_of_a_batch_is_swallowed(
    large: Workload, shared_server: NatsServer, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch, heartbeat=1.5)
    harm = Status("FlowControl", most=2)
    with Proxy(shared_server.port, harm, keep=2000) as proxy:
        rows = read_sorted(proxy.url, batch_options(large, what))
    assert harm.done == 2
    assert len(proxy.created) == CONSUMERS[what]
    large.check(rows)
    assert large.consumers() == []


def test_all_answers_of_a_batch_to_flow_control_are_swallowed(
    large: Workload, shared_server: NatsServer, what: str
) -> None:
    harm = Published("$JS.FC.")
    with Proxy(shared_server.port, upward=harm, keep=2000) as proxy:
        rows = read_sorted(proxy.url, batch_options(large, what))
    assert harm.done >= 1
    assert proxy.flow_controlled.count(True) == CONSUMERS[what]
    assert proxy.flow_controlled.count(False) >= 1
    large.check(rows)
    assert large.consumers() == []
