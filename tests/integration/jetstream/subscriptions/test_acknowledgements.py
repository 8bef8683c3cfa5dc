"""Acknowledgements of messages, and the metadata of a message."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nats_stream_source.errors import AckError, ConnectError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.subscriptions.subscribe import (
    ConsumerConfig,
    subscribe,
    subscribe_ordered,
    subscribe_pull,
)
from tests.support.nats.buckets import flushed, publish
from tests.support.nats.subscriptions import connected, consumer_info, make_stream
from tests.support.wait import wait_until_async

pytestmark = pytest.mark.servers


async def listen(url: str, subject: str, work: Any) -> list[bytes]:
    """What is published to ``subject`` while ``work()`` runs."""
    heard: list[bytes] = []
    async with connected(url) as other:
        subscription = await other.connection.client.subscribe(subject)
        await flushed(other.connection.client)
        await work()
        await flushed(other.connection.client)
        while subscription.pending_msgs:
            heard.append((await subscription.next_msg(1)).data)
    return heard


async def test_acknowledgements_of_every_kind(
    url: str, jetstream: JetStream, published: str
) -> None:
    subscription = await subscribe(jetstream, stream=published)
    messages = [await subscription.next(15) for _ in range(5)]

    async def ack() -> None:
        await messages[0].in_progress()
        await messages[0].in_progress()
        await messages[0].ack()
        await messages[1].nak()
        await messages[2].nak(60.0)
        await messages[3].term()
        await messages[4].ack_sync()
        for message in messages:
            assert message.acked
            # Ignored, without an error.
            await message.ack()
            await message.nak(1.0)
            await message.term()
            await message.in_progress()
            await message.ack_sync()
        await flushed(jetstream.connection.client)

    heard = await listen(url, f"$JS.ACK.{published}.>", ack)
    delayed = b'-NAK {"delay": 60000000000}'
    assert heard == [b"+WPI", b"+WPI", b"+ACK", b"-NAK", delayed, b"+TERM", b"+ACK"]
    again = await subscription.next(15)
    assert (again.metadata.stream_seq, again.metadata.delivered) == (2, 2)
    await again.ack_sync()
    info = consumer_info(url, published, subscription.info.name)
    # The third waits for its delay; nothing else is open.
    assert (info["num_ack_pending"], info["ack_floor"]["stream_seq"]) == (1, 2)
    await subscription.unsubscribe()


async def test_acknowledgement_awaiting_response_is_exclusive(
    url: str, jetstream: JetStream, published: str
) -> None:
    sent: list[bytes] = []

    async def heard(message: Any) -> None:
        sent.append(message.data)

    async with (
        connected(url) as other,
        await subscribe_pull(jetstream, stream=published) as pull,
    ):
        (message,) = await pull.fetch(1)
        await other.connection.client.subscribe(message.reply, cb=heard)
        await flushed(other.connection.client)
        waiting = asyncio.create_task(message.ack_sync())
        await asyncio.sleep(0)
        await message.nak()
        await message.term()
        await waiting
        assert message.acked
        await flushed(jetstream.connection.client)
        await flushed(other.connection.client)
        await wait_until_async(lambda: bool(sent), "the acknowledgement")
        assert sent == [b"+ACK"]


async def test_ack_policy_none_sends_nothing(
    url: str, jetstream: JetStream, published: str
) -> None:
    none = ConsumerConfig(ack_policy="none")
    async with await subscribe(jetstream, stream=published, config=none) as subscription:
        message = await subscription.next(15)

        async def ack() -> None:
            await message.in_progress()
            await message.nak()
            await message.term()
            await message.ack_sync()
            await message.ack()
            await flushed(jetstream.connection.client)

        assert await listen(url, f"$JS.ACK.{published}.>", ack) == []
        assert not message.acked


async def test_acknowledgement_unpublishable_is_error(jetstream: JetStream, published: str) -> None:
    subscription = await subscribe(jetstream, stream=published, durable="d")
    message = await subscription.next(15)
    await jetstream.connection.close()
    for ack in (message.ack, message.nak, message.term, message.in_progress, message.ack_sync):
        with pytest.raises(AckError):
            await ack()
        assert not message.acked
    with pytest.raises(ConnectError):
        await subscription.unsubscribe()


async def test_metadata_and_headers(url: str, jetstream: JetStream) -> None:
    stream = make_stream(url)
    headers = {"Status": "404", "Nats-Consumer-Stalled": "no"}
    publish(url, [(f"{stream}.a", b"data", headers)])

    for kind in (subscribe, subscribe_ordered):
        async with await kind(jetstream, f"{stream}.>") as subscription:
            message = await subscription.next(15)
            assert (message.subject, message.data) == (f"{stream}.a", b"data")
            # A publisher's header is data, whatever it says.
            assert message.headers.status is None
            assert message.headers.get("Status") == "404"
            metadata = message.metadata
            assert (metadata.stream, metadata.pending) == (stream, 0)
            assert (metadata.stream_seq, metadata.consumer_seq, metadata.delivered) == (1, 1, 1)
            # The form of 9 tokens.
            _, _, of, consumer, *numbers = message.reply.split(".")
            assert (of, consumer) == (stream, metadata.consumer)
            time = metadata.timestamp_ns
            assert list(map(int, numbers)) == [1, 1, 1, time, 0]
