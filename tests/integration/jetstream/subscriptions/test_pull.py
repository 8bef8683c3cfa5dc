"""Pull subscriptions on a real server (ADR-15, "Pull Mode Statuses" and what goes wrong)."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    ConflictStatusError,
    ConnectError,
    ConsumerDeletedError,
    MissedHeartbeatError,
    NoRespondersStatusError,
    RequestTimeoutError,
    SlowConsumerError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.subscriptions.message import JsMessage
from nats_stream_source.jetstream.subscriptions.pull import PullSubscription
from nats_stream_source.jetstream.subscriptions.subscribe import ConsumerConfig, subscribe_pull
from tests.support.nats.buckets import api, consumers_of, flushed
from tests.support.nats.subscriptions import (
    connected,
    consumer_info,
    fill,
    make_consumer,
    make_stream,
)
from tests.support.proxy.fault_proxy import Proxy, is_status
from tests.support.wait import wait_until_async

pytestmark = pytest.mark.servers


async def pull_on(jetstream: JetStream, stream: str, **config: Any) -> PullSubscription:
    return await subscribe_pull(
        jetstream, stream=stream, durable="d", config=ConsumerConfig(**config)
    )


async def a_request_waits(url: str, stream: str, name: str = "d") -> None:
    await wait_until_async(
        lambda: consumer_info(url, stream, name)["num_waiting"] == 1, "the request waits"
    )


def seqs(messages: list[JsMessage]) -> list[int]:
    return [message.metadata.stream_seq for message in messages]


async def test_fetch_returns_available_messages_and_hides_statuses(
    url: str, jetstream: JetStream, published: str
) -> None:
    async with await pull_on(jetstream, published) as pull:
        assert seqs(await pull.fetch(2)) == [1, 2]
        # 404: no more now. Neither shown nor counted.
        assert seqs(await pull.fetch(10, None)) == [3, 4, 5]
        assert await pull.fetch(10, None) == []
        # 408, with and without heartbeats in between.
        assert await pull.fetch(10, 0.05) == []
        assert await pull.fetch(10, 0.6) == []
        waiting = asyncio.create_task(pull.fetch(3, 5))
        await a_request_waits(url, published)
        await asyncio.to_thread(fill, url, published, 3)
        assert seqs(await waiting) == [6, 7, 8]


async def test_iteration_spans_many_requests(url: str, jetstream: JetStream) -> None:
    stream = make_stream(url, 1000)

    async with await pull_on(jetstream, stream) as pull:
        pull.batch, pull.expires = 7, 0.5
        found = []
        async for message in pull:
            await message.ack()
            found.append(message.metadata.stream_seq)
            if len(found) == 1000:
                await asyncio.to_thread(fill, url, stream, 5)
            if len(found) == 1005:
                break
        assert found == list(range(1, 1006))


async def test_pull_limits_hold_while_iterating(url: str, jetstream: JetStream) -> None:
    stream = make_stream(url, 20)

    async with await pull_on(jetstream, stream, max_batch=3, max_expires=1.0) as pull:
        assert (pull.batch, pull.expires) == (3, 1.0)
        assert [(await anext(pull)).metadata.stream_seq for _ in range(20)] == [*range(1, 21)]
        with pytest.raises(ConflictStatusError, match="Exceeded MaxRequestBatch of 3") as error:
            await pull.fetch(4)
        assert error.value.code == 409
        with pytest.raises(ConflictStatusError, match="Exceeded MaxRequestExpires"):
            await pull.fetch(1, 5.0)
        assert await pull.fetch(3, 0.05) == []


async def test_max_bytes_ends_request(url: str, jetstream: JetStream) -> None:
    stream = make_stream(url, 10, 1000)

    async with await pull_on(jetstream, stream) as pull:
        assert seqs(await pull.fetch(10, 1, max_bytes=3500)) == [1, 2, 3]
        # The batch is complete, bytes are left: "Batch Completed" is no error.
        assert seqs(await pull.fetch(2, 1, max_bytes=3500)) == [4, 5]
        with pytest.raises(ConflictStatusError, match="Message Size Exceeds MaxBytes"):
            await pull.fetch(10, 1, max_bytes=100)
        pull.max_bytes = 2500
        assert [(await anext(pull)).metadata.stream_seq for _ in range(5)] == [6, 7, 8, 9, 10]


async def test_consumer_deleted_while_requested(
    url: str, jetstream: JetStream, stream: str
) -> None:
    pull = await pull_on(jetstream, stream)
    for ask in (lambda: pull.fetch(1, 10), lambda: anext(pull)):
        waiting: asyncio.Task[Any] = asyncio.ensure_future(ask())
        await a_request_waits(url, stream)
        api(url, f"CONSUMER.DELETE.{stream}.d")
        with pytest.raises(ConsumerDeletedError):
            await waiting
        with pytest.raises(NoRespondersStatusError) as gone:
            await pull.fetch(1, 1)
        assert gone.value.code == 503
        make_consumer(url, stream, "d")
    await pull.unsubscribe()


async def test_iteration_abandoned_returns_messages(
    url: str, jetstream: JetStream, published: str
) -> None:
    make_consumer(url, published, "d", ack_wait=60_000_000_000)

    async with await pull_on(jetstream, published) as pull:
        first = await anext(pull)
        await first.ack()
        await wait_until_async(
            lambda: consumer_info(url, published, "d")["delivered"]["stream_seq"] == 5,
            "all have arrived",
        )
        await flushed(jetstream.connection.client)
    async with await pull_on(jetstream, published) as pull:
        assert sorted(seqs(await pull.fetch(4, 5))) == [2, 3, 4, 5]


async def test_timeout_around_iteration_loses_nothing(url: str, jetstream: JetStream) -> None:
    stream = make_stream(url, 3)

    async with await pull_on(jetstream, stream) as pull:
        found = []
        while len(found) < 6:
            try:
                message = await asyncio.wait_for(anext(pull), 0.05)
            except asyncio.TimeoutError:
                await asyncio.to_thread(fill, url, stream, 3)
                continue
            found.append(message.metadata.stream_seq)
        assert found == [1, 2, 3, 4, 5, 6]


async def test_pending_limit_exceeded_is_error(url: str, jetstream: JetStream) -> None:
    stream = make_stream(url, 300, 1000)

    async with await subscribe_pull(
        jetstream, stream=stream, durable="d", pending_bytes=50_000
    ) as pull:
        # Iterating keeps below it by itself …
        assert [(await anext(pull)).metadata.stream_seq for _ in range(300)] == [*range(1, 301)]
    # … and where a caller asks for more and rests, nothing is lost without a word.
    async with await subscribe_pull(jetstream, stream=stream, pending_bytes=50_000) as pull:
        pull.max_bytes = None
        with pytest.raises(SlowConsumerError):
            [await anext(pull) for _ in range(300)]


# With a proxy between


async def test_cancelled_caller_returns_messages(shared_server: NatsServer) -> None:
    url, stream = shared_server.url, make_stream(shared_server.url, 5)

    async def are_delivered(count: int) -> None:
        await wait_until_async(
            lambda: consumer_info(url, stream, "d")["num_ack_pending"] == count,
            f"{count} were delivered",
        )

    with Proxy(shared_server.port) as proxy:
        async with (
            connected(proxy.url) as jetstream,
            await pull_on(jetstream, stream, ack_wait=60.0) as pull,
        ):
            waiting = asyncio.create_task(pull.fetch(10, 20))
            await are_delivered(5)
            # The response follows the messages on the connection: all five were received.
            await jetstream.stream_info(stream)
            proxy.freeze()
            await asyncio.to_thread(fill, url, stream, 3)
            await are_delivered(8)
            waiting.cancel()
            await wait_until_async(lambda: not pull._requests, "the request is closed")
            proxy.thaw()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            again = await pull.fetch(8, 30)
            assert sorted(seqs(again)) == [1, 2, 3, 4, 5, 6, 7, 8]
            assert {message.metadata.delivered for message in again} == {2}


async def test_caller_cancelled_before_unsubscribe_returns_messages(
    shared_server: NatsServer,
) -> None:
    url, stream = shared_server.url, make_stream(shared_server.url, 5)
    make_consumer(url, stream, "d", ack_wait=60_000_000_000)
    async with connected(url) as jetstream:
        async with await subscribe_pull(jetstream, stream=stream, durable="d") as pull:
            waiting = asyncio.create_task(pull.fetch(10, 20))
            await a_request_waits(url, stream)
            await jetstream.stream_info(stream)
            await wait_until_async(lambda: all(one.empty for one in pull._requests), "five read")
            waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with await subscribe_pull(jetstream, stream=stream, durable="d") as again:
            assert sorted(seqs(await again.fetch(5, 30))) == [1, 2, 3, 4, 5]


async def test_missed_heartbeats_raise_alarm(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url)
    with Proxy(shared_server.port, lambda frame: not is_status(frame, b"Idle")) as proxy:
        async with connected(proxy.url) as jetstream, await pull_on(jetstream, stream) as pull:
            with pytest.raises(MissedHeartbeatError, match="neither message nor heartbeat"):
                await pull.fetch(1, 1.0)
            assert proxy.dropped
            # It goes on: the next request is a new one.
            proxy.verdict = lambda frame: True
            await wait_until_async(
                lambda: consumer_info(shared_server.url, stream, "d")["num_waiting"] == 0,
                "the end of the first one",
            )
            await asyncio.to_thread(fill, shared_server.url, stream, 1)
            assert seqs(await pull.fetch(1, 5)) == [1]


async def test_short_request_without_response(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url)
    with Proxy(shared_server.port, lambda frame: b"NATS/1.0 408" not in frame) as proxy:
        async with (
            connected(proxy.url, request_timeout=1.0) as jetstream,
            await pull_on(jetstream, stream) as pull,
        ):
            with pytest.raises(RequestTimeoutError, match="no response to the request"):
                await pull.fetch(1, 0.1)
            assert proxy.dropped


async def test_messages_before_error_are_not_lost(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 3)

    def leader_changes(frame: bytes) -> bool | bytes:
        line, block = frame.split(b"\r\n", 1)
        if b"NATS/1.0 408 Request Timeout" not in block:
            return True
        block = block[:-2].replace(b"408 Request Timeout", b"409 Leadership Change")
        *words, _, _ = line.split(b" ")
        size = b"%d" % len(block)
        return b" ".join([*words, size, size]) + b"\r\n" + block + b"\r\n"

    with Proxy(shared_server.port, leader_changes) as proxy:
        async with connected(proxy.url) as jetstream:
            errors: list[Exception] = []
            async with await subscribe_pull(
                jetstream, stream=stream, durable="d", on_error=errors.append
            ) as pull:
                assert seqs(await pull.fetch(10, 0.2)) == [1, 2, 3]
                assert [type(error).__name__ for error in errors] == ["LeadershipChangedError"]
                with pytest.raises(ConflictStatusError):
                    await pull.fetch(10, 0.1)


async def test_lost_connection_does_not_end_iteration(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 3)
    make_consumer(shared_server.url, stream, "d", ack_wait=300_000_000)
    with Proxy(shared_server.port) as proxy:
        async with connected(proxy.url) as jetstream, await pull_on(jetstream, stream) as pull:
            for expected in (1, 2, 3):
                message = await anext(pull)
                assert message.metadata.stream_seq == expected
                await message.ack_sync()
            waiting = asyncio.ensure_future(anext(pull))
            await asyncio.to_thread(proxy.cut)
            await wait_until_async(lambda: jetstream.connection.reconnects == 1, "a reconnect")
            await asyncio.to_thread(fill, shared_server.url, stream, 1)
            assert (await waiting).metadata.stream_seq == 4


async def test_closed_connection_is_error(url: str, jetstream: JetStream, stream: str) -> None:
    pull = await pull_on(jetstream, stream)
    waiting = asyncio.create_task(pull.fetch(1, 30))
    await a_request_waits(url, stream)
    await jetstream.connection.close()
    with pytest.raises(ConnectError, match="the connection is closed; connect again"):
        await asyncio.wait_for(waiting, 60)


async def test_request_refused_is_retried_later(
    url: str, jetstream: JetStream, stream: str
) -> None:
    make_consumer(url, stream, "d")
    errors: list[Exception] = []
    async with await subscribe_pull(
        jetstream, stream=stream, bind="d", on_error=errors.append
    ) as pull:
        await asyncio.to_thread(make_consumer, url, stream, "d", max_batch=10)
        waiting = asyncio.create_task(anext(pull))
        await wait_until_async(lambda: len(errors) >= 4, "a few refusals")
        assert len(errors) < 8
        assert {type(error) for error in errors} == {ConflictStatusError}
        pull.batch = 10
        await asyncio.to_thread(fill, url, stream, 1)
        assert (await waiting).metadata.stream_seq == 1


@pytest.mark.parametrize("count", [0, 3])
async def test_drain_ends_fetch_with_received_messages(
    url: str, jetstream: JetStream, count: int
) -> None:
    stream = make_stream(url, count)

    errors: list[Exception] = []
    pull = await subscribe_pull(jetstream, stream=stream, on_error=errors.append)
    fetching = asyncio.create_task(pull.fetch(10, 20))
    await a_request_waits(url, stream, pull.info.name)
    await pull.drain()
    assert seqs(await fetching) == list(range(1, count + 1))
    assert errors == []
    assert consumers_of(url, stream) == []


@pytest.mark.parametrize(
    ("batch", "timeout"), [(0, 1.0), *((1, t) for t in (0.0, -1.0, math.inf, math.nan, 1e12))]
)
async def test_fetch_arguments_invalid(
    url: str, jetstream: JetStream, batch: int, timeout: float
) -> None:
    stream = make_stream(url, 1)

    async with await pull_on(jetstream, stream) as pull:
        before = len(jetstream.connection.client._subs)
        with pytest.raises(ValueError, match=f"could not fetch: batch is {batch}"):
            await pull.fetch(batch, timeout)
        assert len(jetstream.connection.client._subs) == before


async def test_subscriptions_and_fetch_share_connection(url: str, jetstream: JetStream) -> None:
    stream = make_stream(url, 300)

    async with (
        connected(url) as other,
        await pull_on(jetstream, stream) as one,
        await pull_on(other, stream) as two,
    ):
        fetches = one.fetch(100, 5), one.fetch(100, 5), two.fetch(100, 5)
        parts = await asyncio.gather(*fetches)
        assert sorted(seq for part in parts for seq in seqs(part)) == list(range(1, 301))
    assert consumers_of(url, stream) == []
