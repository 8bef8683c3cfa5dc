"""A server with a full disk: all it acknowledged is read, and writes resume with more space.

The disk is a small one of its own (tmpfs), where this process may mount one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer
from tests.support.nats.store_files import small_disk
from tests.support.recorded_stream import RecordedStream
from tests.support.wait import wait_until

pytestmark = pytest.mark.faults

FULL = {"no space left on device": "1GB", "resource limits exceeded": "12MB"}
"""What the server's log says then, by what it may store."""


@pytest.mark.parametrize("said", FULL)
@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_full(tmp_path: Path, kind: str, said: str) -> None:
    disk = tmp_path / "disk"
    config = tmp_path / "server.conf"
    config.write_text(f"jetstream {{ max_file_store: {FULL[said]} }}\n")
    with small_disk(disk, 24) as resize, NatsServer(store=disk, config=config) as server:
        recorded = RecordedStream(kind, server.url).create()
        with recorded.query() as query:
            with recorded.writing([server.url], size=10_000) as writing:
                # A write that fails may have come too late; what the server says is no mistake.
                wait_until(
                    lambda: writing.failed > 0 and said in server.log,
                    "a write is refused",
                    deadline=300,
                )
                # While it is full, and while others still try to write.
                query.until(recorded.last)
            query.until(recorded.last)
            assert len(recorded.acknowledged) > 500

            config.write_text("jetstream { max_file_store: 1GB }\n")
            resize(64)
            server.restart()
            recorded.write(100, size=10_000)
            query.until(recorded.last)
        recorded.check(query.rows)
        assert recorded.consumers() == []


def test_stream_full_refuses_writes(nats_server: NatsServer) -> None:
    """``discard: new``: the writer is refused, readers notice nothing."""
    recorded = RecordedStream("kv", nats_server.url).create(max_bytes=1_000_000)
    with recorded.writing([nats_server.url], size=10_000) as writing:
        wait_until(
            lambda: writing.failed > 0 and full(recorded), "a write is refused", deadline=300
        )
    with recorded.query() as query:
        query.until(recorded.last)
    recorded.check(query.rows)


def full(recorded: RecordedStream) -> bool:
    return int(recorded.state()["bytes"]) > 1_000_000 - 10_000
