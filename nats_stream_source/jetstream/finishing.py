"""What is done to its end though its caller is cancelled: consumers made and deleted, closing.

A deletion that is cancelled before it was sent is none, and the consumer stays. A creation that
nobody waits for may come after the deletion. A connection that is half closed keeps its tasks and
its socket. That matters most where cancelling is common: ``asyncio.wait_for`` around the beginning
or the leaving of a subscription.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from nats_stream_source.logs import field_logger

T = TypeVar("T")

log = field_logger(__name__)


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end, and only then let a cancellation go on.

    ``work`` must end by itself, as a request does. Cancelled a second time, the caller goes at
    once, and ``work`` ends alone.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            task.add_done_callback(_looked_at)
            await asyncio.wait({task})
        raise


def _looked_at(task: asyncio.Future[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.debug("after a cancellation", error=error)
