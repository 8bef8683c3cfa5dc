"""TimedLock, and work that is completed although its caller is cancelled."""

from __future__ import annotations

import asyncio
import time

import pytest

from nats_stream_source.aio.tasks import TimedLock, run_to_completion


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_turns_go_round_in_order() -> None:
    lock, order = TimedLock(), list[int]()

    async def one(number: int) -> None:
        for _ in range(2):
            assert await lock.acquire(None)
            order.append(number)
            await asyncio.sleep(0)
            lock.release()

    await asyncio.gather(*(one(number) for number in range(3)))
    assert order == [0, 1, 2, 0, 1, 2]
    assert not lock.locked()


async def test_waiter_timed_out_leaves_nothing() -> None:
    lock = TimedLock()
    assert await lock.acquire(0)
    assert not await lock.acquire(0)
    assert not await lock.acquire(0.01)
    lock.release()
    assert await lock.acquire(0)


@pytest.mark.parametrize("released_first", [False, True])
async def test_waiter_cancelled_does_not_keep_turn(released_first: bool) -> None:
    lock = TimedLock()
    await lock.acquire(None)
    cancelled = asyncio.create_task(lock.acquire(None))
    next_waiter = asyncio.create_task(lock.acquire(None))
    await turns()
    if released_first:
        lock.release()
    cancelled.cancel()
    await asyncio.wait({cancelled})
    assert cancelled.cancelled()
    if not released_first:
        lock.release()
    assert await asyncio.wait_for(next_waiter, 60)
    lock.release()
    assert await lock.acquire(0)


@pytest.mark.parametrize("iterations", range(5))
async def test_cancellation_beside_deadline(iterations: int) -> None:
    """The cancellation arrives in the iterations of the event loop around the deadline."""
    lock = TimedLock()
    assert await lock.acquire(None)
    went_on = False

    async def caller() -> None:
        nonlocal went_on
        assert not await lock.acquire(0.005)
        went_on = True

    task = asyncio.create_task(caller())
    await asyncio.sleep(0)
    time.sleep(0.02)  # noqa: ASYNC251 - the event loop stands until after the deadline
    await turns(iterations)
    in_time = not task.done()
    task.cancel()
    await asyncio.wait({task})
    assert went_on is not in_time


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
