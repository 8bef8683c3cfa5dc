"""Readers that pause, and many small ranges before a large backlog."""

from __future__ import annotations

import copy
import functools
import itertools
import time
from collections.abc import Callable

import pytest

from nats_stream_source.embedded import NatsServer
from tests.support.oracle.row_check import Row
from tests.support.proxy.fault_proxy import Proxy
from tests.support.query_driver.batch import read_sorted
from tests.support.query_driver.driver import Each
from tests.support.recorded_stream import RecordedStream, use_long_deadlines


def fill(server: NatsServer, kind: str, count: int, size: int, **config: int) -> RecordedStream:
    recorded = RecordedStream(kind, server.url).create(max_msg_size=1 << 20, **config)
    recorded.write(count, size)
    return recorded


@pytest.fixture(scope="module")
def large(shared_server: NatsServer) -> Callable[[str], RecordedStream]:
    """A hundred megabytes, for a kind; one bucket for all kinds that read one."""
    filled = functools.cache(lambda kind: fill(shared_server, kind, 10_000, 10_000))

    def of_kind(kind: str) -> RecordedStream:
        recorded = copy.copy(filled("stream" if kind == "stream" else "kv"))
        recorded.kind = kind
        return recorded

    return of_kind


def read_with(recorded: RecordedStream, pause: Each, *, batch: bool = False) -> list[Row]:
    """All of it, in one micro-batch or one batch, with one consumer."""
    if batch:
        return read_sorted(recorded.url, {"stream": recorded.name}, each=pause)
    with recorded.query() as query:
        assert query.plan()
        return query.read(pause).rows


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["kv", "kv current", "stream", "batch"])
def test_reader_pauses_thirty_seconds_within_hundred_megabytes(
    large: Callable[[str], RecordedStream], kind: str
) -> None:
    """Longer than the server waits for a slow client (10 s): it cuts the connection, mostly."""
    recorded = large("stream" if kind == "batch" else kind)
    paused: list[int] = []

    def pause(rows: int) -> None:
        if rows > 2000 and not paused:
            paused.append(rows)
            time.sleep(30)  # the fault: as a sink that is busy, with no event loop running

    rows = read_with(recorded, pause, batch=kind == "batch")
    assert paused
    assert paused[0] < 8000
    recorded.check(rows)
    assert recorded.consumers() == []


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["kv current", "stream", "batch"])
def test_reader_pauses_after_every_batch(large: Callable[[str], RecordedStream], kind: str) -> None:
    recorded = large("stream" if kind == "batch" else kind)
    pauses: list[int] = []

    def pause(rows: int) -> None:
        pauses.append(rows)
        time.sleep(1)

    rows = read_with(recorded, pause, batch=kind == "batch")
    assert len(pauses) > 10
    recorded.check(rows)


@pytest.mark.faults
def test_initial_values_overwritten_after_every_batch(shared_server: NatsServer) -> None:
    """Of a list of 30 MB, what comes in the end was superseded long ago, and still comes once."""
    recorded = RecordedStream("kv current", shared_server.url, hot=300).create()
    recorded.write(700, size=100_000)
    pauses: list[int] = []

    def pause(rows: int) -> None:
        pauses.append(rows)
        recorded.write(200, size=1000)

    with recorded.query() as query:
        assert query.plan()
        query.read(pause)
        assert len(pauses) > 1
        assert query.done[0].listed
        query.until(recorded.last)
    recorded.check_queries(query)
    assert recorded.consumers() == []


def small_ranges(recorded: RecordedStream, server: NatsServer) -> None:
    """Fifty micro-batches of 90 to 100 rows, on the two connections that a query keeps."""
    proxied = Proxy(server.port, keep=200)
    with proxied as proxy, recorded.query(proxy.url, maxRowsPerTrigger="100") as query:
        for _ in range(50):
            assert query.plan()
            query.read()
    assert 4500 <= len(query.rows) <= 5000
    recorded.check(query.rows, through=query.seq)
    check_fifty(proxy, recorded)


def small_splits(recorded: RecordedStream, server: NatsServer) -> None:
    """A batch of fifty tasks with 80 rows each, one after the other in one worker."""
    options = {"stream": recorded.name, "endSequence": "4000", "minPartitions": "50"}
    counts = [0]
    with Proxy(server.port, keep=200) as proxy:
        rows = read_sorted(proxy.url, options, each=counts.append)
    assert len(rows) == 4000
    assert max(b - a for a, b in itertools.pairwise(counts)) <= 100
    recorded.check(rows, through=4000)
    check_fifty(proxy, recorded)


def check_fifty(proxy: Proxy, recorded: RecordedStream) -> None:
    """A consumer each, and none again: flow control of one does not hurt the next."""
    assert len(proxy.created) == 50
    assert proxy.created == proxy.deleted
    assert proxy.connections == 2
    assert recorded.consumers() == []


def test_fifty_small_ranges_before_large_backlog(
    shared_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_long_deadlines(monkeypatch)
    recorded = fill(shared_server, "stream", 5000, 4000)
    small_ranges(recorded, shared_server)
    small_splits(recorded, shared_server)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["kv", "kv current", "stream"])
def test_fifty_small_ranges_before_hundred_megabytes(
    shared_server: NatsServer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_long_deadlines(monkeypatch)
    # With history 1, so that the current values are ranges that are limited like others.
    more = {"history": 1} if kind != "stream" else {}
    recorded = fill(shared_server, kind, 100_000, 1000, **more)
    small_ranges(recorded, shared_server)
    if kind == "stream":
        small_splits(recorded, shared_server)
