"""The event loop that runs only while Spark calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from nats_stream_source.connection.connection import ConnectionSettings
from nats_stream_source.embedded import NatsServer
from nats_stream_source.spark.runner import Runner, cached_runner, close_cached_runners

NOWHERE = ConnectionSettings(servers=("nats://127.0.0.1:1",))


def interrupt() -> None:
    raise KeyboardInterrupt


def test_interrupt_ends_task_first() -> None:
    """A task that was left unfinished would continue at the next use of the loop."""
    runner = Runner(NOWHERE)
    seen: list[str] = []

    async def work() -> None:
        asyncio.get_running_loop().call_soon(interrupt)
        try:
            await asyncio.sleep(60)
            seen.append("slept")
        finally:
            await asyncio.sleep(0)
            seen.append("cleaned up")

    async def next_work() -> str:
        return "next"

    with pytest.raises(KeyboardInterrupt):
        runner.run(work())
    assert seen == ["cleaned up"]
    assert runner.run(next_work()) == "next"
    runner.close()


def test_iterate_closes_what_it_iterates() -> None:
    runner = Runner(NOWHERE)
    seen: list[str] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            for number in range(10):
                yield number
        finally:
            await asyncio.sleep(0)
            seen.append("closed")

    items = runner.iterate(numbers())
    assert [next(items), next(items)] == [0, 1]
    items.close()
    assert seen == ["closed"]
    assert list(runner.iterate(numbers())) == list(range(10))
    runner.close()
    runner.close()  # again is nothing


def test_runner_is_kept_for_each_setting(shared_server: NatsServer) -> None:
    here = ConnectionSettings(servers=(shared_server.url,))
    runner = cached_runner(here)
    assert cached_runner(here) is runner
    assert cached_runner(NOWHERE) is not runner
    first = runner.run(runner.connection.connection())
    assert runner.run(runner.connection.connection()) is first
    close_cached_runners()
    assert first.client.is_closed
    assert cached_runner(here) is not runner
    close_cached_runners()
