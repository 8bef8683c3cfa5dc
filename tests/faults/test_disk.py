"""A server that can store no more: what it has acknowledged is read, and all goes on when it can.

The disk is a small one of its own (tmpfs), where this process may mount one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from topology import wait_until

from faults.small_disk import small_disk
from faults.trial import Trial
from nats_stream_source.embedded import NatsServer

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
        trial = Trial(kind, server.url).create()
        with trial.reading() as reading:
            with trial.writing([server.url], size=10_000) as writing:
                # A write that fails may have come too late; what the server says is no mistake.
                wait_until(
                    "a write is refused",
                    lambda: writing.failed > 0 and said in server.log,
                    deadline=300,
                )
                # While it is full, and while others still try to write.
                reading.until(trial.last)
            reading.until(trial.last)
            assert len(trial.acknowledged) > 500

            config.write_text("jetstream { max_file_store: 1GB }\n")
            resize(64)
            server.restart()
            trial.write(100, size=10_000)
            reading.until(trial.last)
        trial.check(reading.rows)
        assert trial.consumers() == []


def test_a_stream_that_refuses_more(nats_server: NatsServer) -> None:
    """``discard: new``: the writer is refused, readers notice nothing."""
    trial = Trial("kv", nats_server.url).create(max_bytes=1_000_000)
    with trial.writing([nats_server.url], size=10_000) as writing:
        wait_until("a write is refused", lambda: writing.failed > 0 and full(trial), deadline=300)
    with trial.reading() as reading:
        reading.until(trial.last)
    trial.check(reading.rows)


def full(trial: Trial) -> bool:
    """Whether not one more value fits."""
    return int(trial.state()["bytes"]) > 1_000_000 - 10_000
