"""The stream that a subscription reads: by its subject, or by its name (ADR-15)."""

from __future__ import annotations

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import NoMatchingStreamError, StreamNotFoundError, SubscribeError
from nats_stream_source.jetstream.subscriptions.subscribe import find_stream, subscribe
from tests.integration.jetstream.subscriptions.sequences import sequences
from tests.support.nats.subscriptions import connected, make_stream

pytestmark = pytest.mark.servers


async def test_the_stream_is_found_by_its_subject(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 3)

    async with connected(shared_server.url) as jetstream:
        assert await find_stream(jetstream, f"{stream}.k1") == stream
        async with await subscribe(jetstream, f"{stream}.k1") as subscription:
            assert subscription.info.stream == stream
            assert await sequences(subscription, 1) == [2]


async def test_no_stream_or_several_are_an_error(shared_server: NatsServer) -> None:
    one, other = make_stream(shared_server.url), make_stream(shared_server.url)

    async with connected(shared_server.url) as jetstream:
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


async def test_a_stream_without_a_subject_is_read_whole(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 20)

    async with (
        connected(shared_server.url) as jetstream,
        await subscribe(jetstream, stream=stream) as subscription,
    ):
        assert await sequences(subscription, 20) == list(range(1, 21))
        assert "filter_subject" not in subscription.info.config
