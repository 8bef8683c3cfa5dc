"""Waiting for a while: what is cancelled stays cancelled."""

from __future__ import annotations

import asyncio

import pytest

from nats_stream_source.aio.tasks import cancel_and_wait, wait_cancellable


async def answer() -> int:
    await asyncio.sleep(0)
    return 5


async def test_response_and_error() -> None:
    async def fail() -> int:
        await asyncio.sleep(0)
        raise OSError("gone")

    assert await wait_cancellable(20, answer()) == 5
    assert await wait_cancellable(None, answer()) == 5
    with pytest.raises(OSError, match="gone"):
        await wait_cancellable(20, fail())


async def test_late_task_is_cancelled() -> None:
    has_ended = False

    async def late() -> None:
        nonlocal has_ended
        try:
            await asyncio.sleep(20)
        finally:
            has_ended = True

    with pytest.raises(asyncio.TimeoutError):
        await wait_cancellable(0.01, late())
    assert has_ended


@pytest.mark.parametrize("turns", range(8))
async def test_cancellation_beside_response(turns: int) -> None:
    """In either order: the caller does not receive a response after it was cancelled."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def ask() -> int:
        return await asyncio.wait_for(future, 60)

    went_on = False

    async def caller() -> None:
        nonlocal went_on
        await wait_cancellable(None, ask())
        went_on = True

    task = asyncio.ensure_future(caller())
    await asyncio.sleep(0.01)
    future.set_result(5)
    for _ in range(turns):
        await asyncio.sleep(0)
    in_time = not task.done()
    task.cancel()
    await asyncio.wait({task})
    assert went_on is not in_time


async def test_coroutine_cancelled_with_its_caller() -> None:
    begun, has_ended = asyncio.Event(), asyncio.Event()

    async def ask() -> None:
        begun.set()
        try:
            await asyncio.sleep(20)
        finally:
            has_ended.set()

    task = asyncio.ensure_future(wait_cancellable(None, ask()))
    await begun.wait()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert has_ended.is_set()


async def test_cancellation_ignored_is_repeated() -> None:
    cancelled = 0

    async def stubborn() -> None:
        nonlocal cancelled
        while cancelled < 3:
            try:
                await asyncio.sleep(20)
            except asyncio.CancelledError:
                cancelled += 1
        raise OSError("nobody takes it")

    task = asyncio.ensure_future(stubborn())
    await asyncio.sleep(0)
    await cancel_and_wait({task}, 20)
    assert task.done()
    await cancel_and_wait(set(), 20)
    assert cancelled == 3
