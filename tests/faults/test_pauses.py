"""Readers that pause, and many small ranges before a large backlog."""

from __future__ import annotations

import copy
import functools
import itertools
import time
from collections.abc import Callable

import pytest

from faults.batches import read
from faults.proxy import Proxy
from faults.reading import Each
from faults.rows import Row
from faults.trial import Trial, be_patient
from nats_stream_source.embedded import NatsServer


def fill(server: NatsServer, kind: str, count: int, size: int, **config: int) -> Trial:
    trial = Trial(kind, server.url).create(max_msg_size=1 << 20, **config)
    trial.write(count, size)
    return trial


@pytest.fixture(scope="module")
def large(shared_server: NatsServer) -> Callable[[str], Trial]:
    """A hundred megabytes, for a kind; one bucket for all kinds that read one."""
    filled = functools.cache(lambda kind: fill(shared_server, kind, 10_000, 10_000))

    def of_kind(kind: str) -> Trial:
        trial = copy.copy(filled("stream" if kind == "stream" else "kv"))
        trial.kind = kind
        return trial

    return of_kind


def read_with(trial: Trial, pause: Each, *, batch: bool = False) -> list[Row]:
    """All of it, in one micro-batch or one batch, with one consumer."""
    if batch:
        return read(trial.url, {"stream": trial.name}, each=pause)
    with trial.reading() as reading:
        assert reading.plan()
        return reading.read(pause)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["kv", "kv current", "stream", "batch"])
def test_thirty_seconds_in_the_middle_of_a_hundred_megabytes(
    large: Callable[[str], Trial], kind: str
) -> None:
    """Longer than the server waits for a slow client (10 s): it cuts the connection, mostly."""
    trial = large("stream" if kind == "batch" else kind)
    paused: list[int] = []

    def pause(rows: int) -> None:
        if rows > 2000 and not paused:
            paused.append(rows)
            time.sleep(30)  # the fault: as a sink that is busy, with no event loop running

    rows = read_with(trial, pause, batch=kind == "batch")
    assert paused
    assert paused[0] < 8000
    trial.check(rows)
    assert trial.consumers() == []


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["kv current", "stream", "batch"])
def test_a_second_after_every_batch(large: Callable[[str], Trial], kind: str) -> None:
    trial = large("stream" if kind == "batch" else kind)
    pauses: list[int] = []

    def pause(rows: int) -> None:
        pauses.append(rows)
        time.sleep(1)

    rows = read_with(trial, pause, batch=kind == "batch")
    assert len(pauses) > 10
    trial.check(rows)


@pytest.mark.faults
def test_a_list_is_overwritten_after_every_batch(shared_server: NatsServer) -> None:
    """Of a list of 30 MB, what comes in the end was superseded long ago, and still comes once."""
    trial = Trial("kv current", shared_server.url, hot=300).create()
    trial.write(700, size=100_000)
    pauses: list[int] = []

    def pause(rows: int) -> None:
        pauses.append(rows)
        trial.write(200, size=1000)

    with trial.reading() as reading:
        assert reading.plan()
        reading.read(pause)
        assert len(pauses) > 1
        assert reading.done[0].listed
        reading.until(trial.last)
    trial.check_readings(reading)
    assert trial.consumers() == []


def small_ranges(trial: Trial, server: NatsServer) -> None:
    """Fifty micro-batches of 90 to 100 rows, on the two connections that a query keeps."""
    proxied = Proxy(server.port, keep=200)
    with proxied as proxy, trial.reading(proxy.url, maxRowsPerTrigger="100") as reading:
        for _ in range(50):
            assert reading.plan()
            reading.read()
    assert 4500 <= len(reading.rows) <= 5000
    trial.check(reading.rows, through=reading.seq)
    check_fifty(proxy, trial)


def small_splits(trial: Trial, server: NatsServer) -> None:
    """A batch of fifty tasks with 80 rows each, one after the other in one worker."""
    options = {"stream": trial.name, "endSequence": "4000", "minPartitions": "50"}
    counts = [0]
    with Proxy(server.port, keep=200) as proxy:
        rows = read(proxy.url, options, each=counts.append)
    assert len(rows) == 4000
    assert max(b - a for a, b in itertools.pairwise(counts)) <= 100
    trial.check(rows, through=4000)
    check_fifty(proxy, trial)


def check_fifty(proxy: Proxy, trial: Trial) -> None:
    """A consumer each, and none again: flow control of one does not hurt the next."""
    assert len(proxy.created) == 50
    assert proxy.created == proxy.deleted
    assert proxy.connections == 2
    assert trial.consumers() == []


def test_fifty_small_ranges_before_a_large_backlog(
    shared_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch)
    trial = fill(shared_server, "stream", 5000, 4000)
    small_ranges(trial, shared_server)
    small_splits(trial, shared_server)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["kv", "kv current", "stream"])
def test_fifty_small_ranges_before_a_hundred_megabytes(
    shared_server: NatsServer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch)
    # With history 1, so that the current values are ranges that are limited like others.
    more = {"history": 1} if kind != "stream" else {}
    trial = fill(shared_server, kind, 100_000, 1000, **more)
    small_ranges(trial, shared_server)
    if kind == "stream":
        small_splits(trial, shared_server)
