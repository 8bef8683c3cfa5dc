"""Direct Get for tests: a client on a connection of its own, streams, and a lagging replica."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.api import StoredMessage
from nats_stream_source.jetstream.direct_get.client import DirectGet
from nats_stream_source.jetstream.direct_get.request import send_request
from tests.support.event_loop import deadline
from tests.support.nats.buckets import publish
from tests.support.nats.cluster import Cluster
from tests.support.nats.streams import create_stream


@asynccontextmanager
async def direct_get(url: str, stream: str, **settings: Any) -> AsyncIterator[DirectGet]:
    """A Direct Get of ``stream`` on a connection of its own; the block may take a minute."""
    async with connect(url, **settings) as jetstream, deadline(60):
        yield DirectGet(jetstream, stream)


def make(url: str, name: str, count: int = 10, *, allow_direct: bool = True, **config: Any) -> None:
    """A stream with ``count`` messages: ``<name>.<n % 4>``, payload ``v<n>``, from n = 1."""
    create_stream(url, name, allow_direct=allow_direct, **config)
    publish(url, [(f"{name}.{n % 4}", b"v%d" % n, None) for n in range(1, count + 1)])


@asynccontextmanager
async def new_direct_get(
    url: str, name: str, count: int = 10, **config: Any
) -> AsyncIterator[DirectGet]:
    """As :func:`direct_get`, of a stream that :func:`make` creates."""
    make(url, name, count, **config)
    async with direct_get(url, name) as get:
        yield get


async def listed(messages: AsyncIterator[StoredMessage]) -> list[StoredMessage]:
    return [message async for message in messages]


async def seqs(messages: AsyncIterator[StoredMessage]) -> list[int]:
    return [message.seq async for message in messages]


async def some_unanswered(get: DirectGet) -> bool:
    """Whether some of many Direct Gets have no response: they were routed to a paused server."""
    connection, subject = get.jetstream.connection, f"DIRECT.GET.{get.stream}"
    asked = (send_request(connection, subject, {"seq": 1}, idle_timeout=0.2) for _ in range(20))
    return not all(reply.page for reply in await asyncio.gather(*asked))


def outsider(cluster: Cluster, stream: str) -> NatsServer:
    """A server without a replica of ``stream``: servers with one respond from it."""
    having = [cluster.leader_of(stream), *cluster.followers_of(stream)]
    return next(server for server in cluster.servers.values() if server not in having)


async def pause_a_responder(cluster: Cluster, stream: str) -> NatsServer:
    """Pause a follower that responds to Direct Gets, which it does some time after it caught up."""
    asked, follower = outsider(cluster, stream), cluster.followers_of(stream)[0]
    give_up = time.monotonic() + 20
    while True:
        follower.pause()
        async with direct_get(asked.url, stream) as get:
            if await some_unanswered(get):
                return follower
        follower.resume()
        assert time.monotonic() < give_up, "the follower answers no Direct Get"
        await asyncio.sleep(0.2)
