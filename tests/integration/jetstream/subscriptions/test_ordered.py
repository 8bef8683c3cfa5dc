"""Ordered subscriptions, and ``min_last_seq`` of all kinds, also where a replica lags (ADR-53)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from nats.aio.client import Client

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError, MinLastSequenceError, NextTimeoutError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.consumers import ConsumerInfo
from nats_stream_source.jetstream.retry import retry_transient
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.subscriptions.subscribe import (
    ConsumerConfig,
    subscribe,
    subscribe_ordered,
    subscribe_pull,
    wait_for_consumer_replica,
)
from tests.support.nats.backup import back_up
from tests.support.nats.buckets import api, consumers_of, with_client
from tests.support.nats.cluster import Cluster
from tests.support.nats.subscriptions import (
    connected,
    consumer_info,
    fill,
    make_consumer,
    make_stream,
    sequences,
)
from tests.support.nats.topology import CONSUMER_LIMITS, HubAndLeaf, hub_and_leaf, make_mirror
from tests.support.wait import wait_until_async

pytestmark = pytest.mark.servers


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ConsumerConfig(), list(range(1, 31))),
        (ConsumerConfig(deliver_policy="by_start_sequence", opt_start_seq=21), list(range(21, 31))),
        (ConsumerConfig(deliver_policy="last"), [30]),
        (ConsumerConfig(deliver_policy="last_per_subject"), list(range(21, 31))),
        (ConsumerConfig(deliver_policy="new"), []),
    ],
)
async def test_ordered_subscription_start_positions(
    url: str, jetstream: JetStream, config: ConsumerConfig, expected: list[int]
) -> None:
    stream = make_stream(url, 30)

    async with await subscribe_ordered(jetstream, f"{stream}.>", config=config) as subscription:
        found = await sequences(subscription, len(expected))
        with pytest.raises(NextTimeoutError):
            await subscription.next(0.05)
        await asyncio.to_thread(fill, url, stream, 2)
        assert found + await sequences(subscription, 2) == [*expected, 31, 32]
    assert consumers_of(url, stream) == []


async def test_ordered_subscription_start_time(jetstream: JetStream, published: str) -> None:
    third = await jetstream.message(published, seq=3)
    assert third is not None
    config = ConsumerConfig(deliver_policy="by_start_time", opt_start_time=third.time)
    async with await subscribe_ordered(jetstream, stream=published, config=config) as found:
        assert await sequences(found, 3) == [3, 4, 5]


@pytest.mark.parametrize(
    ("policy", "count"), [("all", 9), ("last_per_subject", 0), ("last_per_subject", 5)]
)
async def test_ordered_subscription_is_complete_after_lost_consumer(
    url: str, jetstream: JetStream, policy: str, count: int
) -> None:
    """A new consumer does not skip what is not the last of its subject any more."""
    stream = make_stream(url, count)
    config = ConsumerConfig(deliver_policy=policy, idle_heartbeat=0.1)
    async with await subscribe_ordered(jetstream, stream=stream, config=config) as subscription:
        waiting = asyncio.create_task(sequences(subscription, count + 1))
        await wait_until_async(lambda: bool(consumers_of(url, stream)), "a consumer")
        await asyncio.to_thread(fill, url, stream, 1)
        assert await waiting == list(range(1, count + 2))
        (name,) = consumers_of(url, stream)
        api(url, f"CONSUMER.DELETE.{stream}.{name}")
        for _ in range(3):
            await asyncio.to_thread(fill, url, stream, 1)  # always the same subject
        assert await sequences(subscription, 3) == list(range(count + 2, count + 5))
        assert subscription.reader.cursor.rebuilds


@pytest.mark.parametrize("policy", ["all", "new"])
async def test_stream_rolled_back_and_grown_again(url: str, policy: str, published: str) -> None:
    restore = back_up(url, published)
    fill(url, published, 5)
    config = ConsumerConfig(deliver_policy=policy, idle_heartbeat=0.1)

    async with (
        connected(url) as jetstream,
        await subscribe_ordered(jetstream, f"{published}.>", config=config) as subscription,
    ):
        await sequences(subscription, 10 if policy == "all" else 0)

        def roll_back() -> None:
            restore()
            fill(url, published, 10)

        waiting = asyncio.ensure_future(subscription.next(60))
        await wait_until_async(lambda: consumers_of(url, published), "a consumer")
        await asyncio.to_thread(roll_back)
        with pytest.raises(DataLossError, match="rolled back during the read: sequence 10 "):
            await waiting
    assert consumers_of(url, published) == []


@pytest.mark.parametrize("limits", CONSUMER_LIMITS, ids=str)
async def test_ordered_subscription_to_stream_with_consumer_limits(
    url: str, jetstream: JetStream, limits: dict[str, int]
) -> None:
    stream = make_stream(url, 30, consumer_limits=limits)
    config = ConsumerConfig(deliver_policy="last")
    async with await subscribe_ordered(
        jetstream, f"{stream}.>", config=config, min_last_seq=30
    ) as subscription:
        assert await sequences(subscription, 1) == [30]


@pytest.fixture(scope="module")
def linked() -> Iterator[HubAndLeaf]:
    with hub_and_leaf() as both:
        yield both


@pytest.mark.parametrize("kind", [subscribe, subscribe_pull, subscribe_ordered])
async def test_consumer_waits_for_sequence(
    url: str, jetstream: JetStream, kind: Any, published: str
) -> None:
    with pytest.raises(MinLastSequenceError) as raised:
        await kind(jetstream, stream=published, min_last_seq=6, reach_timeout=0.5)
    assert (raised.value.code, raised.value.err_code) == (412, 10180)
    assert consumers_of(url, published) == []
    waiting = asyncio.create_task(kind(jetstream, stream=published, min_last_seq=6))
    await asyncio.sleep(0)
    assert not waiting.done()
    await asyncio.to_thread(fill, url, published, 1)
    subscription = await waiting
    if kind is subscribe:
        info = await jetstream.consumer_info(published, subscription.info.name)
        assert info["delivered"]["stream_seq"] + info["num_pending"] == 6
    if kind is subscribe_pull:
        assert subscription.info.num_pending == 6
    found = [(await anext(subscription)).metadata.stream_seq for _ in range(6)]
    assert found == [1, 2, 3, 4, 5, 6]
    await subscription.unsubscribe()
    assert consumers_of(url, published) == []


@pytest.mark.parametrize("kind", [subscribe, subscribe_pull, subscribe_ordered])
async def test_consumer_of_mirror_waits_for_mirror(linked: HubAndLeaf, kind: Any) -> None:
    """A consumer is created on a mirror that lags; it delivers once that has the sequence."""
    stream = make_stream(linked.hub.url, 5)
    make_mirror(linked.leaf.url, stream, stream, source_domain="hub")
    linked.line.hold()
    try:
        await asyncio.to_thread(fill, linked.hub.url, stream, 1)
        async with connected(linked.leaf.url) as jetstream:
            waiting = asyncio.create_task(kind(jetstream, stream=stream, min_last_seq=6))
            with pytest.raises(MinLastSequenceError):
                await kind(jetstream, stream=stream, min_last_seq=6, reach_timeout=0.2)
            assert not waiting.done()
            linked.line.release()
            async with await waiting as subscription:
                found = [(await anext(subscription)).metadata.stream_seq for _ in range(6)]
                assert found == [1, 2, 3, 4, 5, 6]
    finally:
        linked.line.release()


def test_min_last_seq_is_ignored_by_released_servers(url: str) -> None:
    """Why it is kept by the library: the field is refused, or has no effect."""
    stream = make_stream(url, 1)

    async def work(client: Client) -> dict[str, Any]:
        inbox = await client.subscribe("_INBOX.probe")
        config = {"name": "n", "deliver_subject": "_INBOX.probe", "min_last_seq": 1000}
        request = {"stream_name": stream, "config": {**config, "ack_policy": "none"}}
        answer = await client.request(
            f"$JS.API.CONSUMER.CREATE.{stream}.n", json.dumps(request).encode()
        )
        decoded: dict[str, Any] = json.loads(answer.data)
        if "error" not in decoded:
            await inbox.next_msg(5)  # delivered, though the stream is not there yet
        return decoded

    answer = with_client(url, work)
    assert "error" not in answer or answer["error"]["err_code"] == 10025


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
        durable = {"durable": "d"}
        kinds: list[Any] = [(subscribe, {}), (subscribe_pull, durable), (subscribe_ordered, {})]
        for kind, how in kinds:
            async with await kind(jetstream, stream=stream, min_last_seq=10, **how) as subscription:
                found = [(await anext(subscription)).metadata.stream_seq for _ in range(10)]
                assert found == list(range(1, 11))
                if how:
                    config = consumer_info(cluster.url, stream, "d")["config"]
                    assert config["num_replicas"] in (0, 3)
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
