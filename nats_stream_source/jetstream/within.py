"""Waiting for an answer for a while, and never forgetting that one was cancelled meanwhile.

Up to Python 3.11 ``asyncio.wait_for`` drops a cancellation that comes in the same turn of the loop
as what it waits for, and nats-py connects and asks by it. A task that asks something again and
again would then survive its ``cancel()``, and whoever waits for its end would wait for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_AGAIN = 0.1  # seconds after which a task is cancelled once more


async def within(seconds: float | None, work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
    """What ``work`` returns or raises; it is cancelled with the caller, and after ``seconds``.

    Raises:
        asyncio.TimeoutError: it had not ended then. None waits as long as it takes.
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


async def ended(tasks: set[asyncio.Task[Any]], seconds: float) -> None:
    """Cancel ``tasks``, again and again where they forget it, until all have ended.

    What they return or raise is dropped; after ``seconds`` they are left to themselves.
    """
    clock = asyncio.get_running_loop().time
    end = clock() + seconds
    while tasks and clock() < end:
        for task in tasks:
            task.cancel()
        done, tasks = await asyncio.wait(tasks, timeout=_AGAIN)
        for task in done:
            if not task.cancelled():
                task.exception()  # or asyncio complains that nobody has looked
