"""A reader pauses longer than all timers of client and server, and reads its range to the end."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest

from nats_stream_source.connection.connection import ConnectionSettings
from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import RangeRequest
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.spark.runner import Runner
from tests.faults.process.conftest import ROWS
from tests.support.attack_target import peak
from tests.support.nats.buckets import create_bucket, put_many


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
