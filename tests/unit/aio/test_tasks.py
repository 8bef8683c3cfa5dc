"""Generators of several readers, deadlines, and work that outlasts the cancelled caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from nats_stream_source.aio.tasks import (
    Pump,
    cancel_and_wait,
    run_to_completion,
    wait_cancellable,
)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Numbers:
    """A pump of 0, 1, 2, each after :meth:`go`, and a failure after them."""

    def __init__(self) -> None:
        self.found: list[int] = []
        self._go = asyncio.Event()
        self.pump = Pump(self._numbers(), self.found.append)

    async def _numbers(self) -> AsyncGenerator[int, None]:
        for number in range(3):
            await self._go.wait()
            self._go.clear()
            yield number
        raise ValueError("no")

    def go(self) -> None:
        self._go.set()


async def test_pump_item_outlasts_callers() -> None:
    numbers = Numbers()
    assert not await numbers.pump.advance(0.01)
    cancelled = asyncio.create_task(numbers.pump.advance())
    await turns()
    cancelled.cancel()
    await asyncio.wait({cancelled})
    numbers.go()
    assert await asyncio.gather(*(numbers.pump.advance() for _ in range(2))) == [True, True]
    assert numbers.found == [0]


async def test_pump_failure_is_that_of_later_calls() -> None:
    numbers = Numbers()
    for _ in range(3):
        numbers.go()
        assert await numbers.pump.advance()
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            await numbers.pump.advance()


async def test_pump_closed_ends_waiting_calls() -> None:
    numbers = Numbers()
    waiting = asyncio.create_task(numbers.pump.advance())
    await turns()
    await numbers.pump.close()
    for ended in (waiting, numbers.pump.advance()):
        with pytest.raises(StopAsyncIteration):
            await ended


async def test_work_is_finished_though_its_caller_is_cancelled() -> None:
    resume, done = asyncio.Event(), list[str]()

    async def slow() -> None:
        await resume.wait()
        done.append("done")

    caller = asyncio.create_task(run_to_completion(slow()))
    await turns()
    caller.cancel()
    await turns()
    assert not caller.done()
    resume.set()
    await asyncio.wait({caller})
    assert caller.cancelled()
    assert done == ["done"]


async def test_failure_is_raised_unless_cancelled() -> None:
    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await run_to_completion(fails())
    caller = asyncio.create_task(run_to_completion(fails()))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait({caller})
    assert caller.cancelled()


async def test_caller_cancelled_twice_returns_at_once() -> None:
    resume, done = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        await resume.wait()
        done.set()

    caller = asyncio.create_task(run_to_completion(slow()))
    for _ in range(2):
        await turns()
        caller.cancel()
    await asyncio.wait({caller})
    assert not done.is_set()
    resume.set()
    await asyncio.wait_for(done.wait(), 60)


# -- deadlines and cancellation -------------------------------------------------------------------


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
