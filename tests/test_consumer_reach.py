"""``min_last_seq`` where the consumer is not served by the stream's leader (ADR-53)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from cluster import Cluster
from subscriptions import consumer_info, consumers_of, fill, make_consumer, make_stream, run

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import MinLastSequenceError
from nats_stream_source.jetstream.api import JetStream, StreamInfo
from nats_stream_source.jetstream.consumer_config import ConsumerInfo
from nats_stream_source.jetstream.consumer_reach import consumer_reached
from nats_stream_source.jetstream.patience import patiently
from nats_stream_source.jetstream.subscribe import subscribe

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


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


def test_a_follower_that_lags_is_waited_for(cluster: Cluster) -> None:
    stream = make_stream(cluster.url, 10, num_replicas=3)
    cluster.wait_current(stream)
    name, follower = on_a_follower(cluster, stream)
    leader = cluster.leader_of(stream)

    async def work(jetstream: JetStream) -> None:
        asked: dict[str, Any] = {"stream": stream, "bind": name, "pull": True}
        pull = await subscribe(jetstream, min_last_seq=10, **asked)
        assert pull.info.num_pending == 10
        info = ConsumerInfo.parse(await jetstream.consumer_info(stream, name))
        assert cluster.servers[info.leader or ""] is follower
        with pytest.raises(MinLastSequenceError):
            await consumer_reached(jetstream, info, 11, 0.3)

        follower.pause()
        try:
            await asyncio.to_thread(fill, leader.url, stream, 5)
            with pytest.raises(MinLastSequenceError, match="its replica lags"):
                await consumer_reached(jetstream, info, 15, 0.5)
        finally:
            follower.resume()
        await consumer_reached(jetstream, info, 15, 20.0)
        assert ConsumerInfo.parse(await jetstream.consumer_info(stream, name)).num_pending == 15
        await pull.unsubscribe()

    run(leader.url, work, request_timeout=1.0)
    # What was made to look is gone.
    assert not [one for one in consumers_of(leader.url, stream) if "reach" in one]


def test_a_replicated_consumer_has_a_leader_too(cluster: Cluster) -> None:
    stream = make_stream(cluster.url, 10, num_replicas=3)

    async def work(jetstream: JetStream) -> None:
        for kind in ({}, {"pull": True, "durable": "d"}, {"ordered": True}):
            asked: Any = subscribe
            async with await asked(
                jetstream, stream=stream, min_last_seq=10, **kind
            ) as subscription:
                found = [(await anext(subscription)).metadata.stream_seq for _ in range(10)]
                assert found == list(range(1, 11))
                if "durable" in kind:
                    assert consumer_info(cluster.url, stream, "d")["config"]["num_replicas"] in (
                        0,
                        3,
                    )

    run(cluster.leader_of(stream).url, work)
    assert consumers_of(cluster.url, stream) == []


class Ahead(JetStream):
    """Says that the leader has one message more than it has: all others lag behind it."""

    async def stream_info(self, stream: str) -> StreamInfo:
        info = await super().stream_info(stream)
        return replace(info, last_seq=info.last_seq + 1)


def test_the_leader_does_not_speak_for_a_follower(cluster: Cluster) -> None:
    stream = make_stream(cluster.url, 10, num_replicas=3)
    cluster.wait_current(stream)
    name, _ = on_a_follower(cluster, stream)

    async def work(jetstream: JetStream) -> None:
        ahead = Ahead(jetstream.connection)
        # Another server answers this, and to an inbox that it may not have heard of yet: the first
        # answer on a new connection to a cluster can get lost.
        answer = await patiently(lambda: jetstream.consumer_info(stream, name), 15.0)
        info = ConsumerInfo.parse(answer)
        await consumer_reached(jetstream, info, 0, 10.0)
        await consumer_reached(ahead, info, 10, 10.0)
        with pytest.raises(MinLastSequenceError, match="its replica lags"):
            await consumer_reached(ahead, info, 11, 0.5)
        waiting = asyncio.create_task(consumer_reached(ahead, info, 11, 20.0))
        await asyncio.to_thread(fill, cluster.leader_of(stream).url, stream, 1)
        await waiting

    run(cluster.leader_of(stream).url, work, request_timeout=2.0)


def test_a_leader_that_does_not_have_it_proves_nothing(cluster: Cluster) -> None:
    """One said that it had it; the one that leads now is asked, too."""
    stream = make_stream(cluster.url, 10)
    make_consumer(cluster.url, stream, "c")

    async def work(jetstream: JetStream) -> None:
        answer = await patiently(lambda: jetstream.consumer_info(stream, "c"), 15.0)
        info = ConsumerInfo.parse(answer)
        with pytest.raises(MinLastSequenceError):
            await consumer_reached(Ahead(jetstream.connection), info, 11, 0.3)

    run(cluster.url, work, request_timeout=2.0)


def test_an_ordered_subscription_that_is_busy_is_looked_at(cluster: Cluster) -> None:
    stream = make_stream(cluster.url, 10)

    async def work(jetstream: JetStream) -> None:
        ahead = Ahead(jetstream.connection)
        # Ten messages have arrived, and tell that its store is not at 11 yet.
        with pytest.raises(MinLastSequenceError):
            await subscribe(ahead, stream=stream, ordered=True, min_last_seq=11, reach_timeout=0.5)

    run(cluster.url, work)
    assert consumers_of(cluster.url, stream) == []
