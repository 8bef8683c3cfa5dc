"""The stream that a subscription reads: by its subject, or by its name (ADR-15)."""

from __future__ import annotations

import json

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import NoMatchingStreamError, StreamNotFoundError, SubscribeError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.subscriptions.subscribe import (
    find_stream,
    subscribe,
    subscribe_pull,
)
from tests.integration.jetstream.subscriptions.sequences import sequences
from tests.support.nats.subscriptions import connected, make_stream
from tests.support.proxy.fault_proxy import Proxy

pytestmark = pytest.mark.servers


async def test_stream_is_found_by_subject(url: str, jetstream: JetStream) -> None:
    stream = make_stream(url, 3)

    assert await find_stream(jetstream, f"{stream}.k1") == stream
    async with await subscribe(jetstream, f"{stream}.k1") as subscription:
        assert subscription.info.stream == stream
        assert await sequences(subscription, 1) == [2]


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
        NoMatchingStreamError, match="could not find a stream for subject 'nowhere'"
    ):
        await subscribe(jetstream, "nowhere")
    with pytest.raises(NoMatchingStreamError, match=f"{one}, {other}|, "):
        await subscribe(jetstream, "*.k1")
    with pytest.raises(SubscribeError, match="neither subject nor stream is set"):
        await subscribe(jetstream)
    with pytest.raises(StreamNotFoundError):
        await subscribe(jetstream, stream="MISSING")


async def test_stream_without_subject_is_read_whole(url: str, jetstream: JetStream) -> None:
    stream = make_stream(url, 20)

    async with await subscribe(jetstream, stream=stream) as subscription:
        assert await sequences(subscription, 20) == list(range(1, 21))
        assert "filter_subject" not in subscription.info.config
