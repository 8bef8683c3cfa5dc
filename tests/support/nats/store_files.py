"""A server's store, looked at and damaged while the server is down."""

from __future__ import annotations

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
