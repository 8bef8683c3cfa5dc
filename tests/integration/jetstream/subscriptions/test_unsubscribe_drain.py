"""The end of a subscription: unsubscribe, drain, cancellation, the end of its context."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ConsumerNotFoundError, SubscriptionClosedError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.retry import retry_transient
from nats_stream_source.jetstream.subscriptions.message import JsMessage
from nats_stream_source.jetstream.subscriptions.subscribe import (
    ConsumerConfig,
    subscribe,
    subscribe_ordered,
    subscribe_pull,
)
from tests.support.nats.buckets import api
from tests.support.nats.subscriptions import connected, consumers_of, fill, make_stream
from tests.support.wait import wait_until_async

pytestmark = pytest.mark.servers

NO_CONSUMERS = {
    "type": "io.nats.jetstream.api.v1.consumer_names_response",
    "total": 0,
    "offset": 0,
    "limit": 1024,
    "consumers": [],
}


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        (subscribe, {}),
        (subscribe_pull, {"durable": "d"}),
        (subscribe_ordered, {"config": ConsumerConfig(deliver_policy="last")}),
        (subscribe, {"min_last_seq": 1}),
    ],
    ids=["push", "durable", "ordered", "read-after-write"],
)
async def test_caller_cancelled_at_any_point_leaves_nothing(
    url: str, jetstream: JetStream, kind: Any, asked: dict[str, Any]
) -> None:
    """Servers create consumers aside: a deletion must not be faster than the creation."""
    stream = make_stream(url, 1)

    client = jetstream.connection.client
    await jetstream.stream_info(stream)
    before = len(client._subs)

    async def whole() -> None:
        async with await kind(jetstream, stream=stream, **asked) as subscription:
            await anext(subscription)

    moments, whole_runs = 0, 0
    while moments < 60 or not whole_runs:
        task = asyncio.create_task(whole())
        for _ in range(moments):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        whole_runs += not task.cancelled()
        moments += 1
        assert await jetstream.call(f"CONSUMER.NAMES.{stream}") == NO_CONSUMERS
        assert len(client._subs) == before


@pytest.mark.parametrize("how", ["frozen", "killed"])
async def test_unsubscribe_does_not_wait_for_unavailable_server(
    nats_server: NatsServer, how: str
) -> None:
    stream = make_stream(nats_server.url, 1)

    async with connected(nats_server.url, request_timeout=60.0) as jetstream:
        subscription = await subscribe_ordered(jetstream, stream=stream)
        await subscription.next(15)
        if how == "frozen":
            nats_server.pause()
        else:
            nats_server.kill()
        try:
            await asyncio.wait_for(subscription.unsubscribe(), 60)
        finally:
            if how == "frozen":
                nats_server.resume()
            else:
                nats_server.start()
        assert (await retry_transient(lambda: jetstream.stream_info(stream), 10)).last_seq == 1


@pytest.mark.parametrize("kind", [subscribe, subscribe_pull])
async def test_deletion_failure_is_raised_by_unsubscribe(
    url: str, jetstream: JetStream, published: str, kind: Any
) -> None:
    subscription = await kind(jetstream, stream=published)
    name = subscription.info.name
    api(url, f"CONSUMER.DELETE.{published}.{name}")
    with pytest.raises(ConsumerNotFoundError):
        await subscription.unsubscribe()


@pytest.mark.parametrize("kind", [subscribe, subscribe_pull])
async def test_deletion_failure_at_drain_goes_to_on_error(
    url: str, jetstream: JetStream, published: str, kind: Any
) -> None:
    errors: list[Exception] = []
    subscription = await kind(jetstream, stream=published, on_error=errors.append)
    assert (await anext(subscription)).metadata.stream_seq == 1
    api(url, f"CONSUMER.DELETE.{published}.{subscription.info.name}")
    await subscription.drain()
    rest = [message.metadata.stream_seq async for message in subscription]
    assert rest == [2, 3, 4, 5]
    assert any(isinstance(error, ConsumerNotFoundError) for error in errors)


@pytest.mark.parametrize("kind", [subscribe, subscribe_pull])
async def test_drain_hands_over_what_has_arrived(
    url: str, jetstream: JetStream, published: str, kind: Any
) -> None:
    subscription = await kind(jetstream, stream=published)
    first = await anext(subscription)
    await first.ack()
    await subscription.drain()
    await asyncio.to_thread(fill, url, published, 5)
    found = []
    async for message in subscription:
        # The consumer is there until the last one was handed over.
        await message.ack_sync()
        found.append(message.metadata.stream_seq)
    assert found == [2, 3, 4, 5]
    assert consumers_of(url, published) == []


async def test_drain_waits_for_callback(url: str, jetstream: JetStream, published: str) -> None:
    found: list[int] = []
    begun = asyncio.Event()

    async def callback(message: JsMessage) -> None:
        begun.set()
        await asyncio.sleep(0.01)
        found.append(message.metadata.stream_seq)

    subscription = await subscribe(jetstream, stream=published, callback=callback)
    await begun.wait()
    assert len(found) < 5
    await subscription.drain()
    assert found == [1, 2, 3, 4, 5]
    assert consumers_of(url, published) == []
    await subscription.unsubscribe()


async def test_callback_exception_is_reported(
    url: str, jetstream: JetStream, published: str
) -> None:
    found: list[int] = []
    errors: list[Exception] = []

    async def callback(message: JsMessage) -> None:
        found.append(message.metadata.stream_seq)
        if len(found) == 2:
            raise KeyError("the user's own")

    async with await subscribe(
        jetstream, stream=published, callback=callback, on_error=errors.append
    ):
        await wait_until_async(lambda: len(found) == 5, "all five")
    assert [type(error) for error in errors] == [KeyError]

    found.clear()
    subscription = await subscribe(jetstream, stream=published, callback=callback)
    await wait_until_async(lambda: len(found) == 2, "the failure")
    with pytest.raises(KeyError):
        await subscription.unsubscribe()
    assert consumers_of(url, published) == []


async def test_unsubscribe_ends_waiting_reads(url: str, jetstream: JetStream) -> None:
    stream = make_stream(url)

    subscriptions: list[Any] = [
        await subscribe(jetstream, stream=stream),
        await subscribe_ordered(jetstream, stream=stream),
    ]
    for subscription in subscriptions:
        waiting = asyncio.create_task(subscription.next())
        await asyncio.sleep(0)
        await subscription.unsubscribe()
        with pytest.raises(SubscriptionClosedError):
            await asyncio.wait_for(waiting, 60)
