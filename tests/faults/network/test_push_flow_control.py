"""Push subscriptions respond to flow control, also when responses are lost (ADR-15)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import FlowControlLostError, NextTimeoutError
from nats_stream_source.jetstream.subscriptions.subscribe import ConsumerConfig
from tests.faults.network.push import all_of, hmsg, through_proxy
from tests.support.nats.buckets import flushed
from tests.support.nats.subscriptions import connected, fill, make_stream
from tests.support.proxy.fault_proxy import Twice, is_status
from tests.support.proxy.verdicts import Published, Sequences, Status
from tests.support.wait import wait_until_async

FLOWING = ConsumerConfig(ack_policy="none", idle_heartbeat=0.5, flow_control=True)


STALLED = Status(
    "Idle",
    outcome=lambda frame: hmsg(
        frame,
        frame.split(b"\r\n", 1)[1][:-4] + b"Nats-Consumer-Stalled: $JS.FC.x.y.z\r\n\r\n",
    ),
)
"""Heartbeats of a consumer that waits for the response to a flow control request."""


@contextlib.asynccontextmanager
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
    twice = Status("FlowControl", outcome=Twice())
    async with (
        flow_answers(shared_server.url) as answers,
        through_proxy(shared_server, stream, twice, config=FLOWING) as (proxy, subscription),
    ):
        assert await all_of(subscription, 1500) == (list(range(1, 1501)), [])
        requests = [frame for frame in proxy.seen if is_status(frame, b"FlowControl")]
        assert requests
        replies = [frame.split(b" ")[3].decode() for frame in requests]
        with pytest.raises(NextTimeoutError):
            await subscription.next(0.3)
        await wait_until_async(lambda: len(answers) >= len(replies), "all answers")
        assert [one for one in answers if f".{stream}." in one] == replies


async def test_flow_control_waits_for_messages_before_it(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 1500, 10_000)
    async with (
        flow_answers(shared_server.url) as answers,
        through_proxy(shared_server, stream, config=FLOWING) as (proxy, subscription),
    ):

        def seen(text: bytes) -> bool:
            return any(text in frame for frame in proxy.seen)

        await subscription.next(15)
        # The server asks, and says again and again that it waits; the caller rests.
        await wait_until_async(lambda: seen(b" 100 FlowControl"), "flow control")
        await wait_until_async(lambda: seen(b"Nats-Consumer-Stalled"), "stalled")
        assert answers == []
        assert (await all_of(subscription, 1500))[1] == []
        assert answers
        assert len(answers) == len(set(answers))


async def test_swallowed_flow_control_is_answered_by_heartbeat(
    shared_server: NatsServer,
) -> None:
    stream = make_stream(shared_server.url, 1500, 10_000)
    async with (
        flow_answers(shared_server.url) as answers,
        through_proxy(shared_server, stream, Status("FlowControl"), config=FLOWING) as (
            proxy,
            subscription,
        ),
    ):
        assert await all_of(subscription, 1500) == (list(range(1, 1501)), [])
        dropped = {frame.split(b" ")[3].decode() for frame in proxy.dropped}
        assert dropped
        assert set(answers) <= dropped
        assert len(answers) == len(set(answers))
        assert any(b"Nats-Consumer-Stalled" in frame for frame in proxy.seen)


async def test_flow_control_subject_of_other_form_is_answered(
    shared_server: NatsServer,
) -> None:
    """ADR-15, "Flow Control": the subject is not inspected, and the response is empty."""
    stream = make_stream(shared_server.url, 5)
    block = b"NATS/1.0 100 FlowControl Request\r\n\r\n"
    fault = Sequences([3], lambda frame: hmsg(frame, block, b"other.form.x") + frame)
    async with connected(shared_server.url) as other:
        heard = await other.connection.client.subscribe("other.form.>")
        await flushed(other.connection.client)
        async with through_proxy(shared_server, stream, fault, config=FLOWING) as (_, subscription):
            assert await all_of(subscription, 5) == ([1, 2, 3, 4, 5], [])
            answer = await heard.next_msg(60)
            assert (answer.subject, answer.data, answer.headers) == ("other.form.x", b"", None)
    assert fault.done


async def test_flow_control_response_lost_is_repeated(shared_server: NatsServer) -> None:
    """Two responses are lost, as on a route; each is repeated until the server has received it."""
    stream = make_stream(shared_server.url, 1500, 10_000)
    fault = Published("$JS.FC.", most=2)
    async with through_proxy(shared_server, stream, upward=fault, config=FLOWING) as (
        _,
        subscription,
    ):
        assert await all_of(subscription, 1500) == (list(range(1, 1501)), [])
    assert fault.done == 2


async def test_lost_flow_control_responses_raise_alarm(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 10)
    async with through_proxy(shared_server, stream, STALLED, config=FLOWING) as (_, subscription):
        await all_of(subscription, 10)
        with pytest.raises(FlowControlLostError, match=r"\$JS\.FC\.>"):
            await subscription.next(15)


async def test_flow_control_is_answered_again_after_reconnect(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url)
    options: dict[str, Any] = {
        "durable": "d",
        "config": FLOWING,
        "on_error": lambda error: None,
    }
    async with (
        flow_answers(shared_server.url) as answers,
        through_proxy(shared_server, stream, STALLED, **options) as (proxy, subscription),
    ):
        waiting = asyncio.create_task(subscription.next())
        await wait_until_async(lambda: "$JS.FC.x.y.z" in answers, "an answer")
        # Whether it reached the server before the cut, nobody knows.
        await asyncio.to_thread(proxy.cut)
        await wait_until_async(lambda: answers.count("$JS.FC.x.y.z") == 2, "another answer")
        await asyncio.to_thread(fill, shared_server.url, stream, 1)
        assert (await waiting).metadata.stream_seq == 1
