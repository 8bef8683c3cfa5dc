"""A server's store, looked at, damaged and replaced while the server is down; a small disk."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer


def directory_of(server: NatsServer, stream: str) -> Path:
    """Where the server keeps the stream: ``meta.inf``, and the messages in ``msgs/*.blk``."""
    return next(server.store.rglob(f"streams/{stream}"))


def flip(file: Path, at: float) -> None:
    """Turn some bits round; ``at`` 0 is the file's beginning, 1 its end."""
    content = bytearray(file.read_bytes())
    begin = int(len(content) * at)
    content[begin : begin + 16] = bytes(byte ^ 0xFF for byte in content[begin : begin + 16])
    file.write_bytes(content)


def keep_store(server: NatsServer, directory: Path, *others: NatsServer) -> Callable[[], None]:
    """Copy the store of a server, and of others of its cluster, to ``directory``.

    Returns:
        a function that restores the copies. The restored store lacks later acknowledged writes, as
        after a power loss or from a backup.
    """
    copies = {one: directory / f"kept-{one.port}" for one in (server, *others)}
    for one in copies:
        one.terminate()
    for one, copy in copies.items():
        shutil.copytree(one.store / "jetstream", copy)
    for one in copies:
        one.start()

    def restore() -> None:
        for one in copies:
            one.kill()
        for one, copy in copies.items():
            shutil.rmtree(one.store / "jetstream")
            shutil.copytree(copy, one.store / "jetstream")
        for one in copies:
            one.start()

    return restore


@contextlib.contextmanager
def small_disk(place: Path, megabytes: int) -> Iterator[Callable[[int], None]]:
    """Mount one at ``place``; what this gives changes its size.

    Where this process may not mount anything, the test is skipped.
    """
    place.mkdir()
    mounted = _mount(f"size={megabytes}m", place)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")

    def resize(megabytes: int) -> None:
        changed = _mount(f"remount,size={megabytes}m", place)
        assert changed.returncode == 0, changed.stderr

    try:
        yield resize
    finally:
        # Spark may have a file open for a while after its query has ended.
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def _mount(options: str, place: Path) -> subprocess.CompletedProcess[str]:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    return subprocess.run(command, capture_output=True, text=True)
