"""Readers that pause, and many small ranges before a large backlog."""

from __future__ import annotations

import time

import pytest

from faults.proxy import Proxy
from faults.trial import Trial, be_patient
from nats_stream_source.embedded import NatsServer


def fill(server: NatsServer, kind: str, count: int, size: int) -> Trial:
    trial = Trial(kind, server.url).create(max_msg_size=1 << 20)
    trial.write(count, size)
    return trial


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_thirty_seconds_in_the_middle_of_a_hundred_megabytes(
    nats_server: NatsServer, kind: str
) -> None:
    """Longer than the server waits for a slow client (10 s): it cuts the connection."""
    trial = fill(nats_server, kind, 10_000, 10_000)
    paused: list[int] = []

    def pause(rows: int) -> None:
        if rows > 2000 and not paused:
            paused.append(rows)
            time.sleep(30)  # the fault: as a sink that is busy, with no event loop running

    with trial.reading() as reading:
        assert reading.plan()
        reading.read(pause)
    assert paused
    assert paused[0] < 8000
    trial.check(reading.rows)
    assert trial.consumers() == []


@pytest.mark.faults
def test_a_second_after_every_batch(nats_server: NatsServer) -> None:
    trial = fill(nats_server, "stream", 10_000, 10_000)
    pauses: list[int] = []

    def pause(rows: int) -> None:
        pauses.append(rows)
        time.sleep(1)

    with trial.reading() as reading:
        assert reading.plan()
        reading.read(pause)
    assert len(pauses) > 10
    trial.check(reading.rows)


def small_ranges(trial: Trial, server: NatsServer) -> None:
    """Fifty micro-batches of 90 to 100 rows, on the two connections that a query keeps."""
    proxied = Proxy(server.port, keep=200)
    with proxied as proxy, trial.reading(proxy.url, maxRowsPerTrigger="100") as reading:
        for _ in range(50):
            assert reading.plan()
            reading.read()
    assert 4500 <= len(reading.rows) <= 5000
    trial.check(reading.rows, through=reading.seq)
    # A consumer each, and none again: flow control of one does not hurt the next.
    assert len(proxy.created) == 50
    assert proxy.created == proxy.deleted
    assert proxy.connections == 2
    assert trial.consumers() == []


def test_fifty_small_ranges_before_a_large_backlog(
    shared_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch)
    small_ranges(fill(shared_server, "stream", 5000, 4000), shared_server)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_fifty_small_ranges_before_a_hundred_megabytes(
    shared_server: NatsServer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch)
    small_ranges(fill(shared_server, kind, 100_000, 1000), shared_server)
