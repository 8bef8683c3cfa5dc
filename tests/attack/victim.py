"""A query as Spark runs it, without Spark: options, offsets, splits, rows, in one thread."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from nats_stream_source.jetstream.patience import patiently
from nats_stream_source.options import Mode, kv_options, stream_options
from nats_stream_source.source.planner import Planner
from nats_stream_source.source.query import query_of
from nats_stream_source.source.reader import read_split
from nats_stream_source.source.runtime import Runner, drop_kept_runners

Row = dict[str, Any]

HANG = 600.0
"""Seconds after which a block hangs; a busy machine, or one that watches each allocation, is slow
by a factor that must not matter."""

PATIENCE = (1, 8, 64)
"""What the short times of a victim are multiplied by, one after the other, until it has met its
attack: on a busy machine they may be over before."""


class HangError(BaseException):
    """A deadline is over. No ``Exception``, so that nothing takes it for a failure of its own."""


@contextlib.contextmanager
def deadline(seconds: float = HANG) -> Iterator[None]:
    """Raise :class:`HangError` in the main thread when the block is not through by then."""

    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise HangError(f"not through after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def read(url: str, kind: str = "nats_kv", **options: Any) -> list[Row]:
    """All rows that there are now: one micro-batch, in the order of its splits.

    Args:
        kind: the format.
        options: of the source, beside ``servers``; times are long unless given.
    """
    given = {"servers": url, "connectTimeout": "60", "requestTimeout": "60", **options}
    text = {name: str(value) for name, value in given.items()}
    parse = kv_options if kind == "nats_kv" else stream_options
    query = query_of(parse(text, Mode.STREAMING))
    runner = Runner(query.connection)
    planner = Planner(query, runner.link)
    rows: list[Row] = []

    def ask(question: Callable[[], Awaitable[Any]]) -> Any:
        return runner.run(patiently(question, query.connection.connect_timeout))

    try:
        with deadline():
            start = ask(planner.initial)
            end = ask(lambda: planner.latest(start, None))
            for plan in ask(lambda: planner.plans(start, end)):
                for batch in read_split(plan, query):
                    rows += batch.to_pylist()
    finally:
        runner.close()
        drop_kept_runners()
    return rows


class Peak:
    """How far this process's memory grew over what it was, in bytes."""

    def __init__(self) -> None:
        self._before = resident()
        self.grown = 0

    def look(self) -> None:
        self.grown = max(self.grown, resident() - self._before)


def resident() -> int:
    """Bytes of memory that this process has in use (``VmRSS``)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmRSS")


@contextlib.contextmanager
def peak() -> Iterator[Peak]:
    """Watch this process's memory, every few milliseconds."""
    found, over = Peak(), threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            found.look()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
        found.look()
