"""Callers that wait or are slower than the server, and errors that end a subscription."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    ConnectError,
    ConsumerDeletedError,
    NextTimeoutError,
    PermissionDeniedError,
    SlowConsumerError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.subscriptions.subscribe import (
    ConsumerConfig,
    subscribe,
    subscribe_ordered,
    subscribe_pull,
)
from tests.support.nats.buckets import api, flushed
from tests.support.nats.subscriptions import (
    connected,
    consumers_of,
    fill,
    make_consumer,
    make_stream,
    sequences,
)
from tests.support.wait import wait_until_async

pytestmark = pytest.mark.servers


@pytest.mark.parametrize("kind", [subscribe, subscribe_ordered])
async def test_callers_waiting_have_own_deadlines(
    url: str, jetstream: JetStream, kind: Any
) -> None:
    stream = make_stream(url)

    async with await kind(jetstream, stream=stream) as subscription:
        waiting = asyncio.create_task(subscription.next())
        await asyncio.sleep(0)
        with pytest.raises(NextTimeoutError):
            await asyncio.wait_for(subscription.next(0.05), 60)
        await asyncio.to_thread(fill, url, stream, 1)
        assert (await waiting).metadata.stream_seq == 1


async def test_slow_caller_error_names_dropped_count(url: str, jetstream: JetStream) -> None:
    stream = make_stream(url)

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


async def test_stream_deleted_while_subscribed_is_error(url: str, jetstream: JetStream) -> None:
    stream = make_stream(url)

    config = ConsumerConfig(idle_heartbeat=0.1)
    subscription = await subscribe(jetstream, stream=stream, config=config)
    waiting = asyncio.create_task(anext(subscription))
    api(url, f"STREAM.DELETE.{stream}")
    with pytest.raises(ConsumerDeletedError):
        await asyncio.wait_for(waiting, 60)
    with pytest.raises(ConsumerDeletedError):
        await anext(subscription)
    await subscription.unsubscribe()


async def test_permission_missing_is_error(tmp_path: Path) -> None:
    config = tmp_path / "server.conf"
    config.write_text("""
        authorization { users: [
          { user: all, password: one }
          { user: deaf, password: two, permissions: { subscribe: { deny: "to.>" } } }
          { user: keeper, password: four, permissions: {
              publish: { deny: "$JS.API.CONSUMER.DELETE.>" } } }
          { user: mute, password: three, permissions: {
              publish: { deny: "$JS.API.CONSUMER.MSG.NEXT.>" } } }
        ] }
    """)
    with NatsServer(config=config) as server:
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
