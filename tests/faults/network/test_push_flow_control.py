"""Push subscriptions respond to flow control, also when responses are lost (ADR-15)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import FlowControlLostError, NextTimeoutError
from nats_stream_source.jetstream.subscriptions.subscribe import ConsumerConfig, subscribe
from tests.faults.network.push import all_of, hmsg
from tests.support.nats.buckets import flushed
from tests.support.nats.subscriptions import connected, fill, make_stream
from tests.support.proxy.fault_proxy import Proxy, is_status
from tests.support.proxy.verdicts import Sequences
from tests.support.wait import wait_until_async

FLOWING = ConsumerConfig(ack_policy="none", idle_heartbeat=0.5, flow_control=True)


@asynccontextmanager
async def flow_answers(url: str) -> AsyncIterator[list[str]]:
    """The responses to flow control, as another client receives them."""
    answers: list[str] = []

    async def heard(message: Any) -> None:
        answers.append(message.subject)

    async with connected(url) as other:
        await other.connection.client.subscribe("$JS.FC.>", cb=heard)
        await flushed(other.connection.client)
        yield answers


async def test_flow_control_is_answered_once_each(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 1500, 10_000)

    def twice(frame: bytes) -> bool | bytes:
        return frame + frame if is_status(frame, b"FlowControl") else True

    with Proxy(shared_server.port, twice) as proxy:
        async with (
            connected(proxy.url) as jetstream,
            flow_answers(shared_server.url) as answers,
            await subscribe(jetstream, stream=stream, config=FLOWING) as subscription,
        ):
            found, errors = await all_of(subscription, 1500)
            assert (found, errors) == (list(range(1, 1501)), [])
            requests = [frame for frame in proxy.seen if is_status(frame, b"FlowControl")]
            assert requests
            replies = [frame.split(b" ")[3].decode() for frame in requests]
            with pytest.raises(NextTimeoutError):
                await subscription.next(0.3)
            await wait_until_async(lambda: len(answers) >= len(replies), "all answers")
            assert [one for one in answers if f".{stream}." in one] == replies


async def test_flow_control_waits_for_messages_before_it(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 1500, 10_000)
    with Proxy(shared_server.port) as proxy:
        async with (
            connected(proxy.url) as jetstream,
            flow_answers(shared_server.url) as answers,
        ):

            def asked() -> bool:
                return any(is_status(frame, b"FlowControl") for frame in proxy.seen)

            def stalled() -> bool:
                return any(b"Nats-Consumer-Stalled" in frame for frame in proxy.seen)

            async with await subscribe(jetstream, stream=stream, config=FLOWING) as subscription:
                await subscription.next(15)
                # The server asks, and says again and again that it waits; the caller rests.
                await wait_until_async(asked, "flow control")
                await wait_until_async(stalled, "stalled")
                assert answers == []
                assert (await all_of(subscription, 1500))[1] == []
                assert answers
                assert len(answers) == len(set(answers))


async def test_swallowed_flow_control_is_answered_by_heartbeat(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 1500, 10_000)
    with Proxy(shared_server.port, lambda frame: not is_status(frame, b"FlowControl")) as proxy:
        async with (
            connected(proxy.url) as jetstream,
            flow_answers(shared_server.url) as answers,
        ):
            async with await subscribe(jetstream, stream=stream, config=FLOWING) as subscription:
                assert await all_of(subscription, 1500) == (list(range(1, 1501)), [])
            dropped = {frame.split(b" ")[3].decode() for frame in proxy.dropped}
            assert dropped
            assert set(answers) <= dropped
            assert len(answers) == len(set(answers))
            assert any(b"Nats-Consumer-Stalled" in frame for frame in proxy.seen)


async def test_flow_control_subject_of_other_form_is_answered(shared_server: NatsServer) -> None:
    """ADR-15, "Flow Control": the subject is not inspected, and the response is empty."""
    stream = make_stream(shared_server.url, 5)
    block = b"NATS/1.0 100 FlowControl Request\r\n\r\n"
    fault = Sequences([3], lambda frame: hmsg(frame, block, b"other.form.x") + frame)
    with Proxy(shared_server.port, fault) as proxy:
        async with connected(proxy.url) as jetstream, connected(shared_server.url) as other:
            heard = await other.connection.client.subscribe("other.form.>")
            await flushed(other.connection.client)
            async with await subscribe(jetstream, stream=stream, config=FLOWING) as subscription:
                assert await all_of(subscription, 5) == ([1, 2, 3, 4, 5], [])
                answer = await heard.next_msg(60)
                assert (answer.subject, answer.data, answer.headers) == ("other.form.x", b"", None)
        assert fault.done


async def test_flow_control_response_lost_is_repeated(shared_server: NatsServer) -> None:
    """Two responses are lost, as on a route; each is repeated until the server has received it."""
    stream = make_stream(shared_server.url, 1500, 10_000)
    lost: list[bytes] = []

    def drops_two(frame: bytes) -> bool:
        if frame.startswith(b"PUB $JS.FC.") and len(lost) < 2:
            lost.append(frame)
            return False
        return True

    with Proxy(shared_server.port, upward=drops_two) as proxy:
        async with (
            connected(proxy.url) as jetstream,
            await subscribe(jetstream, stream=stream, config=FLOWING) as subscription,
        ):
            assert await all_of(subscription, 1500) == (list(range(1, 1501)), [])
    assert len(lost) == 2


async def test_lost_flow_control_responses_raise_alarm(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 10)
    stalled = b"Nats-Consumer-Stalled: $JS.FC.x.y.z\r\n"

    def stalls(frame: bytes) -> bool | bytes:
        if not is_status(frame, b"Idle"):
            return True
        block = frame.split(b"\r\n", 1)[1][:-2]
        return hmsg(frame, block[:-2] + stalled + b"\r\n")

    with Proxy(shared_server.port, stalls) as proxy:
        async with (
            connected(proxy.url) as jetstream,
            await subscribe(jetstream, stream=stream, config=FLOWING) as subscription,
        ):
            await all_of(subscription, 10)
            with pytest.raises(FlowControlLostError, match=r"\$JS\.FC\.>"):
                await subscription.next(15)


async def test_flow_control_is_answered_again_after_reconnect(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url)
    stalled = b"Nats-Consumer-Stalled: $JS.FC.again.y.z\r\n"

    def stalls(frame: bytes) -> bool | bytes:
        if not is_status(frame, b"Idle"):
            return True
        return hmsg(frame, frame.split(b"\r\n", 1)[1][:-4] + stalled + b"\r\n")

    with Proxy(shared_server.port, stalls) as proxy:
        async with (
            connected(proxy.url) as jetstream,
            flow_answers(shared_server.url) as answers,
            await subscribe(
                jetstream, stream=stream, durable="d", config=FLOWING, on_error=lambda error: None
            ) as subscription,
        ):
            waiting = asyncio.create_task(subscription.next())
            await wait_until_async(lambda: "$JS.FC.again.y.z" in answers, "an answer")
            # Whether it reached the server before the cut, nobody knows.
            await asyncio.to_thread(proxy.cut)
            await wait_until_async(lambda: answers.count("$JS.FC.again.y.z") == 2, "another answer")
            await asyncio.to_thread(fill, shared_server.url, stream, 1)
            assert (await waiting).metadata.stream_seq == 1
