"""An event loop and a reusable connection for code that Spark calls synchronously.

The loop runs only inside :meth:`Runner.run` and :meth:`Runner.iterate`, in the caller's thread: no
data crosses threads, and no coroutine runs while Spark does other work.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar

from nats_stream_source.aio.tasks import cancel_and_wait
from nats_stream_source.connection.connection import ConnectionSettings
from nats_stream_source.errors import NatsSourceError
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.logs import field_logger
from nats_stream_source.options import CONNECTION, KV, STREAM
from nats_stream_source.options.table import option_hints

T = TypeVar("T")

log = field_logger(__name__)

_OPTIONS = CONNECTION + KV + STREAM
_CLOSE_DEADLINE = 10.0  # seconds, for cancelled tasks


class Runner:
    """An event loop with a :class:`ReusableConnection`."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self.connection = ReusableConnection(settings)
        self._loop = asyncio.new_event_loop()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` to completion and return its result; an interrupt cancels it."""
        task = self._loop.create_task(work)
        try:
            # Errors of the connection and of JetStream name settings; Spark users set options.
            with option_hints(_OPTIONS):
                return self._loop.run_until_complete(task)
        finally:
            if not task.done():
                # A pending task would continue at the next use of the loop. Cancel only once: a
                # second cancellation would interrupt the cleanup of the first.
                task.cancel()
                self._loop.run_until_complete(asyncio.gather(task, return_exceptions=True))

    def retry_transient(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run ``work``; retry while the server is unavailable.

        For at most ``connectTimeout``, or ``outageTimeout`` after
        :meth:`ReusableConnection.wait_for_outages`.
        """
        return self.run(self.connection.retry_transient(work))

    def connect(self, outage_timeout: float, *, running: bool = False) -> None:
        """Connect, and wait for unavailable servers for at most ``outageTimeout`` from then on.

        Until this process has been connected, ``connectTimeout`` applies instead.

        Args:
            running: whether another process of the query has been connected.
        """
        waits = running or self.connection.was_connected
        self.connection.wait_for_outages(outage_timeout if waits else 0.0)
        if not waits:
            self.retry_transient(self.connection.connection)
            self.connection.wait_for_outages(outage_timeout)

    def plan(self, work: Callable[[], Awaitable[T]]) -> T:
        """:meth:`retry_transient` for a planner; removes the traceback from named errors."""
        try:
            return self.retry_transient(work)
        except NatsSourceError as error:
            # Spark shows the whole traceback to the user; the text of a named error is sufficient.
            log.debug("planner failed", exc_info=True)
            raise error.with_traceback(None) from None

    def iterate(self, items: AsyncIterator[T]) -> Generator[T, None, None]:
        """Yield the elements of ``items``; closing this generator closes ``items``."""
        try:
            while True:
                try:
                    yield self.run(_next(items))
                except StopAsyncIteration:
                    return
        finally:
            if (close := getattr(items, "aclose", None)) is not None:
                self.run(close())

    def close(self) -> None:
        """Close the connection and the loop."""
        if self._loop.is_closed():
            return
        try:
            self.run(self.connection.drop())
            if pending := asyncio.all_tasks(self._loop):
                self.run(cancel_and_wait(pending, _CLOSE_DEADLINE))
            self.run(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


async def _next(items: AsyncIterator[T]) -> T:
    return await items.__anext__()


_cached: dict[tuple[int, int, ConnectionSettings], Runner] = {}


def cached_runner(settings: ConnectionSettings) -> Runner:
    """The runner of this thread for ``settings``: Spark runs many tasks in a Python worker.

    The process id is part of the key, since a forked process must not share its parent's socket.
    """
    key = (os.getpid(), threading.get_ident(), settings)
    if key not in _cached:
        _cached[key] = Runner(settings)
    return _cached[key]


def close_cached_runners(thread: int | None = None) -> None:
    """Close the cached runners of this process, or of one of its threads."""
    for key in list(_cached):
        if thread in (None, key[1]):
            runner = _cached.pop(key)
            if key[0] == os.getpid():
                runner.close()
