"""A server's store, looked at, damaged and replaced while the server is down."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

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
