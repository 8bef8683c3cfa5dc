"""Direct Get for tests: a connection of its own around an async function, and a lagging replica."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from buckets import with_client
from cluster import Cluster
from nats.aio.client import Client

from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.api import JetStream, StoredMessage
from nats_stream_source.jetstream.connection import Connection, ConnectionSettings
from nats_stream_source.jetstream.direct_get import DirectGet
from nats_stream_source.jetstream.direct_request import ask

T = TypeVar("T")


def direct(url: str, stream: str, work: Callable[[DirectGet], Awaitable[T]], **settings: Any) -> T:
    """Run ``work`` with a Direct Get of ``stream`` on a connection of its own."""

    async def whole() -> T:
        connection = await Connection.open(ConnectionSettings(servers=(url,), **settings))
        try:
            return await work(DirectGet(JetStream(connection), stream))
        finally:
            await connection.close()

    return asyncio.run(asyncio.wait_for(whole(), 60))


async def seqs(messages: AsyncIterator[StoredMessage]) -> list[int]:
    """The sequences of all that comes."""
    return [message.seq async for message in messages]


def version(url: str) -> tuple[int, int]:
    """The server's version: major and minor."""

    async def work(client: Client) -> tuple[int, int]:
        known = client.connected_server_version
        return known.major, known.minor

    return with_client(url, work)


async def some_unanswered(get: DirectGet) -> bool:
    """Whether some of many Direct Gets are not answered: a paused server was to answer them."""
    connection, subject = get.jetstream.connection, f"DIRECT.GET.{get.stream}"
    asked = (ask(connection, subject, {"seq": 1}, silence=0.2) for _ in range(20))
    return not all(reply.page for reply in await asyncio.gather(*asked))


def outsider(cluster: Cluster, stream: str) -> NatsServer:
    """A server without a replica of ``stream``: those with one answer from that."""
    having = [cluster.leader_of(stream), *cluster.followers_of(stream)]
    return next(server for server in cluster.servers.values() if server not in having)


def pause_a_responder(cluster: Cluster, stream: str) -> NatsServer:
    """Pause a follower that answers Direct Gets; it takes part some time after it has caught up."""
    asked, follower = outsider(cluster, stream), cluster.followers_of(stream)[0]
    deadline = time.monotonic() + 20
    while True:
        follower.pause()
        if direct(asked.url, stream, some_unanswered):
            return follower
        follower.resume()
        assert time.monotonic() < deadline, "the follower answers no Direct Get"
        time.sleep(0.2)
