"""``min_last_seq`` where the consumer is not served by the stream's leader (ADR-53)."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import MinLastSequenceError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.consumer_config import ConsumerInfo
from nats_stream_source.jetstream.retry import retry_transient
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.subscriptions.subscribe import (
    subscribe,
    subscribe_ordered,
    subscribe_pull,
    wait_for_consumer_replica,
)
from tests.support.nats.cluster import Cluster
from tests.support.nats.subscriptions import (
    connected,
    consumer_info,
    consumers_of,
    fill,
    make_consumer,
    make_stream,
)

pytestmark = pytest.mark.servers


def on_a_follower(cluster: Cluster, stream: str) -> tuple[str, NatsServer]:
    """A pull consumer without replicas that a follower of the stream serves; and that server."""
    leader = cluster.leader_of(stream)
    for number in range(50):
        name = f"c{number}"
        made = make_consumer(leader.url, stream, name, num_replicas=1)
        server = cluster.servers[made["cluster"]["leader"]]
        if server is not leader:
            return name, server
    raise AssertionError("fifty consumers, and all were placed on the leader")


async def test_lagging_follower_is_awaited(cluster: Cluster) -> None:
    stream = make_stream(cluster.url, 10, num_replicas=3)
    cluster.wait_current(stream)
    name, follower = on_a_follower(cluster, stream)
    leader = cluster.leader_of(stream)

    async with connected(leader.url, request_timeout=1.0) as jetstream:
        pull = await subscribe_pull(jetstream, stream=stream, bind=name, min_last_seq=10)
        assert pull.info.num_pending == 10
        info = ConsumerInfo.parse(await jetstream.consumer_info(stream, name))
        assert cluster.servers[info.leader or ""] is follower
        with pytest.raises(MinLastSequenceError):
            await wait_for_consumer_replica(jetstream, info, 11, 0.3)

        follower.pause()
        try:
            await asyncio.to_thread(fill, leader.url, stream, 5)
            with pytest.raises(MinLastSequenceError, match="its replica lags"):
                await wait_for_consumer_replica(jetstream, info, 15, 0.5)
        finally:
            follower.resume()
        await wait_for_consumer_replica(jetstream, info, 15, 20.0)
        assert ConsumerInfo.parse(await jetstream.consumer_info(stream, name)).num_pending == 15
        await pull.unsubscribe()
    # The consumers of the check are deleted.
    assert all(one[1:].isdigit() for one in consumers_of(leader.url, stream))


async def test_replicated_consumer_has_leader(cluster: Cluster) -> None:
    stream = make_stream(cluster.url, 10, num_replicas=3)

    async with connected(cluster.leader_of(stream).url) as jetstream:
        kinds: tuple[Any, ...] = (
            subscribe,
            functools.partial(subscribe_pull, durable="d"),
            subscribe_ordered,
        )
        for kind in kinds:
            async with await kind(jetstream, stream=stream, min_last_seq=10) as subscription:
                found = [(await anext(subscription)).metadata.stream_seq for _ in range(10)]
                assert found == list(range(1, 11))
                if isinstance(kind, functools.partial):
                    assert consumer_info(cluster.url, stream, "d")["config"]["num_replicas"] in (
                        0,
                        3,
                    )
    assert consumers_of(cluster.url, stream) == []


class Ahead(JetStream):
    """Reports one message more than the leader has: all other replicas lag behind it."""

    async def stream_info(self, stream: str) -> StreamInfo:
        info = await super().stream_info(stream)
        return replace(info, last_seq=info.last_seq + 1)


class AheadOnce(Ahead):
    """The first response is of a leader that is ahead, the later ones of another leader."""

    responded = False

    async def stream_info(self, stream: str) -> StreamInfo:
        if self.responded:
            return await JetStream.stream_info(self, stream)
        self.responded = True
        return await super().stream_info(stream)


async def test_leader_does_not_prove_follower(cluster: Cluster) -> None:
    stream = make_stream(cluster.url, 10, num_replicas=3)
    cluster.wait_current(stream)
    name, _ = on_a_follower(cluster, stream)

    async with connected(cluster.leader_of(stream).url, request_timeout=2.0) as jetstream:
        ahead = Ahead(jetstream.connection)
        # Another server answers this, and to an inbox that it may not have heard of yet: the first
        # answer on a new connection to a cluster can get lost.
        answer = await retry_transient(lambda: jetstream.consumer_info(stream, name), 15.0)
        info = ConsumerInfo.parse(answer)
        await wait_for_consumer_replica(jetstream, info, 0, 10.0)
        await wait_for_consumer_replica(ahead, info, 10, 10.0)
        with pytest.raises(MinLastSequenceError, match="its replica lags"):
            await wait_for_consumer_replica(ahead, info, 11, 0.5)
        waiting = asyncio.create_task(wait_for_consumer_replica(ahead, info, 11, 20.0))
        await asyncio.to_thread(fill, cluster.leader_of(stream).url, stream, 1)
        await waiting


async def test_leader_without_sequence_proves_nothing(cluster: Cluster) -> None:
    """A response reported the sequence; the leader, which receives a request too, lacks it."""
    stream = make_stream(cluster.url, 10)
    make_consumer(cluster.url, stream, "c")

    async with connected(cluster.url, request_timeout=2.0) as jetstream:
        answer = await retry_transient(lambda: jetstream.consumer_info(stream, "c"), 15.0)
        info = ConsumerInfo.parse(answer)
        with pytest.raises(MinLastSequenceError):
            await wait_for_consumer_replica(AheadOnce(jetstream.connection), info, 11, 0.3)
