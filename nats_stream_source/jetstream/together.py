"""Many requests at once, and none of them left running when one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

MOST = 256
"""Requests under way at once where there is one for each key."""


async def together(
    work: Callable[[T], Awaitable[R]], items: Sequence[T], most: int = MOST
) -> list[R]:
    """``work`` for each item, at most ``most`` at once; the results in the items' order.

    The first failure is raised, and so is a cancellation, once all others have ended: what goes on
    after its caller was told that it failed would surprise (a purge!).
    """
    results: dict[int, R] = {}
    numbered = iter(enumerate(items))

    async def worker() -> None:
        for index, item in numbered:
            results[index] = await work(item)

    workers = [asyncio.ensure_future(worker()) for _ in range(min(most, len(items)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for one in workers:
            one.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [results[index] for index in range(len(items))]
