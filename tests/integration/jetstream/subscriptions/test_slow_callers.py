"""Callers that wait for messages, and callers that are slower than the server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nats_stream_source.errors import NextTimeoutError, SlowConsumerError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.subscriptions.subscribe import (
    ConsumerConfig,
    subscribe,
    subscribe_ordered,
)
from tests.integration.jetstream.subscriptions.sequences import sequences
from tests.support.nats.buckets import flushed
from tests.support.nats.subscriptions import fill, make_stream
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


async def test_flow_control_pauses_server_for_slow_caller(
    url: str,
    jetstream: JetStream,
) -> None:
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
