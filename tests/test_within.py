"""Waiting for a while: what is cancelled stays cancelled."""

from __future__ import annotations

import asyncio

import pytest

from nats_stream_source.jetstream.within import ended, within


async def answer() -> int:
    await asyncio.sleep(0)
    return 5


def test_an_answer_and_an_error() -> None:
    async def fail() -> int:
        await asyncio.sleep(0)
        raise OSError("gone")

    assert asyncio.run(within(20, answer())) == 5
    assert asyncio.run(within(None, answer())) == 5
    with pytest.raises(OSError, match="gone"):
        asyncio.run(within(20, fail()))


def test_what_is_late_is_cancelled() -> None:
    ended = False

    async def late() -> None:
        nonlocal ended
        try:
            await asyncio.sleep(20)
        finally:
            ended = True

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(within(0.01, late()))
    assert ended


@pytest.mark.parametrize("turns", range(8))
def test_a_cancellation_beside_the_answer(turns: int) -> None:
    """Whoever comes first: the caller is not told an answer after it was cancelled."""

    async def work() -> tuple[bool, bool]:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def ask() -> int:
            return await asyncio.wait_for(future, 60)

        went_on = False

        async def caller() -> None:
            nonlocal went_on
            await within(None, ask())
            went_on = True

        task = asyncio.ensure_future(caller())
        await asyncio.sleep(0.01)
        future.set_result(5)
        for _ in range(turns):
            await asyncio.sleep(0)
        in_time = not task.done()
        task.cancel()
        await asyncio.wait({task})
        return in_time, went_on

    in_time, went_on = asyncio.run(work())
    assert went_on is not in_time


def test_cancelled_with_its_caller() -> None:
    async def work() -> bool:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def ask() -> None:
            begun.set()
            try:
                await asyncio.sleep(20)
            finally:
                ended.set()

        task = asyncio.ensure_future(within(None, ask()))
        await begun.wait()
        task.cancel()
        await asyncio.wait({task})
        return task.cancelled() and ended.is_set()

    assert asyncio.run(work())


def test_what_forgets_a_cancellation_is_cancelled_again() -> None:
    async def work() -> int:
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
        await ended({task}, 20)
        assert task.done()
        await ended(set(), 20)
        return cancelled

    assert asyncio.run(work()) == 3
