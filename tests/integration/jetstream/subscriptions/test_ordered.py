"""Ordered subscriptions: where they start, and how they recover from a lost consumer."""

from __future__ import annotations

import asyncio

import pytest

from nats_stream_source.errors import DataLossError, NextTimeoutError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.subscriptions.subscribe import ConsumerConfig, subscribe_ordered
from tests.support.nats.backup import back_up
from tests.support.nats.buckets import api
from tests.support.nats.limits import CONSUMER_LIMITS
from tests.support.nats.subscriptions import connected, consumers_of, fill, make_stream, sequences
from tests.support.wait import wait_until_async

pytestmark = pytest.mark.servers


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ConsumerConfig(), list(range(1, 31))),
        (ConsumerConfig(deliver_policy="by_start_sequence", opt_start_seq=21), list(range(21, 31))),
        (ConsumerConfig(deliver_policy="last"), [30]),
        (ConsumerConfig(deliver_policy="last_per_subject"), list(range(21, 31))),
        (ConsumerConfig(deliver_policy="new"), []),
        (
            ConsumerConfig(deliver_policy="by_start_time", opt_start_time="2000-01-01T00:00:00Z"),
            list(range(1, 31)),
        ),
    ],
)
async def test_ordered_subscription_start_positions(
    url: str, jetstream: JetStream, config: ConsumerConfig, expected: list[int]
) -> None:
    stream = make_stream(url, 30)

    async with await subscribe_ordered(jetstream, f"{stream}.>", config=config) as subscription:
        found = await sequences(subscription, len(expected))
        with pytest.raises(NextTimeoutError):
            await subscription.next(0.05)
        await asyncio.to_thread(fill, url, stream, 2)
        assert found + await sequences(subscription, 2) == [*expected, 31, 32]
    assert consumers_of(url, stream) == []


async def test_ordered_subscription_start_time(url: str, jetstream: JetStream) -> None:
    stream = make_stream(url, 5)

    third = await jetstream.message(stream, seq=3)
    assert third is not None
    config = ConsumerConfig(deliver_policy="by_start_time", opt_start_time=third.time)
    async with await subscribe_ordered(jetstream, stream=stream, config=config) as found:
        assert await sequences(found, 3) == [3, 4, 5]


async def test_ordered_subscription_survives_lost_consumer(url: str, jetstream: JetStream) -> None:
    stream = make_stream(url, 10)

    config = ConsumerConfig(idle_heartbeat=0.1)
    async with await subscribe_ordered(jetstream, stream=stream, config=config) as subscription:
        before = await sequences(subscription, 10)
        (name,) = consumers_of(url, stream)
        api(url, f"CONSUMER.DELETE.{stream}.{name}")
        await asyncio.to_thread(fill, url, stream, 10)
        assert before + await sequences(subscription, 10) == list(range(1, 21))
        assert subscription.reader.cursor.rebuilds


@pytest.mark.parametrize("count", [0, 5])
async def test_ordered_subscription_is_complete_after_initial_values(url: str, count: int) -> None:
    """A new consumer does not skip what is not the last of its subject any more."""
    stream = make_stream(url, count)

    async with connected(url) as jetstream:
        config = ConsumerConfig(deliver_policy="last_per_subject", idle_heartbeat=0.1)
        async with await subscribe_ordered(jetstream, stream=stream, config=config) as subscription:
            waiting = asyncio.create_task(sequences(subscription, count + 1))
            await wait_until_async(lambda: bool(consumers_of(url, stream)), "a consumer")
            await asyncio.to_thread(fill, url, stream, 1)
            assert await waiting == list(range(1, count + 2))
            (name,) = consumers_of(url, stream)
            api(url, f"CONSUMER.DELETE.{stream}.{name}")
            for _ in range(3):
                await asyncio.to_thread(fill, url, stream, 1)  # always the same subject
            assert await sequences(subscription, 3) == list(range(count + 2, count + 5))
            assert subscription.reader.cursor.rebuilds


@pytest.mark.parametrize("policy", ["all", "new"])
async def test_stream_rolled_back_and_grown_again(url: str, policy: str) -> None:
    stream = make_stream(url, 5)
    restore = back_up(url, stream)
    fill(url, stream, 5)
    config = ConsumerConfig(deliver_policy=policy, idle_heartbeat=0.1)

    async with (
        connected(url) as jetstream,
        await subscribe_ordered(jetstream, f"{stream}.>", config=config) as subscription,
    ):
        await sequences(subscription, 10 if policy == "all" else 0)

        def roll_back() -> None:
            restore()
            fill(url, stream, 10)

        waiting = asyncio.ensure_future(subscription.next(60))
        await wait_until_async(lambda: consumers_of(url, stream), "a consumer")
        await asyncio.to_thread(roll_back)
        with pytest.raises(DataLossError, match="rolled back during the read: sequence 10 "):
            await waiting
    assert consumers_of(url, stream) == []


@pytest.mark.parametrize("limits", CONSUMER_LIMITS, ids=str)
async def test_ordered_subscription_to_stream_with_consumer_limits(
    url: str, jetstream: JetStream, limits: dict[str, int]
) -> None:
    stream = make_stream(url, 30, consumer_limits=limits)
    config = ConsumerConfig(deliver_policy="last")
    async with await subscribe_ordered(
        jetstream, f"{stream}.>", config=config, min_last_seq=30
    ) as subscription:
        assert await sequences(subscription, 1) == [30]
