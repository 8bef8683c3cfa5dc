"""One event loop and one kept connection for code that Spark calls synchronously.

The loop runs only inside :meth:`Runner.run` and :meth:`Runner.iterate`, in the caller's own thread:
no hand-over between threads, and while Spark does other things, nothing of ours runs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar

from nats_stream_source.errors import NatsSourceError
from nats_stream_source.jetstream.connection import ConnectionSettings
from nats_stream_source.jetstream.link import Link
from nats_stream_source.jetstream.patience import patiently
from nats_stream_source.jetstream.within import ended
from nats_stream_source.logs import field_logger

T = TypeVar("T")

log = field_logger(__name__)

_CLOSE_DEADLINE = 10.0  # seconds for tasks that are cancelled


class Runner:
    """An event loop with a :class:`Link`."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self.link = Link(settings)
        self._loop = asyncio.new_event_loop()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` to its end and return its result; an interrupt cancels it first."""
        task = self._loop.create_task(work)
        try:
            return self._loop.run_until_complete(task)
        finally:
            if not task.done():
                # A task that is left half-way would go on at the next use of the loop.
                # Cancelled once: a second time would end what is done to its end all the same.
                task.cancel()
                self._loop.run_until_complete(asyncio.gather(task, return_exceptions=True))

    def patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run ``work``, and again while the server is away, for at most ``connectTimeout``."""
        return self.run(patiently(work, self.link.settings.connect_timeout))

    def plan(self, work: Callable[[], Awaitable[T]]) -> T:
        """:meth:`patiently`, for a planner; its named errors lose their traceback."""
        try:
            return self.patiently(work)
        except NatsSourceError as error:
            # Spark shows the user the whole traceback, and a named error's text stands alone.
            log.debug("the planner failed", exc_info=True)
            raise error.with_traceback(None) from None

    def iterate(self, items: AsyncIterator[T]) -> Generator[T, None, None]:
        """Yield what ``items`` yields; closing this generator closes it."""
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
            self.run(self.link.drop())
            if left := asyncio.all_tasks(self._loop):
                self.run(ended(left, _CLOSE_DEADLINE))
            self.run(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


async def _next(items: AsyncIterator[T]) -> T:
    return await items.__anext__()


_kept: dict[tuple[int, ConnectionSettings], Runner] = {}


def kept_runner(settings: ConnectionSettings) -> Runner:
    """This process's runner for ``settings``: Spark uses a Python worker for many tasks.

    The process id is part of the key, since a forked process must not share its parent's socket.
    """
    key = (os.getpid(), settings)
    if key not in _kept:
        _kept[key] = Runner(settings)
    return _kept[key]


def drop_kept_runners() -> None:
    """Close all runners that this process keeps."""
    for key in list(_kept):
        runner = _kept.pop(key)
        if key[0] == os.getpid():
            runner.close()
