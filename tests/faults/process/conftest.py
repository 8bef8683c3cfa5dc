"""The server of the tests that count resources."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nats_stream_source.embedded import NatsServer
from tests.faults.process.in_process_planner import ROWS, VALUE
from tests.support.nats.buckets import create_bucket, put_many


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    """Server whose bucket ``full`` has ``ROWS`` values of 8 KB: three batches with flow control."""
    with NatsServer() as server:
        create_bucket(server.url, "full", history=2)
        put_many(server.url, "full", ((f"k{i}", VALUE) for i in range(ROWS)))
        yield server
