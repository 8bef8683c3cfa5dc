"""What a scenario leaves behind: counted on the server and in this process.

::

    with nothing_left(server):
        ...  # whatever happens here, at the end all is as it was

Counted are the consumers of all streams and the connections on the server, and here file
descriptors, threads, child processes and tasks that asyncio found lost. What ends by itself in a
moment, as a connection that is being closed, is waited for.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from buckets import api

from nats_stream_source.embedded import NatsServer

DEADLINE = 20.0
"""Seconds for what is on its way out; only a failing test takes that long."""


@dataclass(frozen=True)
class Held:
    """What there is at one moment.

    Attributes:
        consumers: on the server, with their streams.
        connections: sockets that the server process has open.
        files: this process's file descriptors and what they are.
        threads: names of this process's threads.
        children: ids of this process's child processes.
    """

    consumers: tuple[str, ...]
    connections: int
    files: tuple[str, ...]
    threads: tuple[str, ...]
    children: tuple[int, ...]

    @classmethod
    def now(cls, server: NatsServer) -> Held:
        gc.collect()
        return cls(
            consumers=tuple(consumers(server)),
            connections=connections(server),
            files=tuple(sorted(_files(os.getpid()))),
            threads=tuple(sorted(thread.name for thread in threading.enumerate())),
            children=tuple(sorted(children())),
        )

    def more(self, before: Held) -> dict[str, Any]:
        """What there is that was not there ``before``."""
        found: dict[str, Any] = {}
        for field in fields(self):
            now, then = getattr(self, field.name), getattr(before, field.name)
            if isinstance(now, int):
                if now > then:
                    found[field.name] = now - then
            elif len(now) > len(then):
                found[field.name] = _without(now, then)
        return found


@contextlib.contextmanager
def nothing_left(server: NatsServer) -> Iterator[None]:
    """Assert that the block leaves nothing behind, however it ends well.

    It may stop and start ``server``; it must run again at its end.
    """
    lost = _Lost()
    logging.getLogger("asyncio").addHandler(lost)
    before = Held.now(server)
    try:
        yield
        end = time.monotonic() + DEADLINE
        while left := Held.now(server).more(before):
            assert time.monotonic() < end, f"left behind: {left}"
            time.sleep(0.05)
    finally:
        logging.getLogger("asyncio").removeHandler(lost)
    assert not lost.said, f"asyncio complains: {lost.said}"


def consumers(server: NatsServer) -> list[str]:
    """All consumers of the server's default account, with their streams."""
    streams = api(server.url, "STREAM.NAMES").get("streams") or []
    return sorted(
        f"{stream} {name}"
        for stream in streams
        for name in api(server.url, f"CONSUMER.NAMES.{stream}").get("consumers") or []
    )


def connections(server: NatsServer) -> int:
    """How many sockets the server process has open: its connections, and what it listens on."""
    return sum(name.startswith("socket:") for name in _files(server.pid))


def children() -> list[int]:
    """This process's child processes."""
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended
            found += map(int, path.read_text().split())
    return found


def _files(pid: int) -> list[str]:
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them, for one
            name = os.readlink(path)
            # Sockets and pipes are told apart by numbers that come anew.
            found.append(name)
    return found


def _without(now: tuple[Any, ...], then: tuple[Any, ...]) -> list[Any]:
    left = list(now)
    for one in then:
        with contextlib.suppress(ValueError):
            left.remove(one)
    return left


class _Lost(logging.Handler):
    """Collects what asyncio complains of: tasks destroyed, exceptions that nobody took."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
