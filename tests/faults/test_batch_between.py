"""Batch reads where something happens after they were planned, before or while they are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from buckets import publish

from faults.batches import BATCHES, kind_of, options_of, read, read_and_keep
from faults.proxy import Proxy
from faults.trial import AGAIN, Trial, keep_store
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError

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


# -- set back, and grown again --------------------------------------------------------------------

MORE = 300
SIZE = 4000
"""Of values that a reader has not buffered all of when its first rows come."""


@pytest.mark.parametrize("history", [1, 64])
def test_set_back_and_grown_before_it_is_read(
    nats_server: NatsServer, tmp_path: Path, what: str, history: int
) -> None:
    """The stream has all the sequences of the plan, and other messages at some of them."""
    if history == 1 and what == "stream":
        pytest.skip("a stream has no history")
    trial = Trial(kind_of(what), nats_server.url)
    trial.create(**({} if what == "stream" else {"history": history}))
    trial.write(COUNT)
    restore = keep_store(nats_server, tmp_path)
    trial.write(MORE)
    planned = trial.last

    def set_back() -> None:
        restore()
        assert trial.state()["last_seq"] == COUNT
        trial.write(2 * MORE)
        assert trial.state()["last_seq"] > planned

    with pytest.raises(DataLossError, match="was set back while"):
        read(nats_server.url, options_of(trial, what), set_back)


@pytest.mark.parametrize("overwritten", [False, True], ids=["new keys", "the same keys"])
def test_set_back_and_grown_while_it_is_read(
    nats_server: NatsServer, tmp_path: Path, what: str, overwritten: bool
) -> None:
    """Rows of before have come already: those of after are not put beside them."""
    trial = Trial(kind_of(what), nats_server.url).create()
    trial.write(COUNT, SIZE)
    restore = keep_store(nats_server, tmp_path)
    trial.write(MORE, SIZE)
    planned, began = trial.last, False

    def set_back(rows: int) -> None:
        nonlocal began
        if began:
            return
        began = True
        restore()
        assert trial.state()["last_seq"] == COUNT
        if overwritten:
            again = [(f"{trial.prefix}k{number}", b"again", None) for number in range(2 * MORE)]
            publish(trial.url, again)
        else:
            trial.write(2 * MORE, SIZE)
        assert trial.state()["last_seq"] > planned

    with pytest.raises(DataLossError, match="was set back while"):
        read(nats_server.url, options_of(trial, what), each=set_back)
    assert began
