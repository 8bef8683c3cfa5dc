"""Batch reads where something happens after they were planned, before or while they are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError
from tests.faults.conftest import NewWorkload
from tests.support.nats.buckets import publish
from tests.support.proxy.fault_proxy import Proxy
from tests.support.query_driver.batch import BATCHES, batch_options, read_sorted, workload_kind
from tests.support.workload import AGAIN, Workload, keep_store

COUNT = 1500


@pytest.fixture(params=BATCHES)
def what(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("how", AGAIN)
def test_the_server(
    new_workload: NewWorkload, shared_server: NatsServer, what: str, how: str
) -> None:
    workload = new_workload(workload_kind(what), COUNT)
    before = shared_server.pid
    rows = read_sorted(
        shared_server.url, batch_options(workload, what), lambda: AGAIN[how](shared_server)
    )
    assert shared_server.pid != before
    workload.check(rows)
    assert len(rows) == COUNT
    assert workload.consumers() == []


def test_the_kept_connection_is_lost(
    new_workload: NewWorkload, shared_server: NatsServer, what: str
) -> None:
    """A task finds that of the task before it in the same worker cut."""
    workload = new_workload(workload_kind(what), COUNT)
    options = {"requestTimeout": "1", **batch_options(workload, what)}
    with Proxy(shared_server.port, keep=0) as proxy:
        read_sorted(proxy.url, options, keep_connection=True)
        connections = proxy.connections
        rows = read_sorted(proxy.url, options, proxy.cut)
        # The planner's, and at least one in the place of that which was cut.
        assert proxy.connections >= connections + 2
    workload.check(rows)
    assert workload.consumers() == []


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
    workload = Workload(workload_kind(what), nats_server.url)
    workload.create(**({} if what == "stream" else {"history": history}))
    workload.write(COUNT)
    restore = keep_store(nats_server, tmp_path)
    workload.write(MORE)
    planned = workload.last

    def set_back() -> None:
        restore()
        assert workload.state()["last_seq"] == COUNT
        workload.write(2 * MORE)
        assert workload.state()["last_seq"] > planned

    with pytest.raises(DataLossError, match="was rolled back while"):
        read_sorted(nats_server.url, batch_options(workload, what), set_back)


@pytest.mark.parametrize("overwritten", [False, True], ids=["new keys", "the same keys"])
def test_set_back_and_grown_while_it_is_read(
    nats_server: NatsServer, tmp_path: Path, what: str, overwritten: bool
) -> None:
    """Rows of before have come already: those of after are not put beside them."""
    workload = Workload(workload_kind(what), nats_server.url).create()
    workload.write(COUNT, SIZE)
    restore = keep_store(nats_server, tmp_path)
    workload.write(MORE, SIZE)
    planned, began = workload.last, False

    def set_back(rows: int) -> None:
        nonlocal began
        if began:
            return
        began = True
        restore()
        assert workload.state()["last_seq"] == COUNT
        if overwritten:
            again = [(f"{workload.prefix}k{number}", b"again", None) for number in range(2 * MORE)]
            publish(workload.url, again)
        else:
            workload.write(2 * MORE, SIZE)
        assert workload.state()["last_seq"] > planned

    with pytest.raises(DataLossError, match="was rolled back while"):
        read_sorted(nats_server.url, batch_options(workload, what), each=set_back)
    assert began
