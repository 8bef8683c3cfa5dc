"""Errors that end a subscription: a closed connection, a deleted stream, missing permissions."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ConnectError, ConsumerDeletedError, PermissionDeniedError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.subscriptions.subscribe import (
    ConsumerConfig,
    subscribe,
    subscribe_ordered,
    subscribe_pull,
)
from tests.integration.jetstream.subscriptions.sequences import sequences
from tests.support.nats.buckets import api
from tests.support.nats.subscriptions import connected, consumers_of, make_consumer, make_stream

pytestmark = pytest.mark.servers


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
