"""What is attacked, without Spark and in one thread.

:func:`read` is a query as Spark runs it: options, offsets, splits, rows. :data:`ATTACK_TARGETS` are
the ways to read a bucket: the ordered reader by itself, each format as a stream, and a batch read.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import psutil
import pytest

from nats_stream_source.connection.connection import ConnectionSettings
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import NatsSourceError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import RangeRequest
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.rows import base
from nats_stream_source.spark.runner import close_cached_runners
from nats_stream_source.wire.columns import payloads
from tests.support.nats.buckets import create_bucket, put_many
from tests.support.proxy.fault_proxy import Proxy, Verdict
from tests.support.query_driver.batch import read_batch
from tests.support.query_driver.driver import new_query

Row = dict[str, Any]


@contextlib.contextmanager
def attacked(server: NatsServer, bucket: str, rows: int) -> Iterator[Proxy]:
    """A proxy to a new bucket that keeps two revisions a key; the keys' values count up from 0."""
    create_bucket(server.url, bucket, history=2)
    put_many(server.url, bucket, ((f"k{i}", b"%d" % i) for i in range(rows)))
    with Proxy(server.port, keep=0) as proxy:
        yield proxy


Pair = tuple[int, bytes]
"""A row's sequence and its value, whatever a format calls them."""

HANG = 600.0
"""Seconds after which a block hangs; a busy machine, or one that watches each allocation, is slow
by a factor that must not matter."""

PATIENCE = (1, 8, 64)
"""What the short times of a target are multiplied by, one after the other, until it has met its
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
    """Return all rows of one micro-batch, in the order of its splits."""
    given = {"connectTimeout": 60, "requestTimeout": 60, **options}
    with new_query(url, **given) as query, deadline():
        return query.read().records if query.plan() else []


def _short(patience: float) -> dict[str, Any]:
    """Of a consumer that is given up soon."""
    return {"heartbeat": 0.1 * patience, "attempts": 2, "catch_up_timeout": 1.0 * patience}


def _times(patience: float | None) -> float:
    return 60.0 if patience is None else 1.0 * patience


def _by_ordered_reader(url: str, bucket: str, patience: float | None) -> list[Pair]:
    seconds = _times(patience)
    settings = ConnectionSettings((url,), connect_timeout=seconds, request_timeout=seconds)

    async def work() -> list[Pair]:
        link = ReusableConnection(settings)
        try:
            stream = await JetStream(await link.connection()).stream_info(f"KV_{bucket}")
            more = {} if patience is None else _short(patience)
            request = RangeRequest(
                stream.name, KnownStream(stream.created), 0, stream.last_seq, **more
            )
            found: list[Pair] = []
            async for frames in OrderedReader(link, request).batches():
                numbers = frames.stream_seq.tolist()
                found += zip(numbers, payloads(frames).to_pylist(), strict=True)
            return found
        finally:
            await link.drop()

    with deadline():
        return asyncio.run(work())


def _by_format(
    rows: Callable[..., list[Row]], url: str, bucket: str, patience: float | None, **options: Any
) -> list[Pair]:
    """Options as of both formats; those that name what is read are left to ``rows``."""
    seconds = _times(patience)
    options = {"connectTimeout": seconds, "requestTimeout": seconds, **options}
    with pytest.MonkeyPatch.context() as patch:
        if patience is not None:
            short_deadlines = partial(RangeRequest, **_short(patience))
            patch.setattr(base, "RangeRequest", short_deadlines)
        found = rows(url, bucket, **options)
    names = ("revision", "value") if found and "revision" in found[0] else ("sequence", "data")
    return [(row[names[0]], row[names[1]]) for row in found]


def _kv(url: str, bucket: str, **options: Any) -> list[Row]:
    if "startSequence" not in options:
        options["includeHistory"] = True
    return read(url, bucket=bucket, **options)


def _current(url: str, bucket: str, **options: Any) -> list[Row]:
    """The initial values of a query: the last value of each key."""
    return read(url, bucket=bucket, **options)


def _stream(url: str, bucket: str, **options: Any) -> list[Row]:
    return read(url, stream=f"KV_{bucket}", **options)


def _batch(url: str, bucket: str, **options: Any) -> list[Row]:
    """The bucket as it is now."""
    try:
        with deadline():
            return read_batch(url, bucket=bucket, **options)
    finally:
        close_cached_runners()


FORMATS: dict[str, Callable[..., list[Pair]]] = {
    "nats_kv": partial(_by_format, _kv),
    "kv current": partial(_by_format, _current),
    "nats_stream": partial(_by_format, _stream),
    "batch": partial(_by_format, _batch),
}
"""From the server, the bucket, patience (None: all the time there is) and options to the rows."""

ATTACK_TARGETS = {"ordered reader": _by_ordered_reader, **FORMATS}


def run_attack(
    proxy: Proxy, target: str, bucket: str, verdict: Verdict, injected: Callable[[], int]
) -> list[Pair] | str:
    """What becomes of a target that reads meanwhile: its rows, or the name of its error.

    It gives up sooner than one in Spark does.

    Args:
        injected: how often ``verdict`` has done fault; what fails without any is done again.
    """
    for patience in PATIENCE:
        proxy.verdict = verdict
        try:
            return ATTACK_TARGETS[target](proxy.url, bucket, patience)
        except NatsSourceError as error:
            if injected():
                return type(error).__name__
        finally:
            proxy.verdict = lambda frame: True
    raise RuntimeError("it fails without fault")


class Peak:
    """How far this process's memory grew over what it was, in bytes."""

    def __init__(self) -> None:
        self._before = resident()
        self.grown = 0

    def look(self) -> None:
        self.grown = max(self.grown, resident() - self._before)


def resident() -> int:
    """Bytes of memory that this process has in use."""
    return int(psutil.Process().memory_info().rss)


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
