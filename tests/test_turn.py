"""Turns with a deadline, and what is finished though its caller was cancelled."""

from __future__ import annotations

import asyncio

import pytest

from nats_stream_source.jetstream.finishing import finish
from nats_stream_source.jetstream.turn import Turn


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_turns_go_round_in_order() -> None:
    async def work() -> None:
        turn, order = Turn(), list[int]()

        async def one(number: int) -> None:
            for _ in range(2):
                assert await turn.take(None)
                order.append(number)
                await asyncio.sleep(0)
                turn.give()

        await asyncio.gather(*(one(number) for number in range(3)))
        assert order == [0, 1, 2, 0, 1, 2]
        assert repr(turn) == "<Turn free waiting=0>"

    asyncio.run(work())


def test_who_waits_in_vain_leaves_nothing() -> None:
    async def work() -> None:
        turn = Turn()
        assert await turn.take(0)
        assert not await turn.take(0)
        assert not await turn.take(0.01)
        assert repr(turn) == "<Turn taken waiting=0>"
        turn.give()
        assert await turn.take(0)

    asyncio.run(work())


@pytest.mark.parametrize("given_first", [False, True])
def test_a_cancelled_waiter_does_not_keep_the_turn(given_first: bool) -> None:
    async def work() -> None:
        turn = Turn()
        await turn.take(None)
        cancelled = asyncio.create_task(turn.take(None))
        next_one = asyncio.create_task(turn.take(None))
        await turns()
        if given_first:
            turn.give()
        cancelled.cancel()
        await asyncio.wait({cancelled})
        assert cancelled.cancelled()
        if not given_first:
            turn.give()
        assert await asyncio.wait_for(next_one, 60)
        turn.give()
        assert await turn.take(0)

    asyncio.run(work())


def test_work_is_finished_though_its_caller_is_cancelled() -> None:
    async def work() -> None:
        go_on, done = asyncio.Event(), list[str]()

        async def slow() -> None:
            await go_on.wait()
            done.append("done")

        caller = asyncio.create_task(finish(slow()))
        await turns()
        caller.cancel()
        await turns()
        assert not caller.done()
        go_on.set()
        await asyncio.wait({caller})
        assert caller.cancelled()
        assert done == ["done"]

    asyncio.run(work())


def test_a_failure_is_the_callers_unless_it_was_cancelled() -> None:
    async def work() -> None:
        async def fails() -> None:
            await asyncio.sleep(0)
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await finish(fails())
        caller = asyncio.create_task(finish(fails()))
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.wait({caller})
        assert caller.cancelled()

    asyncio.run(work())


def test_cancelled_twice_the_caller_goes_at_once() -> None:
    async def work() -> None:
        go_on, done = asyncio.Event(), asyncio.Event()

        async def slow() -> None:
            await go_on.wait()
            done.set()

        caller = asyncio.create_task(finish(slow()))
        for _ in range(2):
            await turns()
            caller.cancel()
        await asyncio.wait({caller})
        assert not done.is_set()
        go_on.set()
        await asyncio.wait_for(done.wait(), 60)

    asyncio.run(work())
