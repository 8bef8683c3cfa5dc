"""A server that goes away, stands still or comes back: while it is read, and while nobody polls."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from faults.harm import When
from faults.proxy import Proxy
from faults.trial import AGAIN, KINDS_IN_TURN, Trial
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ConnectError, NatsSourceError

COUNT = 1500


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


@pytest.fixture(params=KINDS_IN_TURN)
def trial(request: pytest.FixtureRequest, server: NatsServer) -> Trial:
    trial = Trial(request.param, server.url).create()
    trial.write(COUNT, size=1000)
    return trial


@pytest.mark.parametrize("how", AGAIN)
def test_while_it_is_read(trial: Trial, server: NatsServer, how: str) -> None:
    harm = When(700, lambda: AGAIN[how](server))
    with Proxy(server.port, harm) as proxy, trial.reading(proxy.url) as reading:
        reading.until(COUNT)
        assert len(proxy.created) > 1
    trial.check(reading.rows)
    assert harm.consumer
    assert trial.consumers() == []


@pytest.mark.parametrize("how", AGAIN)
def test_while_nobody_polls(trial: Trial, server: NatsServer, how: str) -> None:
    with trial.reading() as reading:
        reading.until(COUNT)
        before = server.pid
        AGAIN[how](server)
        assert server.pid != before
        trial.write(100)
        reading.until(trial.last)
    trial.check(reading.rows)


@pytest.mark.parametrize("how", AGAIN)
def test_between_planning_and_reading(trial: Trial, server: NatsServer, how: str) -> None:
    with trial.reading() as reading:
        assert reading.plan()
        AGAIN[how](server)
        trial.write(100)
        rows = reading.read()
        assert rows[-1].seq == COUNT
        reading.until(trial.last)
    trial.check(reading.rows)


@pytest.mark.parametrize("history", [64, 1])
@pytest.mark.parametrize("how", AGAIN)
def test_while_keys_are_written_over_and_over(server: NatsServer, how: str, history: int) -> None:
    """Before, during and after its absence: in the middle of the list, and while nobody polls."""
    trial = Trial("kv current", server.url, hot=300).create(history=history)
    trial.write(COUNT, size=1000)
    listed = trial.last_values()
    harm = When(listed[len(listed) // 2], lambda: AGAIN[how](server))
    with Proxy(server.port, harm) as proxy, trial.reading(proxy.url) as reading:
        assert reading.plan()
        with trial.writing([server.url]) as writing:
            writing.wait(500)
            reading.read()
            assert harm.consumer
            assert len(proxy.created) > 1
            writing.wait(500)
            reading.until(trial.last)
            AGAIN[how](server)
            writing.wait(500)
        reading.until(trial.last)
        reading.drain()
    trial.check_readings(reading)
    assert reading.done[0].listed is (history > 1)
    assert trial.consumers() == []


def test_the_connection_is_lost_between_planning_and_reading(
    trial: Trial, server: NatsServer
) -> None:
    """Those of the planner and of the task before, which is kept."""
    with Proxy(server.port) as proxy, trial.reading(proxy.url) as reading:
        reading.until(COUNT)
        trial.write(100)
        assert reading.plan()
        before = proxy.connections
        proxy.cut()
        reading.read()
        trial.write(100)
        reading.until(trial.last)
        assert proxy.connections > before
    trial.check(reading.rows)
    assert trial.consumers() == []


def test_it_stands_still_between_planning_and_reading(server: NatsServer) -> None:
    """For longer than a PING is waited for: a new connection is made when it answers again."""
    trial = Trial("kv", server.url).create()
    trial.write(COUNT)
    with trial.reading() as reading:
        reading.until(COUNT)
        trial.write(100)
        assert reading.plan()
        server.pause()
        timer = threading.Timer(3.0, server.resume)
        timer.start()
        try:
            reading.read()
        finally:
            timer.join()
    trial.check(reading.rows)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_everything_freezes_in_the_middle(server: NatsServer, kind: str) -> None:
    """The line, not the server: what is on its way comes later, with stale heartbeats."""
    trial = Trial(kind, server.url).create()
    trial.write(COUNT, size=1000)
    thawing: list[threading.Timer] = []
    with Proxy(server.port) as proxy:

        def freeze() -> None:
            # In the proxy's own thread, so not by its methods for others.
            proxy._open.clear()
            thawing.append(threading.Timer(4.0, proxy.thaw))
            thawing[0].start()

        harm = When(700, freeze, lose=False)
        proxy.verdict = harm
        with trial.reading(proxy.url) as reading:
            reading.until(COUNT)
        thawing[0].join()
    trial.check(reading.rows)
    assert harm.consumer


def test_it_stays_away(nats_server: NatsServer) -> None:
    """An error that names what is missing, soon after ``connectTimeout``; and then all goes on."""
    trial = Trial("stream", nats_server.url).create()
    trial.write(COUNT)
    with trial.reading(connectTimeout="3") as reading:
        assert reading.plan()
        nats_server.kill()
        with pytest.raises(ConnectError):
            reading.read()
        with pytest.raises(NatsSourceError) as caught:
            reading.plan()
        assert isinstance(caught.value, ConnectError)
        nats_server.start()
        reading.until(COUNT)
    trial.check(reading.rows)


def test_it_is_not_there_yet(nats_server: NatsServer) -> None:
    """Planner and reader wait for ``connectTimeout`` while it starts."""
    trial = Trial("stream", nats_server.url).create()
    trial.write(COUNT)
    nats_server.kill()
    with trial.reading(connectTimeout="30") as reading:
        timer = threading.Timer(1.0, nats_server.start)
        timer.start()
        try:
            reading.until(COUNT)
        finally:
            timer.join()
    trial.check(reading.rows)


@pytest.mark.faults
def test_one_of_several_stands_still(server: NatsServer) -> None:
    """It accepts connections and says nothing: there is time left for the others.

    Which one is tried first is drawn, so that it is tried several times.
    """
    trial = Trial("stream", server.url).create()
    trial.write(100)
    with NatsServer() as still:
        still.pause()
        for _ in range(6):
            with trial.reading(f"{still.url},{server.url}", connectTimeout="8") as reading:
                reading.until(100)
            trial.check(reading.rows)
