"""Batch reads where something happens after they were planned, before or while they are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError
from tests.faults.conftest import NewRecordedStream
from tests.support.nats.buckets import publish
from tests.support.nats.store_files import keep_store
from tests.support.proxy.fault_proxy import Proxy
from tests.support.query_driver.batch import BATCHES, batch_options, read_sorted, recorded_kind
from tests.support.recorded_stream import AGAIN, RecordedStream

COUNT = 1500


@pytest.fixture(params=BATCHES)
def what(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("how", AGAIN)
def test_server_restarts_within_batch(
    new_recorded: NewRecordedStream, shared_server: NatsServer, what: str, how: str
) -> None:
    recorded = new_recorded(recorded_kind(what), COUNT)
    before = shared_server.pid
    rows = read_sorted(
        shared_server.url, batch_options(recorded, what), lambda: AGAIN[how](shared_server)
    )
    assert shared_server.pid != before
    recorded.check(rows)
    assert len(rows) == COUNT
    assert recorded.consumers() == []


def test_kept_connection_is_lost(
    new_recorded: NewRecordedStream, shared_server: NatsServer, what: str
) -> None:
    """A task finds that of the task before it in the same worker cut."""
    recorded = new_recorded(recorded_kind(what), COUNT)
    options = {"requestTimeout": "1", **batch_options(recorded, what)}
    with Proxy(shared_server.port, keep=0) as proxy:
        read_sorted(proxy.url, options, keep_connection=True)
        connections = proxy.connections
        rows = read_sorted(proxy.url, options, proxy.cut)
        # The planner's, and at least one in the place of that which was cut.
        assert proxy.connections >= connections + 2
    recorded.check(rows)
    assert recorded.consumers() == []


# -- set back, and grown again --------------------------------------------------------------------

MORE = 300
SIZE = 4000
"""Of values that a reader has not buffered all of when its first rows come."""


@pytest.mark.parametrize("history", [1, 64])
def test_stream_rolled_back_and_grown_before_it_is_read(
    nats_server: NatsServer, tmp_path: Path, what: str, history: int
) -> None:
    """The stream has all the sequences of the plan, and other messages at some of them."""
    if history == 1 and what == "stream":
        pytest.skip("a stream has no history")
    recorded = RecordedStream(recorded_kind(what), nats_server.url)
    recorded.create(**({} if what == "stream" else {"history": history}))
    recorded.write(COUNT)
    restore = keep_store(nats_server, tmp_path)
    recorded.write(MORE)
    planned = recorded.last

    def set_back() -> None:
        restore()
        assert recorded.state()["last_seq"] == COUNT
        recorded.write(2 * MORE)
        assert recorded.state()["last_seq"] > planned

    with pytest.raises(DataLossError, match="was rolled back while"):
        read_sorted(nats_server.url, batch_options(recorded, what), set_back)


@pytest.mark.parametrize("overwritten", [False, True], ids=["new keys", "the same keys"])
def test_stream_rolled_back_and_grown_while_it_is_read(
    nats_server: NatsServer, tmp_path: Path, what: str, overwritten: bool
) -> None:
    """Rows of before have come already: those of after are not put beside them."""
    recorded = RecordedStream(recorded_kind(what), nats_server.url).create()
    recorded.write(COUNT, SIZE)
    restore = keep_store(nats_server, tmp_path)
    recorded.write(MORE, SIZE)
    planned, began = recorded.last, False

    def set_back(rows: int) -> None:
        nonlocal began
        if began:
            return
        began = True
        restore()
        assert recorded.state()["last_seq"] == COUNT
        if overwritten:
            again = [(f"{recorded.prefix}k{number}", b"again", None) for number in range(2 * MORE)]
            publish(recorded.url, again)
        else:
            recorded.write(2 * MORE, SIZE)
        assert recorded.state()["last_seq"] > planned

    with pytest.raises(DataLossError, match="was rolled back while"):
        read_sorted(nats_server.url, batch_options(recorded, what), each=set_back)
    assert began
