"""The stream that a subscription reads, what is refused, and what is created (ADR-15)."""

from __future__ import annotations

import json

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    ApiError,
    NoMatchingStreamError,
    StreamNotFoundError,
    SubscribeError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.subscriptions.subscribe import (
    ConsumerConfig,
    subscribe,
    subscribe_pull,
)
from tests.support.nats.limits import CONSUMER_LIMITS
from tests.support.nats.subscriptions import (
    connected,
    consumer_info,
    consumers_of,
    make_stream,
    sequences,
)
from tests.support.proxy.fault_proxy import Proxy

pytestmark = pytest.mark.servers


async def test_subscription_requests(shared_server: NatsServer) -> None:
    """The stream by its subject, the inbox before the consumer, and their end in reverse order."""
    stream = make_stream(shared_server.url, 3)
    prefix = "$JS.API."

    with Proxy(shared_server.port) as proxy:
        async with connected(proxy.url) as jetstream:
            async with await subscribe(jetstream, f"{stream}.*") as push:
                assert await sequences(push, 1) == [1]
                inbox = push.info.config["deliver_subject"]
                name = push.info.name
            asked = [one.removeprefix(prefix) for one in proxy.asked(prefix)]
            assert asked == [
                "STREAM.NAMES",
                f"CONSUMER.CREATE.{stream}.{name}.{stream}.*",
                f"CONSUMER.DELETE.{stream}.{name}",
            ]
            (names,) = [frame for frame in proxy.sent if b"STREAM.NAMES" in frame]
            assert json.loads(names.split(b"\r\n")[1]) == {"subject": f"{stream}.*"}

            def first(text: str) -> int:
                return next(i for i, one in enumerate(proxy.sent) if one.startswith(text.encode()))

            (sid,) = [one.split()[2] for one in proxy.sent if f"SUB {inbox} ".encode() in one]
            steps = [
                first(f"SUB {inbox} "),
                first("PUB $JS.API.CONSUMER.CREATE."),
                first(f"UNSUB {sid.decode()}"),
                first("PUB $JS.API.CONSUMER.DELETE."),
            ]
            assert steps == sorted(steps)

            proxy.sent.clear()
            async with await subscribe_pull(jetstream, stream=stream, durable="d"):
                pass
            asked = [one.removeprefix(prefix) for one in proxy.asked(prefix)]
            assert asked == [
                f"CONSUMER.INFO.{stream}.d",
                f"CONSUMER.CREATE.{stream}.d",
                f"CONSUMER.DELETE.{stream}.d",
            ]


async def test_stream_missing_or_ambiguous_is_error(url: str, jetstream: JetStream) -> None:
    one, other = make_stream(url), make_stream(url)

    with pytest.raises(
        NoMatchingStreamError, match="for subject 'nowhere': no stream has a matching subject"
    ):
        await subscribe(jetstream, "nowhere")
    with pytest.raises(NoMatchingStreamError, match=f"{one}, {other}|, "):
        await subscribe(jetstream, "*.k1")
    with pytest.raises(SubscribeError, match="neither subject nor stream is set"):
        await subscribe(jetstream)
    with pytest.raises(StreamNotFoundError):
        await subscribe(jetstream, stream="MISSING")


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
