"""A server that ends, pauses or starts again: before, during and after queries and batches."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ConnectError, DataLossError, NatsSourceError
from tests.faults.conftest import NewRecordedStream
from tests.support.nats.buckets import publish
from tests.support.nats.store_files import keep_store
from tests.support.proxy.fault_proxy import Proxy
from tests.support.proxy.verdicts import When
from tests.support.query_driver.batch import BATCHES, batch_options, read_sorted, recorded_kind
from tests.support.recorded_stream import AGAIN, KINDS_IN_TURN, RecordedStream

COUNT = 1500

pytestmark = pytest.mark.recorded(kinds=KINDS_IN_TURN, count=COUNT, size=1000)


@pytest.mark.parametrize("how", AGAIN)
def test_server_restarts_while_stream_is_read(
    recorded: RecordedStream, shared_server: NatsServer, how: str
) -> None:
    fault = When(700, lambda: AGAIN[how](shared_server))
    with Proxy(shared_server.port, fault) as proxy, recorded.query(proxy.url) as query:
        query.until(COUNT)
        assert len(proxy.created) > 1
    recorded.check(query.rows)
    assert fault.consumer
    assert recorded.consumers() == []


@pytest.mark.parametrize("how", AGAIN)
def test_server_restarts_between_polls(
    recorded: RecordedStream, shared_server: NatsServer, how: str
) -> None:
    with recorded.query() as query:
        query.until(COUNT)
        before = shared_server.pid
        AGAIN[how](shared_server)
        assert shared_server.pid != before
        recorded.write(100)
        query.until(recorded.last)
    recorded.check(query.rows)


@pytest.mark.parametrize("how", AGAIN)
def test_server_restarts_between_planning_and_reading(
    recorded: RecordedStream, shared_server: NatsServer, how: str
) -> None:
    with recorded.query() as query:
        assert query.plan()
        AGAIN[how](shared_server)
        recorded.write(100)
        rows = query.read().rows
        assert rows[-1].seq == COUNT
        query.until(recorded.last)
    recorded.check(query.rows)


@pytest.mark.parametrize("history", [64, 1])
@pytest.mark.parametrize("how", AGAIN)
def test_server_restarts_while_keys_are_overwritten(
    shared_server: NatsServer, how: str, history: int
) -> None:
    """Before, during and after its absence: in the middle of the list, and between two polls."""
    recorded = RecordedStream("kv current", shared_server.url, hot=300).create(history=history)
    recorded.write(COUNT, size=1000)
    listed = recorded.last_values()
    fault = When(listed[len(listed) // 2], lambda: AGAIN[how](shared_server))
    with Proxy(shared_server.port, fault) as proxy, recorded.query(proxy.url) as query:
        assert query.plan()
        with recorded.writing([shared_server.url]) as writing:
            writing.wait(500)
            query.read()
            assert fault.consumer
            assert len(proxy.created) > 1
            writing.wait(500)
            query.until(recorded.last)
            AGAIN[how](shared_server)
            writing.wait(500)
        query.until(recorded.last)
        query.drain()
    recorded.check_queries(query)
    assert query.done[0].listed is (history > 1)
    assert recorded.consumers() == []


def test_connection_lost_between_plan_and_read(
    recorded: RecordedStream, shared_server: NatsServer
) -> None:
    """Those of the planner and of the task before, which is kept."""
    with Proxy(shared_server.port) as proxy, recorded.query(proxy.url) as query:
        query.until(COUNT)
        recorded.write(100)
        assert query.plan()
        before = proxy.connections
        proxy.cut()
        query.read()
        recorded.write(100)
        query.until(recorded.last)
        assert proxy.connections > before
    recorded.check(query.rows)
    assert recorded.consumers() == []


def test_server_paused_between_plan_and_read(shared_server: NatsServer) -> None:
    """The server pauses longer than the PING timeout: the client opens a new connection."""
    recorded = RecordedStream("kv", shared_server.url).create()
    recorded.write(COUNT)
    with recorded.query() as query:
        query.until(COUNT)
        recorded.write(100)
        assert query.plan()
        shared_server.pause()
        timer = threading.Timer(3.0, shared_server.resume)
        timer.start()
        try:
            query.read()
        finally:
            timer.join()
    recorded.check(query.rows)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_line_freezes_within_read(shared_server: NatsServer, kind: str) -> None:
    """The line freezes, not the server: frames in flight arrive later, with stale heartbeats."""
    recorded = RecordedStream(kind, shared_server.url).create()
    recorded.write(COUNT, size=1000)
    thawing: list[threading.Timer] = []
    with Proxy(shared_server.port) as proxy:

        def freeze() -> None:
            # In the proxy's own thread, so not by its methods for others.
            proxy._open.clear()
            thawing.append(threading.Timer(4.0, proxy.thaw))
            thawing[0].start()

        fault = When(700, freeze, lose=False)
        proxy.verdict = fault
        with recorded.query(proxy.url) as query:
            query.until(COUNT)
        thawing[0].join()
    recorded.check(query.rows)
    assert fault.consumer


def test_server_remains_unavailable(nats_server: NatsServer) -> None:
    """The error comes soon after ``connectTimeout``; the query resumes when the server is back."""
    recorded = RecordedStream("stream", nats_server.url).create()
    recorded.write(COUNT)
    with recorded.query(connectTimeout="3") as query:
        assert query.plan()
        nats_server.kill()
        with pytest.raises(ConnectError):
            query.read()
        with pytest.raises(NatsSourceError) as caught:
            query.plan()
        assert isinstance(caught.value, ConnectError)
        nats_server.start()
        query.until(COUNT)
    recorded.check(query.rows)


def test_server_starts_later(nats_server: NatsServer) -> None:
    """Planner and reader wait for ``connectTimeout`` while it starts."""
    recorded = RecordedStream("stream", nats_server.url).create()
    recorded.write(COUNT)
    nats_server.kill()
    with recorded.query(connectTimeout="30") as query:
        timer = threading.Timer(1.0, nats_server.start)
        timer.start()
        try:
            query.until(COUNT)
        finally:
            timer.join()
    recorded.check(query.rows)


@pytest.mark.faults
def test_paused_server_of_several(shared_server: NatsServer) -> None:
    """A server that accepts connections and sends nothing leaves time for the others.

    Which one is tried first is drawn, so that it is tried several times.
    """
    recorded = RecordedStream("stream", shared_server.url).create()
    recorded.write(100)
    with NatsServer() as still:
        still.pause()
        for _ in range(6):
            with recorded.query(f"{still.url},{shared_server.url}", connectTimeout="8") as query:
                query.until(100)
            recorded.check(query.rows)


# -- batches: something happens after they were planned --------------------------------------------


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
