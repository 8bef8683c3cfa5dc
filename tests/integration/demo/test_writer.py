"""The demo's writer process: its limit, its end and its errors."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time

import pytest

from nats_stream_source.demo import flights, tables
from nats_stream_source.demo.compare import State
from nats_stream_source.demo.writer import Writer, WriterError, create_bucket
from nats_stream_source.embedded import NatsServer

DEADLINE = 300.0


def wait(writer: Writer, written: int) -> None:
    """Wait until the writer has written ``written`` entries; raise its error if it fails."""
    deadline = time.monotonic() + DEADLINE
    while writer.written < written:
        writer.verify()
        assert time.monotonic() < deadline, writer
        time.sleep(0.01)


def test_writer_stops_at_allowed_count(server: NatsServer) -> None:
    asyncio.run(create_bucket(server.url, "gated", history=1))
    replay = flights.load(1000)
    with Writer(server.url, "gated", 1000) as writer:
        writer.allow(100)
        wait(writer, 100)
        assert sum(1 for _ in asyncio.run(subjects(server, "gated"))) <= 100
        writer.allow(replay.writes)
        writer.join()
        assert writer.written == replay.writes
    expected = {}
    for revision, (key, value) in enumerate(replay.operations(), 1):
        expected[key] = State(revision, None if value is None else json.loads(value))
    assert asyncio.run(tables.read_bucket(server.url, "gated")) == expected


async def subjects(server: NatsServer, bucket: str) -> list[str]:
    return list(await tables.read_bucket(server.url, bucket))


def test_writer_ends_with_its_parent(server: NatsServer) -> None:
    asyncio.run(create_bucket(server.url, "orphan", history=1))
    process = subprocess.Popen(
        [sys.executable, "-m", "nats_stream_source.demo.writer", server.url, "orphan", "1000"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    process.communicate(b"10\n", timeout=DEADLINE)
    assert process.returncode == 0
    assert len(asyncio.run(subjects(server, "orphan"))) <= 10


@pytest.mark.parametrize(("bucket", "why"), [("missing", "NoStreamError"), (None, "ConnectError")])
def test_writer_error_names_cause(server: NatsServer, bucket: str | None, why: str) -> None:
    url = server.url if bucket else "nats://127.0.0.1:1"
    with Writer(url, bucket or "any", 1000) as writer:
        writer.allow(1000)
        with pytest.raises(WriterError, match=rf"ended after 0 writes: .*({why})"):
            wait(writer, 1000)
