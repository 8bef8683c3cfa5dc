"""Batch reads in trouble: the same oracle, for each kind of batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from faults.batches import kind_of, options_of, read
from faults.harm import (
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
from faults.proxy import CutAt, Proxy
from faults.trial import Trial, be_patient
from nats_stream_source.embedded import NatsServer

COUNT = 1500
CONSUMERS = {"now": 1, "as of": 2, "all": 4, "stream": 4}
"""How many a batch makes when nothing happens: one a split, two where the range is read twice."""


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


# In the first split of a batch that has several: what a consumer delivers beyond its split's end
# can be harmed without anybody noticing.
HARMS: dict[str, Callable[[Trial, NatsServer], Harm]] = {
    "messages lost": lambda trial, server: Sequences([1, 300, 301, COUNT]),
    "last lost": lambda trial, server: Sequences([COUNT // 4, COUNT]),
    "cut": lambda trial, server: Nth([300], CutAt(30)),
    "silence": lambda trial, server: Silence(300),
    "restart": lambda trial, server: When(300, server.restart),
    "deleted early": lambda trial, server: DeletedEarly(trial.delete_consumers),
    "deleted in the middle": lambda trial, server: DeletedInTheMiddle(trial.delete_consumers, 300),
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
def test_a_batch_in_trouble(server: NatsServer, what: str, harm: str) -> None:
    trial = Trial(kind_of(what), server.url).create()
    trial.write(COUNT, size=1000)
    options = options_of(trial, what)
    if what == "as of":
        trial.write(100)
    done = HARMS[harm](trial, server)
    with Proxy(server.port, done) as proxy:
        rows = read(proxy.url, options)
    assert done.done
    if isinstance(done, DeletedEarly | DeletedInTheMiddle):
        assert done.gone == proxy.created[:1]
    assert len(proxy.created) > CONSUMERS[what]
    trial.check(rows, through=COUNT)
    assert len(rows) == COUNT
    assert trial.consumers() == []


@pytest.fixture(
    params=[
        *(pytest.param(what, marks=pytest.mark.faults) for what in CONSUMERS if what != "stream"),
        "stream",
    ]
)
def what(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def large(what: str, server: NatsServer) -> Trial:
    """Several windows of flow control, in each split."""
    trial = Trial(kind_of(what), server.url).create()
    trial.write(COUNT, size=20_000)
    return trial


def test_flow_control_of_a_batch_is_swallowed(
    large: Trial, server: NatsServer, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch, heartbeat=1.5)
    harm = Status("FlowControl", most=2)
    with Proxy(server.port, harm, keep=2000) as proxy:
        rows = read(proxy.url, options_of(large, what))
    assert harm.done == 2
    assert len(proxy.created) == CONSUMERS[what]
    large.check(rows)
    assert large.consumers() == []


def test_all_answers_of_a_batch_to_flow_control_are_swallowed(
    large: Trial, server: NatsServer, what: str
) -> None:
    harm = Published("$JS.FC.")
    with Proxy(server.port, upward=harm, keep=2000) as proxy:
        rows = read(proxy.url, options_of(large, what))
    assert harm.done >= 1
    assert proxy.flow_controlled.count(True) == CONSUMERS[what]
    assert proxy.flow_controlled.count(False) >= 1
    large.check(rows)
    assert large.consumers() == []
