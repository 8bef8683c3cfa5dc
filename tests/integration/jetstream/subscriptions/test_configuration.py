"""What ``subscribe`` refuses before it sends anything, and the consumers it creates (ADR-15)."""

from __future__ import annotations

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ApiError, SubscribeError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.subscriptions.subscribe import (
    ConsumerConfig,
    subscribe,
    subscribe_pull,
)
from tests.integration.jetstream.subscriptions.sequences import sequences
from tests.support.nats.limits import CONSUMER_LIMITS
from tests.support.nats.subscriptions import (
    connected,
    consumer_info,
    consumers_of,
    make_stream,
)
from tests.support.proxy.fault_proxy import Proxy

pytestmark = pytest.mark.servers


async def test_mistake_is_found_before_sending(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url)
    with Proxy(shared_server.port) as proxy:
        async with connected(proxy.url) as jetstream:
            before = proxy.asked("$JS.API.")
            with pytest.raises(SubscribeError, match="neither subject nor stream is set"):
                await subscribe(jetstream)
            assert proxy.asked("$JS.API.") == before
    assert consumers_of(shared_server.url, stream) == []


async def test_push_consumer_is_created_as_requested(url: str, jetstream: JetStream) -> None:
    stream = make_stream(url)
    given = {
        "ack_policy": "all",
        "ack_wait": 7.0,
        "deliver_policy": "by_start_sequence",
        "description": "a test",
        "max_ack_pending": 20,
        "max_deliver": 3,
        "opt_start_seq": 2,
        "rate_limit_bps": 100_000,
        "replay_policy": "original",
        "sample_freq": "50",
    }

    async with await subscribe(
        jetstream, f"{stream}.a", durable="d", queue="q", config=ConsumerConfig(**given)
    ):
        config = consumer_info(url, stream, "d")["config"]
    inbox = config.pop("deliver_subject")
    assert inbox.startswith("_INBOX.")
    expected = {**given, "ack_wait": 7_000_000_000, "filter_subject": f"{stream}.a"}
    expected |= {"deliver_group": "q", "durable_name": "d"}
    assert {name: config.get(name) for name in expected} == expected


async def test_pull_consumer_has_no_deliver_subject(url: str, jetstream: JetStream) -> None:
    stream = make_stream(url)
    given = ConsumerConfig(max_waiting=9)

    async with await subscribe_pull(jetstream, f"{stream}.a", durable="d", config=given):
        config = consumer_info(url, stream, "d")["config"]
    assert "deliver_subject" not in config
    assert (config["ack_policy"], config["filter_subject"]) == ("explicit", f"{stream}.a")
    assert config["max_waiting"] == 9


async def test_delivery_has_nine_tokens(url: str, jetstream: JetStream) -> None:
    """Of servers up to 2.15 without a domain in the configuration."""
    stream = make_stream(url, 2)

    async with await subscribe(jetstream, f"{stream}.>") as subscription:
        message = await subscription.next(15)
        assert len(message.reply.split(".")) == 9
        assert message.metadata.stream == stream
        assert message.metadata.consumer == subscription.info.name
        assert (message.metadata.stream_seq, message.metadata.consumer_seq) == (1, 1)
        assert message.metadata.pending == 1


@pytest.mark.parametrize("limits", CONSUMER_LIMITS, ids=str)
@pytest.mark.parametrize("min_last_seq", [None, 3])
async def test_consumer_gets_limits_of_stream(
    url: str,
    jetstream: JetStream,
    limits: dict[str, int],
    min_last_seq: int | None,
) -> None:
    stream = make_stream(url, 3, consumer_limits=limits)
    async with await subscribe(jetstream, stream=stream, min_last_seq=min_last_seq) as subscription:
        assert await sequences(subscription, 3) == [1, 2, 3]
        config = consumer_info(url, stream, subscription.info.name)["config"]
    async with await subscribe_pull(jetstream, stream=stream) as subscription:
        assert len(await subscription.fetch(3)) == 3
    assert limits.items() <= config.items()


@pytest.mark.parametrize(
    ("config", "limits", "cure"),
    [
        (ConsumerConfig(ack_policy="none"), {"max_ack_pending": 10}, "'max_ack_pending' .* to -1"),
        (
            ConsumerConfig(inactive_threshold=60),
            {"inactive_threshold": 1_000_000_000},
            "lower 'inactive_threshold'",
        ),
    ],
)
async def test_consumer_beyond_limits_of_stream_is_refused(
    url: str,
    jetstream: JetStream,
    config: ConsumerConfig,
    limits: dict[str, int],
    cure: str,
) -> None:
    stream = make_stream(url, 3, consumer_limits=limits)
    with pytest.raises(ApiError, match=cure):
        await subscribe(jetstream, stream=stream, config=config)
    if config.ack_policy:
        follows_cure = ConsumerConfig(ack_policy="none", max_ack_pending=-1)
        async with await subscribe(jetstream, stream=stream, config=follows_cure) as subscription:
            assert await sequences(subscription, 3) == [1, 2, 3]
