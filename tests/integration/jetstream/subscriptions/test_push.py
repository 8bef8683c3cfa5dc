"""Push subscriptions: acknowledgements, slow and waiting callers, errors, unsubscribe and drain."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    AckError,
    ConnectError,
    ConsumerDeletedError,
    ConsumerNotFoundError,
    NextTimeoutError,
    PermissionDeniedError,
    SlowConsumerError,
    SubscriptionClosedError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.retry import retry_transient
from nats_stream_source.jetstream.subscriptions.message import JsMessage
from nats_stream_source.jetstream.subscriptions.subscribe import (
    ConsumerConfig,
    subscribe,
    subscribe_ordered,
    subscribe_pull,
)
from tests.support.nats.buckets import api, consumers_of, flushed, publish
from tests.support.nats.subscriptions import (
    connected,
    consumer_info,
    fill,
    make_consumer,
    make_stream,
    sequences,
)
from tests.support.nats.topology import configured_server
from tests.support.wait import wait_until_async

pytestmark = pytest.mark.servers


async def listen(url: str, jetstream: JetStream, subject: str, work: Any) -> list[bytes]:
    """What ``work()`` publishes to ``subject`` with ``jetstream``."""
    heard: list[bytes] = []
    async with connected(url) as other:
        subscription = await other.connection.client.subscribe(subject)
        await flushed(other.connection.client)
        await work()
        await flushed(jetstream.connection.client)
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

    heard = await listen(url, jetstream, f"$JS.ACK.{published}.>", ack)
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
    async with await subscribe_pull(jetstream, stream=published) as pull:
        (message,) = await pull.fetch(1)

        async def ack() -> None:
            waiting = asyncio.create_task(message.ack_sync())
            await asyncio.sleep(0)
            await message.nak()
            await message.term()
            await waiting
            assert message.acked

        assert await listen(url, jetstream, message.reply, ack) == [b"+ACK"]


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

        assert await listen(url, jetstream, f"$JS.ACK.{published}.>", ack) == []
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


async def test_metadata_and_headers(url: str, jetstream: JetStream, stream: str) -> None:
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


@pytest.mark.parametrize("kind", [subscribe, subscribe_ordered])
async def test_callers_waiting_have_own_deadlines(
    url: str, jetstream: JetStream, kind: Any, stream: str
) -> None:
    async with await kind(jetstream, stream=stream) as subscription:
        waiting = [asyncio.create_task(subscription.next()) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(NextTimeoutError):
            await asyncio.wait_for(subscription.next(0.05), 60)
        await asyncio.to_thread(fill, url, stream, 3)
        received = await asyncio.gather(*waiting)
        assert sorted(message.metadata.stream_seq for message in received) == [1, 2, 3]


async def test_slow_caller_error_names_dropped_count(
    url: str, jetstream: JetStream, stream: str
) -> None:
    none = ConsumerConfig(ack_policy="none")
    async with await subscribe(
        jetstream, stream=stream, config=none, pending_bytes=100_000
    ) as subscription:
        await asyncio.to_thread(fill, url, stream, 1000, 1000)
        await flushed(jetstream.connection.client)
        with pytest.raises(SlowConsumerError, match=r"\d+ messages were dropped.*flow_control"):
            [await subscription.next(15) for _ in range(1000)]


async def test_flow_control_pauses_server_for_slow_caller(url: str, jetstream: JetStream) -> None:
    stream = make_stream(url, 6000, 10_000)

    config = ConsumerConfig(ack_policy="none", flow_control=True, idle_heartbeat=5.0)
    async with await subscribe(jetstream, stream=stream, config=config) as subscription:
        # The caller rests until the server does: it says that it waits.
        inbox = subscription._buffer._inbox
        sizes = [0]

        async def rests() -> bool:
            sizes.append(inbox.nbytes)
            await asyncio.sleep(0.05)
            return inbox.nbytes > 0 and len(set(sizes[-5:])) == 1

        await wait_until_async(rests, "the server rests")
        assert inbox.nbytes < 40 << 20
        found = await sequences(subscription, 6000)
        assert found == list(range(1, 6001))
        assert inbox.dropped == 0


async def test_closed_connection_is_error(jetstream: JetStream, published: str) -> None:
    subscription = await subscribe(jetstream, stream=published)
    assert len(await sequences(subscription, 5)) == 5
    waiting = asyncio.create_task(anext(subscription))
    await asyncio.sleep(0)
    await jetstream.connection.close()
    with pytest.raises(ConnectError):
        await asyncio.wait_for(waiting, 60)


async def test_stream_deleted_while_subscribed_is_error(
    url: str, jetstream: JetStream, stream: str
) -> None:
    config = ConsumerConfig(idle_heartbeat=0.1)
    subscription = await subscribe(jetstream, stream=stream, config=config)
    waiting = asyncio.create_task(anext(subscription))
    api(url, f"STREAM.DELETE.{stream}")
    with pytest.raises(ConsumerDeletedError):
        await asyncio.wait_for(waiting, 60)
    with pytest.raises(ConsumerDeletedError):
        await anext(subscription)
    await subscription.unsubscribe()


async def test_permission_missing_is_error() -> None:
    config = """
        authorization { users: [
          { user: all, password: one }
          { user: deaf, password: two, permissions: { subscribe: { deny: "to.>" } } }
          { user: keeper, password: four, permissions: {
              publish: { deny: "$JS.API.CONSUMER.DELETE.>" } } }
          { user: mute, password: three, permissions: {
              publish: { deny: "$JS.API.CONSUMER.MSG.NEXT.>" } } }
        ] }
    """
    with configured_server(config) as server:
        every = server.url.replace("//", "//all:one@")
        stream = make_stream(every, 1)
        make_consumer(every, stream, "push", deliver_subject=f"to.{stream}")
        make_consumer(every, stream, "pull")

        async with connected(server.url.replace("//", "//deaf:two@")) as jetstream:
            with pytest.raises(PermissionDeniedError, match=rf"to\.{stream}"):
                await subscribe(jetstream, stream=stream, bind="push")
            mine = ConsumerConfig(deliver_subject=f"to.me.{stream}")
            with pytest.raises(PermissionDeniedError, match=rf"to\.me\.{stream}"):
                await subscribe(jetstream, stream=stream, config=mine)
            assert consumers_of(every, stream) == ["pull", "push"]
        async with (
            connected(server.url.replace("//", "//mute:three@")) as jetstream,
            await subscribe_pull(jetstream, stream=stream, bind="pull") as pull,
        ):
            with pytest.raises(PermissionDeniedError, match=r"MSG\.NEXT"):
                await pull.fetch(1, 10)
            for _ in range(2):
                with pytest.raises(PermissionDeniedError, match=r"MSG\.NEXT"):
                    await asyncio.wait_for(anext(pull), 60)
        async with connected(server.url.replace("//", "//keeper:four@")) as jetstream:
            async with await subscribe_ordered(jetstream, stream=stream) as subscription:
                await subscription.next(15)
            # The connection is sound, and others use it: it is not made anew.
            assert await jetstream.connection.alive(5)
            assert jetstream.connection.reconnects == 0


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
        assert not (await jetstream.call(f"CONSUMER.NAMES.{stream}"))["consumers"]
        assert len(client._subs) == before


@pytest.mark.parametrize(
    ("end", "begin"), [(NatsServer.pause, NatsServer.resume), (NatsServer.kill, NatsServer.start)]
)
async def test_unsubscribe_does_not_wait_for_unavailable_server(
    nats_server: NatsServer, end: Any, begin: Any
) -> None:
    stream = make_stream(nats_server.url, 1)

    async with connected(nats_server.url, request_timeout=60.0) as jetstream:
        subscription = await subscribe_ordered(jetstream, stream=stream)
        await subscription.next(15)
        end(nats_server)
        try:
            await asyncio.wait_for(subscription.unsubscribe(), 60)
        finally:
            begin(nats_server)
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


async def test_unsubscribe_ends_waiting_reads(jetstream: JetStream, stream: str) -> None:
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
