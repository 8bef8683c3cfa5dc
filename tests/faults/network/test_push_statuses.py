"""Push subscriptions: flow control, error statuses, odd reply subjects, bad frames (ADR-15)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    ConflictStatusError,
    ConsumerDeletedError,
    ConsumerLostError,
    FlowControlLostError,
    NatsSourceError,
    NextTimeoutError,
    NoRespondersStatusError,
    ProtocolError,
    UnknownStatusError,
)
from nats_stream_source.jetstream.subscriptions.subscribe import ConsumerConfig, subscribe_ordered
from nats_stream_source.wire.consumer.cursor import Rebuild
from tests.faults.network.push import all_of, hmsg, through_proxy
from tests.support.nats.buckets import flushed
from tests.support.nats.subscriptions import connected, fill, make_stream
from tests.support.proxy.fault_proxy import Proxy, Twice, is_delivery, is_status
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


async def test_swallowed_flow_control_is_answered_by_heartbeat(shared_server: NatsServer) -> None:
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


async def test_flow_control_subject_of_other_form_is_answered(shared_server: NatsServer) -> None:
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


def msg(frame: bytes, reply: bytes) -> bytes:
    """A message for the subscription that ``frame`` is for, with that reply subject."""
    _, subject, sid, *_ = frame.split(b"\r\n", 1)[0].split(b" ")
    return b" ".join([b"MSG", subject, sid, reply, b"0"]) + b"\r\n\r\n"


async def expect_error(
    server: NatsServer, before: Callable[[bytes], bytes], kind: type[NatsSourceError], text: str
) -> None:
    """Insert a frame before delivery 3: it is raised at its place, and each message delivered."""
    stream = make_stream(server.url, 5)
    fault = Sequences([3], lambda frame: before(frame) + frame)
    async with through_proxy(server, stream, fault) as (_, subscription):
        found, errors = await all_of(subscription, 5)
        assert found == [1, 2, 3, 4, 5]
        assert [type(error) for error in errors] == [kind]
        assert text in str(errors[0])
    assert fault.done


@pytest.mark.parametrize(
    ("block", "kind", "text"),
    [
        (b"NATS/1.0 409 Consumer Deleted\r\n\r\n", ConsumerDeletedError, "409 Consumer Deleted"),
        (b"NATS/1.0 409 Exceeded MaxWaiting\r\n\r\n", ConflictStatusError, "MaxWaiting"),
        (b"NATS/1.0 503\r\n\r\n", NoRespondersStatusError, "503"),
        (b"NATS/1.0 777 New Thing\r\n\r\n", UnknownStatusError, "777 New Thing"),
        (b"NATS/1.0 499 New Thing\r\n\r\n", UnknownStatusError, "499 New Thing"),
        (b"NATS/1.0 404 No Messages\r\n\r\n", UnknownStatusError, "404"),
        (
            b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Con",
            ProtocolError,
            "lacks the final empty line",
        ),
        (
            b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: x\r\n\r\n",
            ProtocolError,
            "expected an integer",
        ),
        (b"NATS/1.0\r\nSome: thing\r\n\r\n", ProtocolError, "neither a delivery nor a status"),
    ],
)
async def test_error_status_is_raised(
    shared_server: NatsServer, block: bytes, kind: type[NatsSourceError], text: str
) -> None:
    await expect_error(shared_server, lambda frame: hmsg(frame, block), kind, text)


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (b"$JS.ACK.S.C.1.2.3.4", "8 tokens"),
        (b"$JS.ACK.S.C.1.2.3.4.5.6", "10 tokens"),
        (b"$JS.ACK.S.C.1.two.3.4.5", "'two' is not an integer"),
        (b"_INBOX.somebody", "neither a delivery nor a status"),
    ],
)
async def test_invalid_reply_subject_is_refused(
    shared_server: NatsServer, reply: bytes, text: str
) -> None:
    await expect_error(shared_server, lambda frame: msg(frame, reply), ProtocolError, text)


@pytest.mark.parametrize("status", [b"409 Consumer Deleted", b"503", b"499 New Thing"])
async def test_ordered_subscription_replaces_consumer_at_any_status(
    shared_server: NatsServer, status: bytes
) -> None:
    """A status raises no error: the next consumer delivers the rest or returns the error."""
    stream = make_stream(shared_server.url, 5)
    block = b"NATS/1.0 " + status + b"\r\n\r\n"
    fault = Sequences([3], lambda frame: hmsg(frame, block) + frame)
    with Proxy(shared_server.port, fault) as proxy:
        async with connected(proxy.url) as jetstream:
            config = ConsumerConfig(idle_heartbeat=30.0)
            async with await subscribe_ordered(
                jetstream, stream=stream, config=config
            ) as subscription:
                found = [(await subscription.next(15)).metadata.stream_seq for _ in range(5)]
                assert found == [1, 2, 3, 4, 5]
                assert subscription.reader.cursor.rebuilds == [Rebuild.CONSUMER_GONE]
        assert fault.done


async def test_ordered_subscription_ends_after_status_of_each_consumer(
    shared_server: NatsServer,
) -> None:
    stream = make_stream(shared_server.url, 5)
    block = b"NATS/1.0 499 New Thing\r\n\r\n"
    with Proxy(
        shared_server.port, lambda frame: hmsg(frame, block) if is_delivery(frame) else True
    ) as proxy:
        async with connected(proxy.url) as jetstream:
            subscription = await subscribe_ordered(jetstream, stream=stream)
            with pytest.raises(ConsumerLostError, match="consumers in a row were lost"):
                await subscription.next(60)
            await subscription.unsubscribe()


@pytest.mark.parametrize("more", [b"", b".12", b".12.x"], ids=["11 tokens", "12", "13"])
@pytest.mark.parametrize("domain", ["hub", None])
async def test_eleven_tokens_and_more_are_read(
    shared_server: NatsServer, domain: str | None, more: bytes
) -> None:
    stream = make_stream(shared_server.url, 5)
    prefix = b"$JS.ACK.%s.hash." % (domain or "_").encode()

    def longer(frame: bytes) -> bool | bytes:
        if not is_delivery(frame):
            return True
        line, rest = frame.split(b"\r\n", 1)
        words = line.split(b" ")
        words[3] = words[3].replace(b"$JS.ACK.", prefix, 1) + more
        return b" ".join(words) + b"\r\n" + rest

    async with through_proxy(shared_server, stream, longer) as (_, subscription):
        message = await subscription.next(15)
        assert message.metadata.domain == domain
        assert (message.metadata.stream, message.metadata.consumer_seq) == (stream, 1)
        assert message.reply.startswith(prefix.decode())
        assert message.reply.endswith(f".4{more.decode()}")  # four are pending
        assert (await all_of(subscription, 5)) == ([2, 3, 4, 5], [])
