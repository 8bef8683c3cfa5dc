"""A server that can store no more: what it has acknowledged is read, and all goes on when it can.

The disk is a small one of its own (tmpfs), where this process may mount one.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from topology import wait_until

from faults.trial import Trial
from nats_stream_source.embedded import NatsServer

pytestmark = pytest.mark.faults

Disk = Callable[[str], None]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = _mount("size=24m", place)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def _mount(options: str, place: Path) -> subprocess.CompletedProcess[str]:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    return subprocess.run(command, capture_output=True, text=True)


FULL = {"no space left on device": "1GB", "resource limits exceeded": "12MB"}
"""What the server's log says then, by what it may store."""


@pytest.mark.parametrize("said", FULL)
@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_full(disk: Path, tmp_path: Path, kind: str, said: str) -> None:
    config = tmp_path / "server.conf"
    config.write_text(f"jetstream {{ max_file_store: {FULL[said]} }}\n")
    with NatsServer(store=disk, config=config) as server:
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
            assert _mount("remount,size=64m", disk).returncode == 0
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
