"""Resources that a scenario leaves behind: counted on the server and in this process.

::

    with nothing_left(server):
        ...  # whatever happens here, at the end all is as it was

Counted are the consumers of all streams and the connections on the server, and here file
descriptors, threads, child processes and tasks that asyncio found lost. What ends by itself in a
moment, as a connection that is being closed, is waited for, before as well as after: what is
counted must not come from another test.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import psutil

from nats_stream_source.embedded import NatsServer
from tests.support.nats.buckets import api

DEADLINE = 40.0
"""Seconds for what is on its way out; only a failing test takes that long.

Less than a minute, after which the server removes a consumer that was left behind.
"""


@dataclass(frozen=True)
class Held:
    """Consumers, connections, files, threads and child processes at one moment.

    Attributes:
        consumers: on the server, with their streams.
        connections: how many the server process has open.
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
            files=tuple(sorted(_files())),
            threads=tuple(sorted(thread.name for thread in threading.enumerate())),
            children=tuple(sorted(one.pid for one in psutil.Process().children())),
        )

    @classmethod
    def at_rest(cls, server: NatsServer) -> Held:
        end = time.monotonic() + DEADLINE
        while count := connections(server):
            assert time.monotonic() < end, f"{count} connections of somebody else"
            gc.collect()  # one that was forgotten goes with whoever forgot it
            time.sleep(0.02)
        held = cls.now(server)
        # Looking for consumers takes connections, too.
        return replace(held, connections=0)

    def more(self, before: Held) -> dict[str, Any]:
        """What was not there ``before``."""
        found: dict[str, Any] = {}
        for field in fields(self):
            now, then = getattr(self, field.name), getattr(before, field.name)
            if isinstance(now, int):
                left: Any = max(now - then, 0)
            elif field.name == "consumers" or len(now) > len(then):
                left = list((Counter(now) - Counter(then)).elements())
            else:
                left = None  # numbers and ids change where one has taken the place of another
            if left:
                found[field.name] = left
        return found


@contextlib.contextmanager
def nothing_left(server: NatsServer) -> Iterator[None]:
    """Assert that the block leaves nothing behind, however it ends well.

    It may stop and start ``server``; it must run again at its end.
    """
    lost = _Lost()
    # First, since it collects what earlier tests have lost, of which asyncio complains.
    before = Held.at_rest(server)
    logging.getLogger("asyncio").addHandler(lost)
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
    """How many connections the server process has open, those that it is closing among them."""
    found = psutil.Process(server.pid).net_connections("tcp")
    return sum(one.status != psutil.CONN_LISTEN for one in found)


def _files() -> list[str]:
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them, for one
            found.append(os.readlink(path))
    return found


class _Lost(logging.Handler):
    """Collects what asyncio complains of: tasks destroyed, exceptions that were not retrieved."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
