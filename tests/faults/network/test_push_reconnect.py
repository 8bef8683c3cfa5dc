"""Push subscriptions over a lost connection: durable and ephemeral consumers (ADR-15)."""

from __future__ import annotations

import asyncio

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ConsumerDeletedError, MissedHeartbeatError, NatsSourceError
from nats_stream_source.jetstream.subscriptions.subscribe import ConsumerConfig, subscribe
from tests.faults.network.push import all_of
from tests.support.nats.subscriptions import connected, consumer_info, fill, make_stream
from tests.support.proxy.fault_proxy import Proxy
from tests.support.wait import wait_until_async


async def test_ephemeral_consumer_lost_with_server_is_error(
    nats_server: NatsServer,
) -> None:
    memory = {"mem_storage": True, "inactive_threshold": 0.2}
    stream = make_stream(nats_server.url, 3)

    async with connected(nats_server.url) as jetstream:
        config = ConsumerConfig(idle_heartbeat=0.2, **memory)
        subscription = await subscribe(jetstream, stream=stream, config=config)
        await all_of(subscription, 3)
        nats_server.kill()
        nats_server.start()
        alarms: type[NatsSourceError] | None = MissedHeartbeatError
        while alarms is MissedHeartbeatError:
            alarms = None
            try:
                await subscription.next(10)
            except NatsSourceError as error:
                alarms = type(error)
        assert alarms is ConsumerDeletedError
        with pytest.raises(ConsumerDeletedError):
            await anext(subscription)
        await subscription.unsubscribe()


async def test_durable_consumer_resumes_after_lost_connection(
    shared_server: NatsServer,
) -> None:
    stream = make_stream(shared_server.url, 3)
    with Proxy(shared_server.port) as proxy:
        async with connected(proxy.url) as jetstream:
            subscription = await subscribe(jetstream, stream=stream, durable="d")
            for message in [await subscription.next(15) for _ in range(3)]:
                await message.ack_sync()
            waiting = asyncio.create_task(subscription.next())
            await asyncio.to_thread(proxy.cut)
            await wait_until_async(lambda: jetstream.connection.reconnects == 1, "a reconnect")
            await asyncio.to_thread(fill, shared_server.url, stream, 1)
            assert (await waiting).metadata.stream_seq == 4
            assert consumer_info(shared_server.url, stream, "d")["push_bound"]
            await subscription.unsubscribe()
