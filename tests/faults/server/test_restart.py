"""A server that goes away, stands still or comes back: while it is read, and while nobody polls."""

from __future__ import annotations

import threading

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ConnectError, NatsSourceError
from tests.support.proxy.fault_proxy import Proxy
from tests.support.proxy.verdicts import When
from tests.support.workload import AGAIN, KINDS_IN_TURN, Workload

COUNT = 1500

pytestmark = pytest.mark.workload(kinds=KINDS_IN_TURN, count=COUNT, size=1000)


@pytest.mark.parametrize("how", AGAIN)
def test_while_it_is_read(workload: Workload, shared_server: NatsServer, how: str) -> None:
    harm = When(700, lambda: AGAIN[how](shared_server))
    with Proxy(shared_server.port, harm) as proxy, workload.reading(proxy.url) as reading:
        reading.until(COUNT)
        assert len(proxy.created) > 1
    workload.check(reading.rows)
    assert harm.consumer
    assert workload.consumers() == []


@pytest.mark.parametrize("how", AGAIN)
def test_while_nobody_polls(workload: Workload, shared_server: NatsServer, how: str) -> None:
    with workload.reading() as reading:
        reading.until(COUNT)
        before = shared_server.pid
        AGAIN[how](shared_server)
        assert shared_server.pid != before
        workload.write(100)
        reading.until(workload.last)
    workload.check(reading.rows)


@pytest.mark.parametrize("how", AGAIN)
def test_between_planning_and_reading(
    workload: Workload, shared_server: NatsServer, how: str
) -> None:
    with workload.reading() as reading:
        assert reading.plan()
        AGAIN[how](shared_server)
        workload.write(100)
        rows = reading.read()
        assert rows[-1].seq == COUNT
        reading.until(workload.last)
    workload.check(reading.rows)


@pytest.mark.parametrize("history", [64, 1])
@pytest.mark.parametrize("how", AGAIN)
def test_while_keys_are_written_over_and_over(
    shared_server: NatsServer, how: str, history: int
) -> None:
    """Before, during and after its absence: in the middle of the list, and while nobody polls."""
    workload = Workload("kv current", shared_server.url, hot=300).create(history=history)
    workload.write(COUNT, size=1000)
    listed = workload.last_values()
    harm = When(listed[len(listed) // 2], lambda: AGAIN[how](shared_server))
    with Proxy(shared_server.port, harm) as proxy, workload.reading(proxy.url) as reading:
        assert reading.plan()
        with workload.writing([shared_server.url]) as writing:
            writing.wait(500)
            reading.read()
            assert harm.consumer
            assert len(proxy.created) > 1
            writing.wait(500)
            reading.until(workload.last)
            AGAIN[how](shared_server)
            writing.wait(500)
        reading.until(workload.last)
        reading.drain()
    workload.check_readings(reading)
    assert reading.done[0].listed is (history > 1)
    assert workload.consumers() == []


def test_the_connection_is_lost_between_planning_and_reading(
    workload: Workload, shared_server: NatsServer
) -> None:
    """Those of the planner and of the task before, which is kept."""
    with Proxy(shared_server.port) as proxy, workload.reading(proxy.url) as reading:
        reading.until(COUNT)
        workload.write(100)
        assert reading.plan()
        before = proxy.connections
        proxy.cut()
        reading.read()
        workload.write(100)
        reading.until(workload.last)
        assert proxy.connections > before
    workload.check(reading.rows)
    assert workload.consumers() == []


def test_it_stands_still_between_planning_and_reading(shared_server: NatsServer) -> None:
    """For longer than a PING is waited for: a new connection is made when it answers again."""
    workload = Workload("kv", shared_server.url).create()
    workload.write(COUNT)
    with workload.reading() as reading:
        reading.until(COUNT)
        workload.write(100)
        assert reading.plan()
        shared_server.pause()
        timer = threading.Timer(3.0, shared_server.resume)
        timer.start()
        try:
            reading.read()
        finally:
            timer.join()
    workload.check(reading.rows)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_everything_freezes_in_the_middle(shared_server: NatsServer, kind: str) -> None:
    """The line, not the server: what is on its way comes later, with stale heartbeats."""
    workload = Workload(kind, shared_server.url).create()
    workload.write(COUNT, size=1000)
    thawing: list[threading.Timer] = []
    with Proxy(shared_server.port) as proxy:

        def freeze() -> None:
            # In the proxy's own thread, so not by its methods for others.
            proxy._open.clear()
            thawing.append(threading.Timer(4.0, proxy.thaw))
            thawing[0].start()

        harm = When(700, freeze, lose=False)
        proxy.verdict = harm
        with workload.reading(proxy.url) as reading:
            reading.until(COUNT)
        thawing[0].join()
    workload.check(reading.rows)
    assert harm.consumer


def test_it_stays_away(nats_server: NatsServer) -> None:
    """An error that names what is missing, soon after ``connectTimeout``; and then all goes on."""
    workload = Workload("stream", nats_server.url).create()
    workload.write(COUNT)
    with workload.reading(connectTimeout="3") as reading:
        assert reading.plan()
        nats_server.kill()
        with pytest.raises(ConnectError):
            reading.read()
        with pytest.raises(NatsSourceError) as caught:
            reading.plan()
        assert isinstance(caught.value, ConnectError)
        nats_server.start()
        reading.until(COUNT)
    workload.check(reading.rows)


def test_it_is_not_there_yet(nats_server: NatsServer) -> None:
    """Planner and reader wait for ``connectTimeout`` while it starts."""
    workload = Workload("stream", nats_server.url).create()
    workload.write(COUNT)
    nats_server.kill()
    with workload.reading(connectTimeout="30") as reading:
        timer = threading.Timer(1.0, nats_server.start)
        timer.start()
        try:
            reading.until(COUNT)
        finally:
            timer.join()
    workload.check(reading.rows)


@pytest.mark.faults
def test_one_of_several_stands_still(shared_server: NatsServer) -> None:
    """It accepts connections and says nothing: there is time left for the others.

    Which one is tried first is drawn, so that it is tried several times.
    """
    workload = Workload("stream", shared_server.url).create()
    workload.write(100)
    with NatsServer() as still:
        still.pause()
        for _ in range(6):
            with workload.reading(
                f"{still.url},{shared_server.url}", connectTimeout="8"
            ) as reading:
                reading.until(100)
            workload.check(reading.rows)
