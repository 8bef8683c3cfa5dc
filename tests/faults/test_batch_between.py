"""Batch reads where something happens after they were planned and before they are read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from faults.batches import BATCHES, kind_of, options_of, read, read_and_keep
from faults.proxy import Proxy
from faults.trial import AGAIN, Trial
from nats_stream_source.embedded import NatsServer

COUNT = 1500


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


@pytest.fixture(params=BATCHES)
def what(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def trial(what: str, server: NatsServer) -> Trial:
    trial = Trial(kind_of(what), server.url).create()
    trial.write(COUNT)
    return trial


@pytest.mark.parametrize("how", AGAIN)
def test_the_server(trial: Trial, server: NatsServer, what: str, how: str) -> None:
    before = server.pid
    rows = read(server.url, options_of(trial, what), lambda: AGAIN[how](server))
    assert server.pid != before
    trial.check(rows)
    assert len(rows) == COUNT
    assert trial.consumers() == []


def test_the_kept_connection_is_lost(trial: Trial, server: NatsServer, what: str) -> None:
    """A task finds that of the task before it in the same worker cut."""
    options = {"requestTimeout": "1", **options_of(trial, what)}
    with Proxy(server.port, keep=0) as proxy:
        read_and_keep(proxy.url, options)
        connections = proxy.connections
        rows = read(proxy.url, options, proxy.cut)
        # The planner's, and at least one in the place of that which was cut.
        assert proxy.connections >= connections + 2
    trial.check(rows)
    assert trial.consumers() == []
