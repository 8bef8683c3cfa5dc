"""A server that can store no more: what it has acknowledged is read, and all goes on when it can.

The disk is a small one of its own (tmpfs), where this process may mount one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer
from tests.support.nats.tmpfs import small_disk
from tests.support.wait import wait_until
from tests.support.workload import Workload

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
        workload = Workload(kind, server.url).create()
        with workload.reading() as reading:
            with workload.writing([server.url], size=10_000) as writing:
                # A write that fails may have come too late; what the server says is no mistake.
                wait_until(
                    lambda: writing.failed > 0 and said in server.log,
                    "a write is refused",
                    deadline=300,
                )
                # While it is full, and while others still try to write.
                reading.until(workload.last)
            reading.until(workload.last)
            assert len(workload.acknowledged) > 500

            config.write_text("jetstream { max_file_store: 1GB }\n")
            resize(64)
            server.restart()
            workload.write(100, size=10_000)
            reading.until(workload.last)
        workload.check(reading.rows)
        assert workload.consumers() == []


def test_a_stream_that_refuses_more(nats_server: NatsServer) -> None:
    """``discard: new``: the writer is refused, readers notice nothing."""
    workload = Workload("kv", nats_server.url).create(max_bytes=1_000_000)
    with workload.writing([nats_server.url], size=10_000) as writing:
        wait_until(
            lambda: writing.failed > 0 and full(workload), "a write is refused", deadline=300
        )
    with workload.reading() as reading:
        reading.until(workload.last)
    workload.check(reading.rows)


def full(workload: Workload) -> bool:
    """Whether not one more value fits."""
    return int(workload.state()["bytes"]) > 1_000_000 - 10_000
