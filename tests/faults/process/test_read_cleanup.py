"""A read leaves nothing, however it ends; a reader that pauses for long reads to the end."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from nats_stream_source.connection.connection import ConnectionSettings
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import NatsSourceError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import RangeRequest
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.spark.runner import Runner
from tests.faults.process.conftest import ROWS, VALUE, batch_row_counts
from tests.support.attack_target import peak, read
from tests.support.leak_check import Held, connections, consumers, nothing_left
from tests.support.nats.buckets import api, create_bucket, delete_bucket, put_many
from tests.support.proxy.fault_proxy import Proxy, is_delivery
from tests.support.wait import wait_until

CONSUMER = {
    "stream_name": "KV_full",
    "config": {"name": "left", "ack_policy": "none", "inactive_threshold": 3600 * 10**9},
}


def all_rows(server: NatsServer) -> None:
    assert len(read(server.url, bucket="full", includeHistory=True)) == ROWS


def current_values(server: NatsServer) -> None:
    assert len(read(server.url, bucket="full")) == ROWS


def a_few(server: NatsServer) -> None:
    assert len(read(server.url, bucket="full", startSequence=ROWS - 2)) == 3


def several_splits(server: NatsServer) -> None:
    assert len(read(server.url, bucket="full", includeHistory=True, minPartitions=4)) == ROWS


def no_bucket(server: NatsServer) -> None:
    with pytest.raises(NatsSourceError):
        read(server.url, bucket="none")


def without_server(server: NatsServer) -> None:
    with pytest.raises(NatsSourceError):
        read("nats://127.0.0.1:1", bucket="full", connectTimeout=0.3)


def stopped_in_the_middle(server: NatsServer) -> None:
    """``limit()`` or a killed task closes the generator."""
    batches = batch_row_counts(server.url)
    assert 0 < next(batches) < ROWS / 2
    assert consumers(server), "no consumer while the range is read"
    batches.close()


def a_row_that_is_none(server: NatsServer) -> None:
    """The task fails on a message with an invalid subject."""

    def invalid(frame: bytes) -> bytes:
        return frame.replace(b"$KV.full.k", b"$KV.full.\xff", 1)

    with (
        Proxy(server.port, invalid, keep=0) as proxy,
        pytest.raises(NatsSourceError, match="is not UTF-8"),
    ):
        read(proxy.url, bucket="full", includeHistory=True)


def lost_messages(server: NatsServer) -> None:
    lost = 0

    def verdict(frame: bytes) -> bool:
        nonlocal lost
        lost += (drop := is_delivery(frame) and lost < 3)
        return not drop

    with Proxy(server.port, verdict, keep=0) as proxy:
        assert len(read(proxy.url, bucket="full", includeHistory=True)) == ROWS
    assert lost == 3


def a_lost_connection(server: NatsServer) -> None:
    with Proxy(server.port, keep=0) as proxy:
        batches = batch_row_counts(proxy.url)
        count = next(batches)
        before = proxy.connections
        proxy.cut()
        assert count + sum(batches) == ROWS
        assert proxy.connections > before


def a_server_that_is_restarted(server: NatsServer) -> None:
    batches = batch_row_counts(server.url)
    count = next(batches)
    server.kill()
    server.start()
    assert count + sum(batches) == ROWS


def a_bucket_that_is_deleted(server: NatsServer) -> None:
    create_bucket(server.url, "gone")
    put_many(server.url, "gone", ((f"k{i}", VALUE) for i in range(ROWS)))
    batches = batch_row_counts(server.url, "gone")
    assert next(batches)
    delete_bucket(server.url, "gone")
    with pytest.raises(NatsSourceError):
        list(batches)


SCENARIOS: tuple[Callable[[NatsServer], None], ...] = (
    all_rows,
    current_values,
    a_few,
    several_splits,
    no_bucket,
    without_server,
    stopped_in_the_middle,
    a_row_that_is_none,
    lost_messages,
    a_lost_connection,
    a_server_that_is_restarted,
    a_bucket_that_is_deleted,
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_read_leaves_no_consumers(
    server: NatsServer, scenario: Callable[[NatsServer], None]
) -> None:
    with nothing_left(server):
        scenario(server)


def test_leftover_consumer_is_found(server: NatsServer) -> None:
    """The check itself detects a consumer, a connection, files, a thread and a child process."""
    over = threading.Event()
    before = Held.at_rest(server)
    with contextlib.ExitStack() as stack:
        api(server.url, "CONSUMER.CREATE.KV_full.left", CONSUMER)
        stack.callback(api, server.url, "CONSUMER.DELETE.KV_full.left")
        stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        thread = threading.Thread(target=over.wait, name="left")
        thread.start()
        stack.callback(thread.join)
        stack.callback(over.set)
        child = subprocess.Popen(["sleep", "infinity"])
        stack.callback(child.wait)
        stack.callback(child.kill)
        wait_until(
            lambda: connections(server), "the server has accepted the connection", deadline=600
        )
        found = Held.now(server).more(before)
        assert found.keys() == {field.name for field in fields(Held)}
        assert found["consumers"] == ["KV_full left"]
        assert found["threads"] == ["left"]
        assert found["children"] == [child.pid]


def test_reader_pauses_longer_than_all_timers(server: NatsServer) -> None:
    """No event loop runs in the pause; the reader counts no heartbeat of it as missed."""
    # One second, since a server without CPU time for three intervals would count as silent.
    got, rebuilds = _paused(server.url, heartbeat=1.0, pause=3.5)
    assert got == list(range(1, ROWS + 1))
    assert rebuilds == []


@pytest.mark.faults
def test_reader_pauses_for_minutes(server: NatsServer) -> None:
    """Longer than the server's write deadline and the inactive threshold of a consumer."""
    create_bucket(server.url, "backlog")
    large = b"x" * 50_000
    for part in range(4):
        put_many(server.url, "backlog", ((f"k{part}.{i}", large) for i in range(500)))
    with peak() as memory:
        got, _ = _paused(server.url, bucket="backlog", end=2000, heartbeat=0.5, pause=180.0)
    assert got == list(range(1, 2001))
    assert memory.grown < 256 << 20


def _paused(
    url: str, *, heartbeat: float, pause: float, bucket: str = "full", end: int = ROWS
) -> tuple[list[int], list[Any]]:
    """Read a range; run no event loop for ``pause`` seconds after the first batch.

    Returns the sequences read and the rebuilds of the consumer.
    """
    runner = Runner(ConnectionSettings(servers=(url,), connect_timeout=20.0, request_timeout=20.0))
    try:

        async def created() -> str:
            jetstream = JetStream(await runner.connection.connection())
            return (await jetstream.stream_info(f"KV_{bucket}")).created

        request = RangeRequest(
            stream=f"KV_{bucket}",
            known=KnownStream(runner.run(created())),
            start=0,
            end=end,
            heartbeat=heartbeat,
            batch_rows=100,
        )
        reader = OrderedReader(runner.connection, request)
        got: list[int] = []
        with contextlib.closing(runner.iterate(reader.batches())) as batches:
            for frames in batches:
                if not got:
                    time.sleep(pause)
                got += frames.stream_seq.tolist()
        return got, reader.cursor.rebuilds
    finally:
        runner.close()
