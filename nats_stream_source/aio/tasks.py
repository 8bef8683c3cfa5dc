"""Tasks and cancellation: bounded concurrency, deadlines that keep a cancellation, cleanup.

- :func:`gather_limited` runs one request per item, a limited number at a time, and leaves no task
  running when one fails.
- :func:`wait_cancellable` waits with a deadline. Up to Python 3.11 ``asyncio.wait_for`` returns a
  result, and drops the cancellation, when both arrive in the same iteration of the event loop.
  nats-py connects and sends requests through ``wait_for``. A task that repeats such a request
  would survive its ``cancel()``, and code that waits for its end would wait forever.
- :func:`run_to_completion` completes an operation although its caller is cancelled: creating and
  deleting consumers, closing connections. If the cancellation arrives before a deletion is sent,
  the consumer remains. A creation that no task waits for can arrive after the deletion. A
  connection that is half closed keeps its tasks and its socket. Cancellation is common where a
  program wraps the creation or the end of a subscription in ``asyncio.wait_for``.
- :func:`cancel_and_wait` cancels tasks until they have ended.
- :class:`Pump` reads an async generator for callers that may be cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from nats_stream_source.logs import field_logger

T = TypeVar("T")
R = TypeVar("R")

MAX_CONCURRENT = 256
"""Concurrent requests where each key needs one request."""

_CANCEL_INTERVAL = 0.1  # seconds until a task that is still running is cancelled again

log = field_logger(__name__)


async def gather_limited(
    work: Callable[[T], Awaitable[R]], items: Sequence[T], limit: int = MAX_CONCURRENT
) -> list[R]:
    """Call ``work`` for each item, at most ``limit`` at a time; return the results in item order.

    The first failure, or a cancellation, is raised after all other calls have ended: a request,
    such as a purge, must not be sent after the caller has received the failure.
    """
    results: dict[int, R] = {}
    numbered = iter(enumerate(items))

    async def worker() -> None:
        for index, item in numbered:
            results[index] = await work(item)

    workers = [asyncio.ensure_future(worker()) for _ in range(min(limit, len(items)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [results[index] for index in range(len(items))]


async def wait_cancellable(
    seconds: float | None, work: Coroutine[Any, Any, T] | asyncio.Future[T]
) -> T:
    """Return the result of ``work``, or raise its exception, within ``seconds``.

    ``work`` is cancelled together with the caller and after ``seconds``. ``asyncio.timeout`` and
    ``async-timeout`` do not replace this function: they run ``work`` in the caller's own task,
    where a ``wait_for`` of Python 3.10 or 3.11 inside ``work`` drops the cancellation of the caller
    (see ``test_cancellation_beside_response``). Here ``work`` has a task of its own.

    Args:
        seconds: the deadline; None waits without one.

    Raises:
        asyncio.TimeoutError: ``work`` has not ended within ``seconds``.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def run_to_completion(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end, and raise a cancellation of the caller only after that.

    ``work`` must end by itself, as a request does. A second cancellation of the caller takes effect
    immediately, and ``work`` continues without a caller.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            task.add_done_callback(_log_failure)
            await asyncio.wait({task})
        raise


def _log_failure(task: asyncio.Future[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.debug("failed after its caller was cancelled", error=error)


async def cancel_and_wait(tasks: set[asyncio.Task[Any]], seconds: float) -> None:
    """Cancel ``tasks``, repeatedly where a task drops the cancellation, until all have ended.

    Results and exceptions of the tasks are dropped. Tasks that still run after ``seconds`` are left
    running.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + seconds
    while tasks and clock() < deadline:
        for task in tasks:
            task.cancel()
        done, tasks = await asyncio.wait(tasks, timeout=_CANCEL_INTERVAL)
        for task in done:
            if not task.cancelled():
                task.exception()  # or asyncio logs an exception that was never retrieved


class Pump(Generic[T]):
    """Passes the items of an async generator to ``deliver``, for one or several waiting tasks.

    Cancelling a generator while it runs ends it. So each item is awaited in a task of its own,
    which outlasts a caller of :meth:`advance` that is cancelled or timed out.
    """

    def __init__(self, source: AsyncGenerator[T, None], deliver: Callable[[T], None]) -> None:
        self._source = source
        self._deliver = deliver
        self._task: asyncio.Task[None] | None = None

    async def advance(self, timeout: float | None = None) -> bool:
        """Wait until the next item was delivered; False if that takes ``timeout`` seconds.

        Raises:
            StopAsyncIteration: the generator has ended, or :meth:`close` was called.
            Exception: that of the generator, in this call and all later ones.
        """
        if (task := self._task) is None:
            task = self._task = asyncio.create_task(self._next())
            # Without this, asyncio logs "exception was never retrieved" after the last call.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait({task}, timeout=timeout)
        if task.cancelled():
            raise StopAsyncIteration
        if task.done():
            task.result()
            if self._task is task:
                self._task = None
        return task.done()

    async def _next(self) -> None:
        self._deliver(await anext(self._source))

    async def close(self) -> None:
        """End the generator, and the calls of :meth:`advance`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._source.aclose()
