"""The connection is lost, or the server pauses, while messages wait for their PubAcks."""

from __future__ import annotations

import asyncio
import time

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ConnectError
from tests.faults.writing.publishing import (
    AtPubAck,
    Messages,
    PubAcks,
    PublisherKind,
    Sending,
    each_publisher,
    publish,
    publishing,
    sendings,
    with_and_without_ids,
)
from tests.support.nats.streams import create_stream, stream_state
from tests.support.proxy.fault_proxy import CutAt, Proxy
from tests.support.wait import wait_until_async

COUNT = 3000


@each_publisher
@with_and_without_ids
async def test_cut_before_acknowledgements(
    shared_server: NatsServer, kind: PublisherKind, ids: bool
) -> None:
    messages = Messages(f"ACKS_{kind.name}_{ids}", COUNT, ids=ids)
    kind.create_stream(shared_server.url, messages.stream)
    cut = kind.acks({1, kind.middle, kind.middle + 1}, CutAt(20))
    with Proxy(shared_server.port, cut) as proxy:
        await kind.publish_all(proxy.url, messages)
        assert (cut.done, proxy.connections) == (3, 4)
    messages.check(shared_server.url)


@each_publisher
@with_and_without_ids
async def test_cut_within_message(
    shared_server: NatsServer, kind: PublisherKind, ids: bool
) -> None:
    messages = Messages(f"MESSAGE_{kind.name}_{ids}", COUNT, ids=ids, size=100)
    kind.create_stream(shared_server.url, messages.stream)
    cut = Sending(1, {0, 700, 1500}, CutAt(60))
    with Proxy(shared_server.port, upward=cut) as proxy:
        await kind.publish_all(proxy.url, messages)
        assert (cut.done, proxy.connections) == (3, 4)
    messages.check(shared_server.url)


@each_publisher
@with_and_without_ids
async def test_killed_server(nats_server: NatsServer, kind: PublisherKind, ids: bool) -> None:
    """After its restart the server does not have the batch of fast ingest any more."""
    messages = Messages("ORDERS", COUNT, ids=ids)
    kind.create_stream(nats_server.url, messages.stream)

    def restart() -> None:
        nats_server.kill()
        nats_server.start()

    killed = kind.at_ack(kind.middle, restart)
    with Proxy(nats_server.port, killed) as proxy:
        await kind.publish_all(proxy.url, messages)
        assert killed.done == 1
        assert max(sendings(proxy).values()) > 1
    messages.check(nats_server.url)


@each_publisher
@with_and_without_ids
async def test_paused_server(nats_server: NatsServer, kind: PublisherKind, ids: bool) -> None:
    """A half-open connection: the server pauses with messages that it has received."""
    messages = Messages("ORDERS", COUNT, ids=ids)
    kind.create_stream(nats_server.url, messages.stream)
    paused = kind.at_ack(kind.middle, nats_server.pause)
    with Proxy(nats_server.port, paused) as proxy:
        async with publishing(
            proxy.url, messages.stream, request_timeout=0.5, **kind.settings
        ) as publisher:
            publishes = asyncio.create_task(publish(publisher, messages))
            await wait_until_async(lambda: proxy.connections > 1, "a reconnect")
            assert not publishes.done()
            nats_server.resume()
            await publishes
            assert publisher.stored == COUNT
        assert paused.done == 1
    messages.check(nats_server.url)


async def test_server_remains_unavailable(nats_server: NatsServer) -> None:
    messages = Messages("ORDERS", COUNT)
    create_stream(nats_server.url, messages.stream)
    with Proxy(nats_server.port, AtPubAck(500, nats_server.kill)) as proxy:
        async with publishing(proxy.url, messages.stream, retry_timeout=1) as publisher:
            with pytest.raises(ConnectError, match=r"was lost, and could not be restored within"):
                await publish(publisher, messages)


async def test_closed_connection(shared_server: NatsServer) -> None:
    messages = Messages("CLOSED", COUNT)
    create_stream(shared_server.url, messages.stream)
    with Proxy(shared_server.port, PubAcks(range(100, 10_000))) as proxy:
        async with publishing(proxy.url, messages.stream) as publisher:
            publishes = asyncio.create_task(publish(publisher, messages))
            await wait_until_async(lambda: publisher.stored == 99, "99 PubAcks")
            await publisher._connection.close()
            with pytest.raises(ConnectError, match="is closed"):
                await publishes
            with pytest.raises(ConnectError, match="is closed"):
                await publisher.send(messages.columns())


async def test_slow_line(shared_server: NatsServer) -> None:
    """PubAcks that arrive slowly, over longer than ``request_timeout``, are not lost ones."""
    messages = Messages("SLOW", COUNT)
    create_stream(shared_server.url, messages.stream)
    with Proxy(shared_server.port) as proxy:
        async with publishing(proxy.url, messages.stream, request_timeout=0.5) as publisher:
            proxy.rate = 150_000
            await publish(publisher, messages)
        assert sendings(proxy).total() == COUNT
    assert messages.check(shared_server.url) == list(range(COUNT))


async def test_blocked_event_loop(shared_server: NatsServer) -> None:
    """Between two record batches Spark computes: PubAcks wait, and messages are not sent again."""
    first = Messages("BLOCKED", COUNT)
    create_stream(shared_server.url, first.stream)
    with Proxy(shared_server.port) as proxy:
        async with publishing(proxy.url, first.stream, request_timeout=0.2) as publisher:
            for messages in (first, Messages("BLOCKED", COUNT, first=COUNT)):
                await publisher.send(messages.columns())
                time.sleep(0.5)  # noqa: ASYNC251 (the loop shall stand still)
            await publisher.flush()
            assert publisher.stored == 2 * COUNT
        assert sendings(proxy).total() == 2 * COUNT
    assert stream_state(shared_server.url, "BLOCKED")["messages"] == 2 * COUNT
