"""Push subscriptions with a proxy between client and server that does harm (ADR-15)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from buckets import flushed
from proxy import Proxy, is_delivery, is_status
from subscriptions import (
    connected,
    consumer_info,
    fill,
    make_consumer,
    make_stream,
    run,
    until,
)

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    ConflictStatusError,
    ConsumerDeletedError,
    ConsumerGapError,
    FlowControlLostError,
    MissedHeartbeatError,
    NatsSourceError,
    NextTimeoutError,
    NoRespondersStatusError,
    ProtocolError,
    UnknownStatusError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.subscribe import ConsumerConfig, subscribe
from nats_stream_source.jetstream.subscription import Subscription

# A server that gets no processor for three intervals has fallen silent, which is an alarm: so they
# are long where that is not what a test is about.
CALM = ConsumerConfig(ack_policy="none", idle_heartbeat=30.0)
BEATING = ConsumerConfig(ack_policy="none", idle_heartbeat=0.5)
FLOWING = ConsumerConfig(ack_policy="none", idle_heartbeat=0.5, flow_control=True)


def hmsg(frame: bytes, block: bytes, reply: bytes = b"") -> bytes:
    """A message for the subscription that ``frame`` is for, with that header block."""
    _, subject, sid, *_ = frame.split(b"\r\n", 1)[0].split(b" ")
    size = b"%d" % len(block)
    words = [b"HMSG", subject, sid, *([reply] if reply else []), size, size]
    return b" ".join(words) + b"\r\n" + block + b"\r\n"


def msg(frame: bytes, reply: bytes) -> bytes:
    """A message for the subscription that ``frame`` is for, with that reply subject."""
    _, subject, sid, *_ = frame.split(b"\r\n", 1)[0].split(b" ")
    return b" ".join([b"MSG", subject, sid, reply, b"0"]) + b"\r\n\r\n"


class Once:
    """Does something to the first frame that ``which`` is true of."""

    def __init__(
        self, which: Callable[[bytes], bool], what: Callable[[bytes], bool | bytes]
    ) -> None:
        self._which, self._what = which, what
        self.done = False

    def __call__(self, frame: bytes) -> bool | bytes:
        if self.done or not self._which(frame):
            return True
        self.done = True
        return self._what(frame)


def nth_delivery(number: int) -> Callable[[bytes], bool]:
    return lambda frame: (
        is_delivery(frame) and frame.split(b"\r\n", 1)[1].startswith(b"%d " % (number - 1))
    )


def drop(frame: bytes) -> bool:
    return False


async def all_of(subscription: Subscription, last: int) -> tuple[list[int], list[NatsSourceError]]:
    """The stream sequences up to ``last``, and what was raised on the way."""
    found: list[int] = []
    errors: list[NatsSourceError] = []
    while last not in found:
        try:
            found.append((await subscription.next(15)).metadata.stream_seq)
        except NextTimeoutError:
            raise
        except NatsSourceError as error:
            errors.append(error)
    return found, errors


# Gaps


def test_a_lost_message_is_a_gap(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 10)
    fault = Once(nth_delivery(4), drop)
    with Proxy(shared_server.port, fault) as proxy:

        async def work(jetstream: JetStream) -> None:
            async with await subscribe(jetstream, stream=stream, config=CALM) as subscription:
                found, errors = await all_of(subscription, 10)
                # The message after the gap is not lost to the alarm.
                assert found == [1, 2, 3, 5, 6, 7, 8, 9, 10]
                assert [type(error) for error in errors] == [ConsumerGapError]
                assert "went on with 5 where 4 was next" in str(errors[0])

        run(proxy.url, work)
        assert len(proxy.dropped) == 1


def test_a_lost_last_message_is_seen_by_the_heartbeat(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 10)
    fault = Once(nth_delivery(10), drop)
    with Proxy(shared_server.port, fault) as proxy:

        async def work(jetstream: JetStream) -> None:
            errors: list[Exception] = []
            async with await subscribe(
                jetstream, stream=stream, config=BEATING, on_error=errors.append
            ) as subscription:
                assert (await all_of(subscription, 9))[0] == list(range(1, 10))
                waiting = asyncio.create_task(subscription.next())
                await until("the alarm", lambda: bool(errors))
                await asyncio.to_thread(fill, shared_server.url, stream, 1)
                # And the count goes on after it: no second alarm.
                assert (await waiting).metadata.stream_seq == 11
                assert [type(error) for error in errors] == [ConsumerGapError]

        run(proxy.url, work)
        assert len(proxy.dropped) == 1


def test_a_queue_group_knows_no_gaps(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url)
    fault = Once(nth_delivery(4), drop)
    with Proxy(shared_server.port, fault) as proxy:

        async def work(jetstream: JetStream) -> None:
            async with await subscribe(
                jetstream, stream=stream, queue="q", config=ConsumerConfig(ack_policy="none")
            ) as subscription:
                await asyncio.to_thread(fill, shared_server.url, stream, 10)
                found, errors = await all_of(subscription, 10)
                assert (found, errors) == ([1, 2, 3, 5, 6, 7, 8, 9, 10], [])

        run(proxy.url, work)
        assert len(proxy.dropped) == 1


def test_a_consumer_found_in_the_middle_has_no_gap_before(shared_server: NatsServer) -> None:
    url = shared_server.url
    stream = make_stream(url, 5)
    config = {"deliver_subject": f"to.{stream}", "idle_heartbeat": 100_000_000}
    make_consumer(url, stream, "d", ack_policy="none", **config)
    fault = Once(nth_delivery(3), drop)

    async def work(jetstream: JetStream) -> None:
        async with await subscribe(jetstream, stream=stream, durable="d") as subscription:
            assert await all_of(subscription, 5) == ([1, 2, 3, 4, 5], [])

    run(url, work)
    fill(url, stream, 5)
    with Proxy(shared_server.port, fault) as proxy:

        async def again(jetstream: JetStream) -> None:
            async with await subscribe(jetstream, stream=stream, durable="d") as subscription:
                found, errors = await all_of(subscription, 10)
                assert found == [6, 7, 9, 10]
                assert [type(error) for error in errors] == [ConsumerGapError]

        run(proxy.url, again)
        assert len(proxy.dropped) == 1


# Heartbeats


def test_missed_heartbeats_are_an_alarm(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 1)
    with Proxy(shared_server.port) as proxy:

        async def work(jetstream: JetStream) -> None:
            async with await subscribe(jetstream, stream=stream, config=BEATING) as subscription:
                await subscription.next(15)
                # Heartbeats keep the alarm away, and are not shown.
                with pytest.raises(NextTimeoutError):
                    await subscription.next(2.0)
                assert any(is_status(frame, b"Idle Heartbeat") for frame in proxy.seen)
                proxy.verdict = lambda frame: not is_status(frame, b"Idle Heartbeat")
                with pytest.raises(MissedHeartbeatError, match=r"for 1\.5 s"):
                    await subscription.next()
                # A short wait again and again adds up to the same.
                alarms: list[NatsSourceError] = []
                while not alarms:
                    try:
                        await subscription.next(0.02)
                    except NextTimeoutError:
                        continue
                    except MissedHeartbeatError as error:
                        alarms.append(error)
                assert proxy.dropped
                proxy.verdict = lambda frame: True
                await asyncio.to_thread(fill, shared_server.url, stream, 1)
                assert (await subscription.next(15)).metadata.stream_seq == 2

        run(proxy.url, work)


def test_an_alarm_may_go_to_a_callback(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 1)
    with Proxy(shared_server.port, lambda frame: not is_status(frame, b"Idle")) as proxy:

        async def work(jetstream: JetStream) -> None:
            errors: list[Exception] = []
            found: list[int] = []

            async def callback(message: Any) -> None:
                found.append(message.metadata.stream_seq)

            async with await subscribe(
                jetstream,
                stream=stream,
                config=BEATING,
                callback=callback,
                on_error=errors.append,
            ):
                await until("two alarms", lambda: len(errors) >= 2)
                await asyncio.to_thread(fill, shared_server.url, stream, 1)
                await until("both messages", lambda: found == [1, 2])
            assert {type(error) for error in errors} == {MissedHeartbeatError}

        run(proxy.url, work)
        assert proxy.dropped


def test_a_loop_that_was_busy_does_not_miss_heartbeats(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url)

    async def work(jetstream: JetStream) -> None:
        async with await subscribe(jetstream, stream=stream, config=BEATING) as subscription:
            waiting = asyncio.create_task(subscription.next())
            await asyncio.sleep(0.05)

            time.sleep(2.5)  # noqa: ASYNC251  (the loop stands still while five heartbeats arrive)
            await asyncio.to_thread(fill, shared_server.url, stream, 1)
            assert (await waiting).metadata.stream_seq == 1

    run(shared_server.url, work)


# Flow control


async def flow_answers(url: str) -> tuple[Any, list[str]]:
    """A client that hears the answers to flow control, and the list they come to."""
    answers: list[str] = []
    context = connected(url)
    other = await context.__aenter__()

    async def heard(message: Any) -> None:
        answers.append(message.subject)

    await other.connection.client.subscribe("$JS.FC.>", cb=heard)
    await flushed(other.connection.client)
    return context, answers


def test_flow_control_is_answered_once_each(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 1500, 10_000)

    def twice(frame: bytes) -> bool | bytes:
        return frame + frame if is_status(frame, b"FlowControl") else True

    with Proxy(shared_server.port, twice) as proxy:

        async def work(jetstream: JetStream) -> None:
            context, answers = await flow_answers(shared_server.url)
            async with await subscribe(jetstream, stream=stream, config=FLOWING) as subscription:
                found, errors = await all_of(subscription, 1500)
                assert (found, errors) == (list(range(1, 1501)), [])
                requests = [frame for frame in proxy.seen if is_status(frame, b"FlowControl")]
                assert requests
                replies = [frame.split(b" ")[3].decode() for frame in requests]
                with pytest.raises(NextTimeoutError):
                    await subscription.next(0.3)
                await until("all answers", lambda: len(answers) >= len(replies))
                assert [one for one in answers if f".{stream}." in one] == replies
            await context.__aexit__(None, None, None)

        run(proxy.url, work)


def test_flow_control_waits_for_the_messages_before_it(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 1500, 10_000)
    with Proxy(shared_server.port) as proxy:

        async def work(jetstream: JetStream) -> None:
            context, answers = await flow_answers(shared_server.url)

            def asked() -> bool:
                return any(is_status(frame, b"FlowControl") for frame in proxy.seen)

            def stalled() -> bool:
                return any(b"Nats-Consumer-Stalled" in frame for frame in proxy.seen)

            async with await subscribe(jetstream, stream=stream, config=FLOWING) as subscription:
                await subscription.next(15)
                # The server asks, and says again and again that it waits; the caller rests.
                await until("flow control", asked)
                await until("stalled", stalled)
                assert answers == []
                assert (await all_of(subscription, 1500))[1] == []
                assert answers
                assert len(answers) == len(set(answers))
            await context.__aexit__(None, None, None)

        run(proxy.url, work)


def test_swallowed_flow_control_is_answered_by_the_heartbeat(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 1500, 10_000)
    with Proxy(shared_server.port, lambda frame: not is_status(frame, b"FlowControl")) as proxy:

        async def work(jetstream: JetStream) -> None:
            context, answers = await flow_answers(shared_server.url)
            async with await subscribe(jetstream, stream=stream, config=FLOWING) as subscription:
                assert await all_of(subscription, 1500) == (list(range(1, 1501)), [])
            dropped = {frame.split(b" ")[3].decode() for frame in proxy.dropped}
            assert dropped
            assert set(answers) <= dropped
            assert len(answers) == len(set(answers))
            assert any(b"Nats-Consumer-Stalled" in frame for frame in proxy.seen)
            await context.__aexit__(None, None, None)

        run(proxy.url, work)


def test_answers_that_do_not_arrive_are_an_alarm(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 10)
    stalled = b"Nats-Consumer-Stalled: $JS.FC.x.y.z\r\n"

    def stalls(frame: bytes) -> bool | bytes:
        if not is_status(frame, b"Idle"):
            return True
        block = frame.split(b"\r\n", 1)[1][:-2]
        return hmsg(frame, block[:-2] + stalled + b"\r\n")

    with Proxy(shared_server.port, stalls) as proxy:

        async def work(jetstream: JetStream) -> None:
            async with await subscribe(jetstream, stream=stream, config=FLOWING) as subscription:
                await all_of(subscription, 10)
                with pytest.raises(FlowControlLostError, match=r"\$JS\.FC\.>"):
                    await subscription.next(15)

        run(proxy.url, work)


def test_flow_control_is_answered_again_after_a_reconnect(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url)
    stalled = b"Nats-Consumer-Stalled: $JS.FC.again.y.z\r\n"

    def stalls(frame: bytes) -> bool | bytes:
        if not is_status(frame, b"Idle"):
            return True
        return hmsg(frame, frame.split(b"\r\n", 1)[1][:-4] + stalled + b"\r\n")

    with Proxy(shared_server.port, stalls) as proxy:

        async def work(jetstream: JetStream) -> None:
            context, answers = await flow_answers(shared_server.url)
            async with await subscribe(
                jetstream, stream=stream, durable="d", config=FLOWING, on_error=lambda error: None
            ) as subscription:
                waiting = asyncio.create_task(subscription.next())
                await until("an answer", lambda: "$JS.FC.again.y.z" in answers)
                # Whether it reached the server before the cut, nobody knows.
                await asyncio.to_thread(proxy.cut)
                await until("another answer", lambda: answers.count("$JS.FC.again.y.z") == 2)
                await asyncio.to_thread(fill, shared_server.url, stream, 1)
                assert (await waiting).metadata.stream_seq == 1
            await context.__aexit__(None, None, None)

        run(proxy.url, work)


# Statuses and bad frames


@pytest.mark.parametrize(
    ("block", "kind", "text"),
    [
        (b"NATS/1.0 409 Consumer Deleted\r\n\r\n", ConsumerDeletedError, "409 Consumer Deleted"),
        (b"NATS/1.0 409 Exceeded MaxWaiting\r\n\r\n", ConflictStatusError, "MaxWaiting"),
        (b"NATS/1.0 503\r\n\r\n", NoRespondersStatusError, "503"),
        (b"NATS/1.0 777 New Thing\r\n\r\n", UnknownStatusError, "777 New Thing"),
        (b"NATS/1.0 404 No Messages\r\n\r\n", UnknownStatusError, "404"),
        (b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Con", ProtocolError, "without its end"),
        (
            b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: x\r\n\r\n",
            ProtocolError,
            "not a number",
        ),
        (b"NATS/1.0\r\nSome: thing\r\n\r\n", ProtocolError, "neither a delivery nor a status"),
    ],
)
def test_a_status_that_is_an_error(
    shared_server: NatsServer, block: bytes, kind: type[NatsSourceError], text: str
) -> None:
    stream = make_stream(shared_server.url, 5)
    fault = Once(nth_delivery(3), lambda frame: hmsg(frame, block) + frame)
    with Proxy(shared_server.port, fault) as proxy:

        async def work(jetstream: JetStream) -> None:
            async with await subscribe(jetstream, stream=stream, config=CALM) as subscription:
                found, errors = await all_of(subscription, 5)
                # Raised at its place, and no message is lost to it.
                assert found == [1, 2, 3, 4, 5]
                assert [type(error) for error in errors] == [kind]
                assert text in str(errors[0])

        run(proxy.url, work)
        assert fault.done


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (b"$JS.ACK.S.C.1.2.3.4", "8 tokens"),
        (b"$JS.ACK.S.C.1.2.3.4.5.6", "10 tokens"),
        (b"$JS.ACK.S.C.1.two.3.4.5", "'two' is not a number"),
        (b"_INBOX.somebody", "neither a delivery nor a status"),
    ],
)
def test_a_reply_subject_that_is_none(shared_server: NatsServer, reply: bytes, text: str) -> None:
    stream = make_stream(shared_server.url, 5)
    fault = Once(nth_delivery(3), lambda frame: msg(frame, reply) + frame)
    with Proxy(shared_server.port, fault) as proxy:

        async def work(jetstream: JetStream) -> None:
            async with await subscribe(jetstream, stream=stream, config=CALM) as subscription:
                found, errors = await all_of(subscription, 5)
                assert found == [1, 2, 3, 4, 5]
                assert [type(error) for error in errors] == [ProtocolError]
                assert text in str(errors[0])

        run(proxy.url, work)
        assert fault.done


def test_eleven_tokens_are_read(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 5)

    def longer(frame: bytes) -> bool | bytes:
        if not is_delivery(frame):
            return True
        return frame.replace(b"$JS.ACK.", b"$JS.ACK.hub.hash.", 1)

    with Proxy(shared_server.port, longer) as proxy:

        async def work(jetstream: JetStream) -> None:
            async with await subscribe(jetstream, stream=stream, config=CALM) as subscription:
                message = await subscription.next(15)
                assert message.metadata.domain == "hub"
                assert message.reply.startswith("$JS.ACK.hub.hash.")
                assert (await all_of(subscription, 5)) == ([2, 3, 4, 5], [])

        run(proxy.url, work)


# Connections


def test_an_ephemeral_consumer_lost_with_its_server_is_an_error(nats_server: NatsServer) -> None:
    memory = {"mem_storage": True, "inactive_threshold": 0.2}
    stream = make_stream(nats_server.url, 3)

    async def work(jetstream: JetStream) -> None:
        config = ConsumerConfig(idle_heartbeat=0.2, **memory)  # type: ignore[arg-type]
        subscription = await subscribe(jetstream, stream=stream, config=config)
        await all_of(subscription, 3)
        nats_server.kill()
        nats_server.start()
        alarms: type[NatsSourceError] | None = MissedHeartbeatError
        while alarms is MissedHeartbeatError:
            alarms = None
            try:
                await subscription.next(10)
            except NatsSourceError as error:
                alarms = type(error)
        assert alarms is ConsumerDeletedError
        with pytest.raises(ConsumerDeletedError):
            await anext(subscription)
        await subscription.unsubscribe()

    run(nats_server.url, work)


def test_a_durable_consumer_goes_on_after_a_lost_connection(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 3)
    with Proxy(shared_server.port) as proxy:

        async def work(jetstream: JetStream) -> None:
            subscription = await subscribe(jetstream, stream=stream, durable="d")
            for message in [await subscription.next(15) for _ in range(3)]:
                await message.ack_sync()
            waiting = asyncio.create_task(subscription.next())
            await asyncio.to_thread(proxy.cut)
            await until("a reconnect", lambda: jetstream.connection.reconnects == 1)
            await asyncio.to_thread(fill, shared_server.url, stream, 1)
            assert (await waiting).metadata.stream_seq == 4
            assert consumer_info(shared_server.url, stream, "d")["push_bound"]
            await subscription.unsubscribe()

        run(proxy.url, work)
