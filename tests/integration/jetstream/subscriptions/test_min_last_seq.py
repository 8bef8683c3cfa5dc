"""Read-after-write: a subscription waits for ``min_last_seq`` (ADR-53)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from nats.aio.client import Client

from nats_stream_source.errors import MinLastSequenceError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.subscriptions.subscribe import (
    subscribe,
    subscribe_ordered,
    subscribe_pull,
)
from tests.support.nats.buckets import with_client
from tests.support.nats.subscriptions import connected, consumers_of, fill, make_stream
from tests.support.nats.topology import HubAndLeaf, hub_and_leaf, make_mirror

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def linked() -> Iterator[HubAndLeaf]:
    with hub_and_leaf() as both:
        yield both


@pytest.mark.parametrize("kind", [subscribe, subscribe_pull, subscribe_ordered])
async def test_consumer_waits_for_sequence(url: str, jetstream: JetStream, kind: Any) -> None:
    stream = make_stream(url, 5)

    with pytest.raises(MinLastSequenceError) as raised:
        await kind(jetstream, stream=stream, min_last_seq=6, reach_timeout=0.5)
    assert (raised.value.code, raised.value.err_code) == (412, 10180)
    assert consumers_of(url, stream) == []
    waiting = asyncio.create_task(kind(jetstream, stream=stream, min_last_seq=6))
    await asyncio.sleep(0)
    assert not waiting.done()
    await asyncio.to_thread(fill, url, stream, 1)
    subscription = await waiting
    if kind is subscribe:
        info = await jetstream.consumer_info(stream, subscription.info.name)
        assert info["delivered"]["stream_seq"] + info["num_pending"] == 6
    if kind is subscribe_pull:
        assert subscription.info.num_pending == 6
    found = [(await anext(subscription)).metadata.stream_seq for _ in range(6)]
    assert found == [1, 2, 3, 4, 5, 6]
    await subscription.unsubscribe()
    assert consumers_of(url, stream) == []


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
