"""Readers that pause, and many small ranges before a large backlog."""

from __future__ import annotations

import copy
import functools
import itertools
import time
from collections.abc import Callable

import pytest

from nats_stream_source.embedded import NatsServer
from tests.support.oracle.rows import Row
from tests.support.proxy.fault_proxy import Proxy
from tests.support.query_driver.batch import read_sorted
from tests.support.query_driver.micro_batch import Each
from tests.support.workload import Workload, be_patient


def fill(server: NatsServer, kind: str, count: int, size: int, **config: int) -> Workload:
    workload = Workload(kind, server.url).create(max_msg_size=1 << 20, **config)
    workload.write(count, size)
    return workload


@pytest.fixture(scope="module")
def large(shared_server: NatsServer) -> Callable[[str], Workload]:
    """A hundred megabytes, for a kind; one bucket for all kinds that read one."""
    filled = functools.cache(lambda kind: fill(shared_server, kind, 10_000, 10_000))

    def of_kind(kind: str) -> Workload:
        workload = copy.copy(filled("stream" if kind == "stream" else "kv"))
        workload.kind = kind
        return workload

    return of_kind


def read_with(workload: Workload, pause: Each, *, batch: bool = False) -> list[Row]:
    """All of it, in one micro-batch or one batch, with one consumer."""
    if batch:
        return read_sorted(workload.url, {"stream": workload.name}, each=pause)
    with workload.reading() as reading:
        assert reading.plan()
        return reading.read(pause)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["kv", "kv current", "stream", "batch"])
def test_thirty_seconds_in_the_middle_of_a_hundred_megabytes(
    large: Callable[[str], Workload], kind: str
) -> None:
    """Longer than the server waits for a slow client (10 s): it cuts the connection, mostly."""
    workload = large("stream" if kind == "batch" else kind)
    paused: list[int] = []

    def pause(rows: int) -> None:
        if rows > 2000 and not paused:
            paused.append(rows)
            time.sleep(30)  # the fault: as a sink that is busy, with no event loop running

    rows = read_with(workload, pause, batch=kind == "batch")
    assert paused
    assert paused[0] < 8000
    workload.check(rows)
    assert workload.consumers() == []


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["kv current", "stream", "batch"])
def test_a_second_after_every_batch(large: Callable[[str], Workload], kind: str) -> None:
    workload = large("stream" if kind == "batch" else kind)
    pauses: list[int] = []

    def pause(rows: int) -> None:
        pauses.append(rows)
        time.sleep(1)

    rows = read_with(workload, pause, batch=kind == "batch")
    assert len(pauses) > 10
    workload.check(rows)


@pytest.mark.faults
def test_a_list_is_overwritten_after_every_batch(shared_server: NatsServer) -> None:
    """Of a list of 30 MB, what comes in the end was superseded long ago, and still comes once."""
    workload = Workload("kv current", shared_server.url, hot=300).create()
    workload.write(700, size=100_000)
    pauses: list[int] = []

    def pause(rows: int) -> None:
        pauses.append(rows)
        workload.write(200, size=1000)

    with workload.reading() as reading:
        assert reading.plan()
        reading.read(pause)
        assert len(pauses) > 1
        assert reading.done[0].listed
        reading.until(workload.last)
    workload.check_readings(reading)
    assert workload.consumers() == []


def small_ranges(workload: Workload, server: NatsServer) -> None:
    """Fifty micro-batches of 90 to 100 rows, on the two connections that a query keeps."""
    proxied = Proxy(server.port, keep=200)
    with proxied as proxy, workload.reading(proxy.url, maxRowsPerTrigger="100") as reading:
        for _ in range(50):
            assert reading.plan()
            reading.read()
    assert 4500 <= len(reading.rows) <= 5000
    workload.check(reading.rows, through=reading.seq)
    check_fifty(proxy, workload)


def small_splits(workload: Workload, server: NatsServer) -> None:
    """A batch of fifty tasks with 80 rows each, one after the other in one worker."""
    options = {"stream": workload.name, "endSequence": "4000", "minPartitions": "50"}
    counts = [0]
    with Proxy(server.port, keep=200) as proxy:
        rows = read_sorted(proxy.url, options, each=counts.append)
    assert len(rows) == 4000
    assert max(b - a for a, b in itertools.pairwise(counts)) <= 100
    workload.check(rows, through=4000)
    check_fifty(proxy, workload)


def check_fifty(proxy: Proxy, workload: Workload) -> None:
    """A consumer each, and none again: flow control of one does not hurt the next."""
    assert len(proxy.created) == 50
    assert proxy.created == proxy.deleted
    assert proxy.connections == 2
    assert workload.consumers() == []


def test_fifty_small_ranges_before_a_large_backlog(
    shared_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch)
    workload = fill(shared_server, "stream", 5000, 4000)
    small_ranges(workload, shared_server)
    small_splits(workload, shared_server)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["kv", "kv current", "stream"])
def test_fifty_small_ranges_before_a_hundred_megabytes(
    shared_server: NatsServer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch)
    # With history 1, so that the current values are ranges that are limited like others.
    more = {"history": 1} if kind != "stream" else {}
    workload = fill(shared_server, kind, 100_000, 1000, **more)
    small_ranges(workload, shared_server)
    if kind == "stream":
        small_splits(workload, shared_server)
