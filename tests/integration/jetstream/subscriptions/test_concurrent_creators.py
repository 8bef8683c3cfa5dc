"""Two subscriptions that create the same consumer at the same time (ADR-15)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from nats_stream_source.errors import ConsumerNotFoundError, DuplicateSubscriptionError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.subscriptions.push import Subscription
from nats_stream_source.jetstream.subscriptions.subscribe import subscribe, subscribe_pull
from tests.integration.jetstream.subscriptions.sequences import sequences
from tests.support.nats.subscriptions import (
    consumers_of,
    fill,
    make_consumer,
    make_stream,
)
from tests.support.wait import wait_until_async

pytestmark = pytest.mark.servers


class Racing(JetStream):
    """Reports once that a consumer is missing, after all requests have arrived."""

    def __init__(self, jetstream: JetStream, barrier: asyncio.Event, others: list[int]) -> None:
        super().__init__(jetstream.connection)
        self._barrier = barrier
        self._others = others
        self.lost = False

    async def consumer_info(self, stream: str, name: str) -> dict[str, Any]:
        if self._barrier.is_set():
            self.lost = True
            return await super().consumer_info(stream, name)
        with pytest.raises(ConsumerNotFoundError) as missing:
            await super().consumer_info(stream, name)
        self._others.append(1)
        if len(self._others) == 2:
            self._barrier.set()
        await self._barrier.wait()
        raise missing.value


async def race(
    jetstream: JetStream, kind: Callable[..., Any] = subscribe, **how: Any
) -> tuple[list[Any], list[Racing]]:
    barrier, others = asyncio.Event(), list[int]()
    racers = [Racing(jetstream, barrier, others) for _ in range(2)]
    attempts = (kind(racer, durable="d", **how) for racer in racers)
    outcome = await asyncio.gather(*attempts, return_exceptions=True)
    assert sum(racer.lost for racer in racers) == 1
    return outcome, racers


async def test_creators_concurrent_report_duplicate(
    url: str,
    jetstream: JetStream,
) -> None:
    stream = make_stream(url, 3)

    outcome, _ = await race(jetstream, stream=stream)
    (winner,) = (one for one in outcome if isinstance(one, Subscription))
    (error,) = (one for one in outcome if isinstance(one, Exception))
    assert isinstance(error, DuplicateSubscriptionError)
    assert winner.consumer.created
    assert await sequences(winner, 3) == [1, 2, 3]
    await winner.unsubscribe()


async def test_creator_without_interest_is_duplicate(
    url: str,
    jetstream: JetStream,
) -> None:
    stream = make_stream(url)

    class Late(JetStream):
        async def add_consumer(self, stream: str, config: dict[str, Any]) -> dict[str, Any]:
            make_consumer(url, stream, config["name"], deliver_subject="elsewhere")
            return await super().add_consumer(stream, config)

    with pytest.raises(DuplicateSubscriptionError, match="at the same time"):
        await subscribe(Late(jetstream.connection), stream=stream, durable="d")
    assert consumers_of(url, stream) == ["d"]


async def test_creators_concurrent_in_queue_group_join(
    url: str,
    jetstream: JetStream,
) -> None:
    stream = make_stream(url)

    outcome, _ = await race(jetstream, stream=stream, queue="q")
    assert all(isinstance(one, Subscription) for one in outcome)
    assert sorted(one.consumer.created for one in outcome) == [False, True]
    assert len({one.info.config["deliver_subject"] for one in outcome}) == 1
    await asyncio.to_thread(fill, url, stream, 100)

    parts: list[list[int]] = [[] for _ in outcome]

    async def take(subscription: Subscription, part: list[int]) -> None:
        async for message in subscription:
            part.append(message.metadata.stream_seq)
            await message.ack()

    taking = [asyncio.ensure_future(take(*one)) for one in zip(outcome, parts, strict=True)]
    await wait_until_async(lambda: sum(map(len, parts)) >= 100, "all messages")
    for one in taking:
        one.cancel()
    await asyncio.wait(taking)
    assert all(parts)
    assert sorted(seq for part in parts for seq in part) == list(range(1, 101))
    for one in sorted(outcome, key=lambda one: bool(one.consumer.created)):
        await one.unsubscribe()
    assert consumers_of(url, stream) == []


async def test_creators_concurrent_of_pull_consumer_own_it_once(
    url: str, jetstream: JetStream
) -> None:
    stream = make_stream(url, 4)

    (one, two), _ = await race(jetstream, subscribe_pull, stream=stream)
    assert sorted((one.consumer.created, two.consumer.created)) == [False, True]
    assert len(await one.fetch(2)) == len(await two.fetch(2)) == 2
    await (two if one.consumer.created else one).unsubscribe()
    assert consumers_of(url, stream) == ["d"]


async def test_deliver_subject_of_unused_consumer_changes(
    url: str,
    jetstream: JetStream,
) -> None:
    """Why the inbox is subscribed to before the consumer is created."""
    stream = make_stream(url, 1)

    def deliver_subject(wanted: str) -> str:
        made = make_consumer(url, stream, "d", deliver_subject=wanted)
        return str(made["config"]["deliver_subject"])

    assert [deliver_subject("one"), deliver_subject("two")] == ["one", "two"]
    async with await subscribe(jetstream, stream=stream, bind="d"):
        with pytest.raises(RuntimeError, match="10013"):
            deliver_subject("three")
