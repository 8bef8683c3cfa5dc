"""Subscribing to a real server: the workflow of ADR-15, acknowledgements, the end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from buckets import api, flushed, publish, with_client
from nats.aio.client import Client
from subscriptions import (
    connected,
    consumer_info,
    consumers_of,
    fill,
    make_consumer,
    make_stream,
    run,
    until,
)

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    AckError,
    ApiError,
    ConnectError,
    ConsumerDeletedError,
    ConsumerDiffersError,
    ConsumerModeError,
    ConsumerNotFoundError,
    DeliverGroupError,
    DuplicateSubscriptionError,
    MinLastSequenceError,
    NextTimeoutError,
    NoMatchingStreamError,
    PermissionDeniedError,
    SlowConsumerError,
    StreamNotFoundError,
    SubjectMismatchError,
    SubscribeError,
    SubscriptionClosedError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.message import JsMessage
from nats_stream_source.jetstream.patience import patiently
from nats_stream_source.jetstream.subscribe import ConsumerConfig, find_stream, subscribe
from nats_stream_source.jetstream.subscription import Subscription

pytestmark = pytest.mark.servers


NO_CONSUMERS = {
    "type": "io.nats.jetstream.api.v1.consumer_names_response",
    "total": 0,
    "offset": 0,
    "limit": 1024,
    "consumers": [],
}


async def sequences(subscription: Any, count: int) -> list[int]:
    """The stream sequences of the next messages, each acknowledged."""
    found = []
    for _ in range(count):
        message = await subscription.next(15)
        found.append(message.metadata.stream_seq)
        await message.ack()
    return found


# The stream


def test_the_stream_is_found_by_its_subject(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 3)

    async def work(jetstream: JetStream) -> None:
        assert await find_stream(jetstream, f"{stream}.k1") == stream
        async with await subscribe(jetstream, f"{stream}.k1") as subscription:
            assert subscription.info.stream == stream
            assert await sequences(subscription, 1) == [2]

    run(shared_server.url, work)


def test_no_stream_or_several_are_an_error(shared_server: NatsServer) -> None:
    one, other = make_stream(shared_server.url), make_stream(shared_server.url)

    async def work(jetstream: JetStream) -> None:
        with pytest.raises(NoMatchingStreamError, match="no stream takes 'nowhere'"):
            await subscribe(jetstream, "nowhere")
        with pytest.raises(NoMatchingStreamError, match=f"{one}, {other}|, "):
            await subscribe(jetstream, "*.k1")
        with pytest.raises(SubscribeError, match="neither a subject nor a stream"):
            await subscribe(jetstream)
        with pytest.raises(StreamNotFoundError):
            await subscribe(jetstream, stream="MISSING")

    run(shared_server.url, work)


def test_a_stream_without_a_subject_is_read_whole(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 20)

    async def work(jetstream: JetStream) -> None:
        async with await subscribe(jetstream, stream=stream) as subscription:
            assert await sequences(subscription, 20) == list(range(1, 21))
            assert "filter_subject" not in subscription.info.config

    run(shared_server.url, work)


# Whose the consumer is


def test_what_was_created_is_deleted_at_the_end(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 1)

    async def work(jetstream: JetStream) -> None:
        ephemeral = await subscribe(jetstream, f"{stream}.>")
        durable = await subscribe(jetstream, f"{stream}.>", durable="d")
        pull = await subscribe(jetstream, f"{stream}.>", durable="p", pull=True)
        ordered = await subscribe(jetstream, f"{stream}.>", ordered=True)
        assert (await ordered.next(5)).metadata.stream_seq == 1
        names = consumers_of(shared_server.url, stream)
        assert {"d", "p", ephemeral.info.name} < set(names)
        assert len(names) == 4
        assert ephemeral.info.push_bound
        for subscription in (ephemeral, durable, pull, ordered):
            await subscription.unsubscribe()
            await subscription.unsubscribe()
        assert consumers_of(shared_server.url, stream) == []
        with pytest.raises(SubscriptionClosedError):
            await ephemeral.next()
        assert [message async for message in ephemeral] == []
        with pytest.raises(SubscriptionClosedError):
            await pull.fetch()
        assert [message async for message in pull] == []

    run(shared_server.url, work)


def test_what_was_there_is_left_alone(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 5)
    quick = {"deliver_subject": f"to.{stream}", "ack_wait": 200_000_000}
    make_consumer(shared_server.url, stream, "push", **quick)
    make_consumer(shared_server.url, stream, "pull")

    async def work(jetstream: JetStream) -> None:
        for how in ({"durable": "push"}, {"bind": "push"}):
            async with await subscribe(jetstream, stream=stream, **how) as subscription:
                assert len(await sequences(subscription, 2)) == 2
        async with await subscribe(jetstream, stream=stream, bind="pull", pull=True) as pull:
            assert len(await pull.fetch(5)) == 5
        assert set(consumers_of(shared_server.url, stream)) == {"push", "pull"}

    run(shared_server.url, work)


def test_a_consumer_to_bind_to_must_exist(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 1)

    async def work(jetstream: JetStream) -> None:
        with pytest.raises(ConsumerNotFoundError):
            await subscribe(jetstream, stream=stream, bind="missing")
        assert consumers_of(shared_server.url, stream) == []
        # A pull subscription goes on, and works once the consumer is there.
        async with await subscribe(jetstream, stream=stream, bind="later", pull=True) as pull:
            make_consumer(shared_server.url, stream, "later")
            assert len(await pull.fetch(1)) == 1
        assert consumers_of(shared_server.url, stream) == ["later"]

    run(shared_server.url, work)


def test_a_consumer_that_does_not_fit_is_refused(shared_server: NatsServer) -> None:
    url = shared_server.url
    stream = make_stream(url, 1)
    make_consumer(url, stream, "push", deliver_subject=f"to.{stream}", filter_subject=f"{stream}.a")
    make_consumer(url, stream, "group", deliver_subject=f"tog.{stream}", deliver_group="g")
    make_consumer(url, stream, "pull", max_deliver=7)

    async def work(jetstream: JetStream) -> None:
        async def refused(kind: type[Exception], subject: str | None = None, **how: Any) -> None:
            with pytest.raises(kind):
                await subscribe(jetstream, subject, stream=stream, **how)

        await refused(SubjectMismatchError, f"{stream}.b", bind="push")
        await refused(ConsumerModeError, bind="push", pull=True)
        await refused(ConsumerModeError, bind="pull")
        await refused(DeliverGroupError, bind="push", queue="g")
        await refused(DeliverGroupError, bind="group")
        await refused(DeliverGroupError, bind="group", queue="other")
        differs = ConsumerConfig(max_deliver=8)
        await refused(ConsumerDiffersError, durable="pull", pull=True, config=differs)
        same = ConsumerConfig(max_deliver=7)
        (await subscribe(jetstream, stream=stream, durable="pull", pull=True, config=same))
        async with await subscribe(jetstream, stream=stream, bind="push"):
            # The server notes a subscription a moment later.
            await until("bound", lambda: bool(consumer_info(url, stream, "push").get("push_bound")))
            await refused(DuplicateSubscriptionError, bind="push")
        assert set(consumers_of(url, stream)) == {"push", "group", "pull"}

    run(url, work)


def test_what_the_server_refuses_leaves_nothing(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url)

    async def work(jetstream: JetStream) -> None:
        subscriptions = jetstream.connection.client._subs
        await jetstream.stream_info(stream)  # makes the inbox for answers
        before = len(subscriptions)
        # "server returns error if provided …" (ADR-15, the comments in the configuration).
        for config in (
            ConsumerConfig(max_waiting=5),
            ConsumerConfig(opt_start_seq=3),
            ConsumerConfig(opt_start_time="2026-01-01T00:00:00Z"),
        ):
            with pytest.raises(ApiError) as raised:
                await subscribe(jetstream, f"{stream}.>", config=config)
            assert raised.value.code == 400
        assert len(subscriptions) == before
        assert consumers_of(shared_server.url, stream) == []

    run(shared_server.url, work)


# Queue groups


def test_a_queue_group_shares_the_messages(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url)

    async def work(jetstream: JetStream) -> None:
        got: dict[str, list[int]] = {"one": [], "two": []}

        def to(name: str) -> Any:
            async def callback(message: JsMessage) -> None:
                got[name].append(message.metadata.stream_seq)
                await message.ack()

            return callback

        one = await subscribe(jetstream, f"{stream}.>", queue="workers", callback=to("one"))
        async with connected(shared_server.url) as elsewhere:
            two = await subscribe(elsewhere, f"{stream}.>", queue="workers", callback=to("two"))
            # Without a name of its own, the consumer is the queue's.
            assert consumers_of(shared_server.url, stream) == ["workers"]
            assert (one.consumer.created, two.consumer.created) == (True, False)
            await asyncio.to_thread(fill, shared_server.url, stream, 200)
            await until("all 200", lambda: len(got["one"]) + len(got["two"]) >= 200)
            assert sorted(got["one"] + got["two"]) == list(range(1, 201))
            assert got["one"]
            assert got["two"]
            # The member that found the consumer leaves it to the others.
            await two.unsubscribe()
            assert consumers_of(shared_server.url, stream) == ["workers"]
        await one.unsubscribe()
        # The member that created it takes it away, as the document says (and regrets).
        assert consumers_of(shared_server.url, stream) == []

    run(shared_server.url, work)


# Two creators


class Racing(JetStream):
    """Says once that a consumer is missing, and only after all have asked."""

    def __init__(self, jetstream: JetStream, barrier: asyncio.Event, others: list[int]) -> None:
        super().__init__(jetstream.connection)
        self._barrier = barrier
        self._others = others
        self.lost = False

    async def consumer_info(self, stream: str, name: str) -> dict[str, Any]:
        if self._barrier.is_set():
            self.lost = True
            return await super().consumer_info(stream, name)
        with pytest.raises(ConsumerNotFoundError) as missing:
            await super().consumer_info(stream, name)
        self._others.append(1)
        if len(self._others) == 2:
            self._barrier.set()
        await self._barrier.wait()
        raise missing.value


async def race(jetstream: JetStream, **how: Any) -> tuple[list[Any], list[Racing]]:
    barrier, others = asyncio.Event(), list[int]()
    racers = [Racing(jetstream, barrier, others) for _ in range(2)]
    attempts = (subscribe(racer, durable="d", **how) for racer in racers)
    outcome = await asyncio.gather(*attempts, return_exceptions=True)
    assert sum(racer.lost for racer in racers) == 1
    return outcome, racers


def test_of_two_creators_one_is_told_that_it_is_a_duplicate(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 3)

    async def work(jetstream: JetStream) -> None:
        outcome, _ = await race(jetstream, stream=stream)
        (winner,) = (one for one in outcome if isinstance(one, Subscription))
        (error,) = (one for one in outcome if isinstance(one, Exception))
        assert isinstance(error, DuplicateSubscriptionError)
        assert winner.consumer.created
        assert await sequences(winner, 3) == [1, 2, 3]
        await winner.unsubscribe()

    run(shared_server.url, work)


def test_a_creator_that_was_faster_and_does_not_listen_is_a_duplicate_too(
    shared_server: NatsServer,
) -> None:
    stream = make_stream(shared_server.url)

    class Late(JetStream):
        async def add_consumer(self, stream: str, config: dict[str, Any]) -> dict[str, Any]:
            make_consumer(shared_server.url, stream, config["name"], deliver_subject="elsewhere")
            return await super().add_consumer(stream, config)

    async def work(jetstream: JetStream) -> None:
        with pytest.raises(DuplicateSubscriptionError, match="at the same moment"):
            await subscribe(Late(jetstream.connection), stream=stream, durable="d")
        assert consumers_of(shared_server.url, stream) == ["d"]

    run(shared_server.url, work)


def test_of_two_creators_in_a_queue_group_one_joins_the_other(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url)

    async def work(jetstream: JetStream) -> None:
        outcome, _ = await race(jetstream, stream=stream, queue="q")
        assert all(isinstance(one, Subscription) for one in outcome)
        assert sorted(one.consumer.created for one in outcome) == [False, True]
        assert len({one.info.config["deliver_subject"] for one in outcome}) == 1
        await asyncio.to_thread(fill, shared_server.url, stream, 100)

        parts: list[list[int]] = [[] for _ in outcome]

        async def take(subscription: Subscription, part: list[int]) -> None:
            async for message in subscription:
                part.append(message.metadata.stream_seq)
                await message.ack()

        taking = [asyncio.ensure_future(take(*one)) for one in zip(outcome, parts, strict=True)]
        await until("all messages", lambda: sum(map(len, parts)) >= 100)
        for one in taking:
            one.cancel()
        await asyncio.wait(taking)
        assert all(parts)
        assert sorted(seq for part in parts for seq in part) == list(range(1, 101))
        for one in sorted(outcome, key=lambda one: bool(one.consumer.created)):
            await one.unsubscribe()
        assert consumers_of(shared_server.url, stream) == []

    run(shared_server.url, work)


def test_of_two_creators_of_a_pull_consumer_one_owns_it(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 4)

    async def work(jetstream: JetStream) -> None:
        (one, two), _ = await race(jetstream, stream=stream, pull=True)
        assert sorted((one.consumer.created, two.consumer.created)) == [False, True]
        assert len(await one.fetch(2)) == len(await two.fetch(2)) == 2
        await (two if one.consumer.created else one).unsubscribe()
        assert consumers_of(shared_server.url, stream) == ["d"]

    run(shared_server.url, work)


# Acknowledgements


@pytest.fixture
def published(shared_server: NatsServer) -> str:
    return make_stream(shared_server.url, 5)


async def listen(url: str, subject: str, work: Any) -> list[bytes]:
    """What is published to ``subject`` while ``work()`` runs."""
    heard: list[bytes] = []
    async with connected(url) as other:
        subscription = await other.connection.client.subscribe(subject)
        await flushed(other.connection.client)
        await work()
        await flushed(other.connection.client)
        while subscription.pending_msgs:
            heard.append((await subscription.next_msg(1)).data)
    return heard


def test_every_kind_of_ack(shared_server: NatsServer, published: str) -> None:
    async def work(jetstream: JetStream) -> None:
        subscription = await subscribe(jetstream, stream=published)
        messages = [await subscription.next(15) for _ in range(5)]

        async def ack() -> None:
            await messages[0].in_progress()
            await messages[0].in_progress()
            await messages[0].ack()
            await messages[1].nak()
            await messages[2].nak(60.0)
            await messages[3].term()
            await messages[4].ack_sync()
            for message in messages:
                assert message.acked
                # Ignored, without an error.
                await message.ack()
                await message.nak(1.0)
                await message.term()
                await message.in_progress()
                await message.ack_sync()
            await flushed(jetstream.connection.client)

        heard = await listen(shared_server.url, f"$JS.ACK.{published}.>", ack)
        delayed = b'-NAK {"delay": 60000000000}'
        assert heard == [b"+WPI", b"+WPI", b"+ACK", b"-NAK", delayed, b"+TERM", b"+ACK"]
        again = await subscription.next(15)
        assert (again.metadata.stream_seq, again.metadata.delivered) == (2, 2)
        await again.ack_sync()
        info = consumer_info(shared_server.url, published, subscription.info.name)
        # The third waits for its delay; nothing else is open.
        assert (info["num_ack_pending"], info["ack_floor"]["stream_seq"]) == (1, 2)
        await subscription.unsubscribe()

    run(shared_server.url, work)


def test_an_acknowledgement_that_waits_for_its_answer_is_the_only_one(
    shared_server: NatsServer, published: str
) -> None:
    async def work(jetstream: JetStream) -> None:
        sent: list[bytes] = []

        async def heard(message: Any) -> None:
            sent.append(message.data)

        async with (
            connected(shared_server.url) as other,
            await subscribe(jetstream, stream=published, pull=True) as pull,
        ):
            (message,) = await pull.fetch(1)
            await other.connection.client.subscribe(message.reply, cb=heard)
            await flushed(other.connection.client)
            waiting = asyncio.create_task(message.ack_sync())
            await asyncio.sleep(0)
            await message.nak()
            await message.term()
            await waiting
            assert message.acked
            await flushed(jetstream.connection.client)
            await flushed(other.connection.client)
            await until("the acknowledgement", lambda: bool(sent))
            assert sent == [b"+ACK"]

    run(shared_server.url, work)


def test_nothing_is_sent_where_the_ack_policy_is_none(
    shared_server: NatsServer, published: str
) -> None:
    async def work(jetstream: JetStream) -> None:
        none = ConsumerConfig(ack_policy="none")
        async with await subscribe(jetstream, stream=published, config=none) as subscription:
            message = await subscription.next(15)

            async def ack() -> None:
                await message.in_progress()
                await message.nak()
                await message.term()
                await message.ack_sync()
                await message.ack()
                await flushed(jetstream.connection.client)

            assert await listen(shared_server.url, f"$JS.ACK.{published}.>", ack) == []
            assert not message.acked

    run(shared_server.url, work)


def test_an_ack_that_cannot_be_published_is_an_error(
    shared_server: NatsServer, published: str
) -> None:
    async def work(jetstream: JetStream) -> None:
        subscription = await subscribe(jetstream, stream=published, durable="d")
        message = await subscription.next(15)
        await jetstream.connection.close()
        for ack in (message.ack, message.nak, message.term, message.in_progress, message.ack_sync):
            with pytest.raises(AckError):
                await ack()
            assert not message.acked
        with pytest.raises(ConnectError):
            await subscription.unsubscribe()

    run(shared_server.url, work)


def test_metadata_and_headers(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url)
    headers = {"Status": "404", "Nats-Consumer-Stalled": "no"}
    publish(shared_server.url, [(f"{stream}.a", b"data", headers)])

    async def work(jetstream: JetStream) -> None:
        for kind in ({}, {"ordered": True}):
            async with await subscribe(jetstream, f"{stream}.>", **kind) as subscription:
                message = await subscription.next(15)
                assert (message.subject, message.data) == (f"{stream}.a", b"data")
                # A publisher's header is data, whatever it says.
                assert message.headers.status is None
                assert message.headers.get("Status") == "404"
                metadata = message.metadata
                assert (metadata.stream, metadata.pending) == (stream, 0)
                assert (metadata.stream_seq, metadata.consumer_seq, metadata.delivered) == (1, 1, 1)
                assert message.reply.startswith(f"$JS.ACK.{stream}.")

    run(shared_server.url, work)


# Ordered subscriptions


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ConsumerConfig(), list(range(1, 31))),
        (ConsumerConfig(deliver_policy="by_start_sequence", opt_start_seq=21), list(range(21, 31))),
        (ConsumerConfig(deliver_policy="last"), [30]),
        (ConsumerConfig(deliver_policy="last_per_subject"), list(range(21, 31))),
        (ConsumerConfig(deliver_policy="new"), []),
        (
            ConsumerConfig(deliver_policy="by_start_time", opt_start_time="2000-01-01T00:00:00Z"),
            list(range(1, 31)),
        ),
    ],
)
def test_an_ordered_subscription_begins_where_it_shall(
    shared_server: NatsServer, config: ConsumerConfig, expected: list[int]
) -> None:
    stream = make_stream(shared_server.url, 30)

    async def work(jetstream: JetStream) -> None:
        async with await subscribe(
            jetstream, f"{stream}.>", ordered=True, config=config
        ) as subscription:
            found = await sequences(subscription, len(expected))
            with pytest.raises(NextTimeoutError):
                await subscription.next(0.05)
            await asyncio.to_thread(fill, shared_server.url, stream, 2)
            assert found + await sequences(subscription, 2) == [*expected, 31, 32]

    run(shared_server.url, work)
    assert consumers_of(shared_server.url, stream) == []


def test_an_ordered_subscription_by_time_begins_in_the_middle(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 5)

    async def work(jetstream: JetStream) -> None:
        third = await jetstream.message(stream, seq=3)
        assert third is not None
        config = ConsumerConfig(deliver_policy="by_start_time", opt_start_time=third.time)
        async with await subscribe(jetstream, stream=stream, ordered=True, config=config) as found:
            assert await sequences(found, 3) == [3, 4, 5]

    run(shared_server.url, work)


def test_an_ordered_subscription_survives_the_loss_of_its_consumer(
    shared_server: NatsServer,
) -> None:
    stream = make_stream(shared_server.url, 10)

    async def work(jetstream: JetStream) -> None:
        config = ConsumerConfig(idle_heartbeat=0.1)
        async with await subscribe(
            jetstream, stream=stream, ordered=True, config=config
        ) as subscription:
            before = await sequences(subscription, 10)
            (name,) = consumers_of(shared_server.url, stream)
            api(shared_server.url, f"CONSUMER.DELETE.{stream}.{name}")
            await asyncio.to_thread(fill, shared_server.url, stream, 10)
            assert before + await sequences(subscription, 10) == list(range(1, 21))
            assert subscription.reader.cursor.rebuilds

    run(shared_server.url, work)


@pytest.mark.parametrize("count", [0, 5])
def test_after_the_last_values_an_ordered_subscription_leaves_nothing_out(
    shared_server: NatsServer, count: int
) -> None:
    """A consumer made anew does not skip what is not the last of its subject any more."""
    url = shared_server.url
    stream = make_stream(url, count)

    async def work(jetstream: JetStream) -> None:
        config = ConsumerConfig(deliver_policy="last_per_subject", idle_heartbeat=0.1)
        async with await subscribe(
            jetstream, stream=stream, ordered=True, config=config
        ) as subscription:
            waiting = asyncio.create_task(sequences(subscription, count + 1))
            await until("a consumer", lambda: bool(consumers_of(url, stream)))
            await asyncio.to_thread(fill, url, stream, 1)
            assert await waiting == list(range(1, count + 2))
            (name,) = consumers_of(url, stream)
            api(url, f"CONSUMER.DELETE.{stream}.{name}")
            for _ in range(3):
                await asyncio.to_thread(fill, url, stream, 1)  # always the same subject
            assert await sequences(subscription, 3) == list(range(count + 2, count + 5))
            assert subscription.reader.cursor.rebuilds

    run(url, work)


@pytest.mark.parametrize("kind", [{}, {"ordered": True}])
def test_two_who_wait_for_the_next_message_have_each_their_time(
    shared_server: NatsServer, kind: dict[str, bool]
) -> None:
    stream = make_stream(shared_server.url)

    async def work(jetstream: JetStream) -> None:
        asked: Any = subscribe
        async with await asked(jetstream, stream=stream, **kind) as subscription:
            waiting = asyncio.create_task(subscription.next())
            await asyncio.sleep(0)
            with pytest.raises(NextTimeoutError):
                await asyncio.wait_for(subscription.next(0.05), 60)
            await asyncio.to_thread(fill, shared_server.url, stream, 1)
            assert (await waiting).metadata.stream_seq == 1

    run(shared_server.url, work)


# The end


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"pull": True, "durable": "d"},
        {"ordered": True, "config": ConsumerConfig(deliver_policy="last")},
        {"min_last_seq": 1},
    ],
    ids=["push", "durable", "ordered", "read-after-write"],
)
def test_whoever_is_cancelled_at_any_moment_leaves_nothing(
    shared_server: NatsServer, asked: dict[str, Any]
) -> None:
    """Servers create consumers aside: a deletion must not be faster than the creation."""
    stream = make_stream(shared_server.url, 1)

    async def work(jetstream: JetStream) -> None:
        kind: Any = subscribe
        client = jetstream.connection.client
        await jetstream.stream_info(stream)
        before = len(client._subs)

        async def whole() -> None:
            async with await kind(jetstream, stream=stream, **asked) as subscription:
                await anext(subscription)

        moments, whole_runs = 0, 0
        while moments < 60 or not whole_runs:
            task = asyncio.create_task(whole())
            for _ in range(moments):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            whole_runs += not task.cancelled()
            moments += 1
            assert await jetstream.call(f"CONSUMER.NAMES.{stream}") == NO_CONSUMERS
            assert len(client._subs) == before

    run(shared_server.url, work)


@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_leaving_does_not_wait_for_a_server_that_is_away(nats_server: NatsServer, how: str) -> None:
    stream = make_stream(nats_server.url, 1)

    async def work(jetstream: JetStream) -> None:
        subscription = await subscribe(jetstream, stream=stream, ordered=True)
        await subscription.next(15)
        if how == "frozen":
            nats_server.pause()
        else:
            nats_server.kill()
        try:
            await asyncio.wait_for(subscription.unsubscribe(), 60)
        finally:
            if how == "frozen":
                nats_server.resume()
            else:
                nats_server.start()
        assert (await patiently(lambda: jetstream.stream_info(stream), 10)).last_seq == 1

    run(nats_server.url, work, request_timeout=60.0)


@pytest.mark.parametrize("pull", [False, True])
def test_a_failed_deletion_is_raised_by_unsubscribe(
    shared_server: NatsServer, published: str, pull: bool
) -> None:
    async def work(jetstream: JetStream) -> None:
        subscription: Any = await subscribe(jetstream, stream=published, pull=pull)  # type: ignore[call-overload]
        name = subscription.info.name
        api(shared_server.url, f"CONSUMER.DELETE.{published}.{name}")
        with pytest.raises(ConsumerNotFoundError):
            await subscription.unsubscribe()

    run(shared_server.url, work)


@pytest.mark.parametrize("pull", [False, True])
def test_a_failed_deletion_goes_to_on_error_by_drain(
    shared_server: NatsServer, published: str, pull: bool
) -> None:
    async def work(jetstream: JetStream) -> None:
        errors: list[Exception] = []
        subscription: Any = await subscribe(  # type: ignore[call-overload]
            jetstream, stream=published, pull=pull, on_error=errors.append
        )
        assert (await anext(subscription)).metadata.stream_seq == 1
        api(shared_server.url, f"CONSUMER.DELETE.{published}.{subscription.info.name}")
        await subscription.drain()
        rest = [message.metadata.stream_seq async for message in subscription]
        assert rest == [2, 3, 4, 5]
        assert any(isinstance(error, ConsumerNotFoundError) for error in errors)

    run(shared_server.url, work)


@pytest.mark.parametrize("pull", [False, True])
def test_drain_hands_over_what_has_arrived(
    shared_server: NatsServer, published: str, pull: bool
) -> None:
    async def work(jetstream: JetStream) -> None:
        subscription: Any = await subscribe(jetstream, stream=published, pull=pull)  # type: ignore[call-overload]
        first = await anext(subscription)
        await first.ack()
        await subscription.drain()
        await asyncio.to_thread(fill, shared_server.url, published, 5)
        found = []
        async for message in subscription:
            # The consumer is there until the last one was handed over.
            await message.ack_sync()
            found.append(message.metadata.stream_seq)
        assert found == [2, 3, 4, 5]
        assert consumers_of(shared_server.url, published) == []

    run(shared_server.url, work)


def test_drain_waits_for_the_callback(shared_server: NatsServer, published: str) -> None:
    async def work(jetstream: JetStream) -> None:
        found: list[int] = []
        begun = asyncio.Event()

        async def callback(message: JsMessage) -> None:
            begun.set()
            await asyncio.sleep(0.01)
            found.append(message.metadata.stream_seq)

        subscription = await subscribe(jetstream, stream=published, callback=callback)
        await begun.wait()
        assert len(found) < 5
        await subscription.drain()
        assert found == [1, 2, 3, 4, 5]
        assert consumers_of(shared_server.url, published) == []
        await subscription.unsubscribe()

    run(shared_server.url, work)


def test_what_a_callback_raises_is_not_lost(shared_server: NatsServer, published: str) -> None:
    async def work(jetstream: JetStream) -> None:
        found: list[int] = []
        errors: list[Exception] = []

        async def callback(message: JsMessage) -> None:
            found.append(message.metadata.stream_seq)
            if len(found) == 2:
                raise KeyError("the user's own")

        async with await subscribe(
            jetstream, stream=published, callback=callback, on_error=errors.append
        ):
            await until("all five", lambda: len(found) == 5)
        assert [type(error) for error in errors] == [KeyError]

        found.clear()
        subscription = await subscribe(jetstream, stream=published, callback=callback)
        await until("the failure", lambda: len(found) == 2)
        with pytest.raises(KeyError):
            await subscription.unsubscribe()
        assert consumers_of(shared_server.url, published) == []

    run(shared_server.url, work)


def test_leaving_the_context_ends_it_also_when_cancelled(
    shared_server: NatsServer, published: str
) -> None:
    async def work(jetstream: JetStream) -> None:
        inside = asyncio.Event()

        async def reader() -> None:
            async with await subscribe(jetstream, stream=published) as subscription:
                async for message in subscription:
                    if message.metadata.pending == 0:
                        inside.set()

        task = asyncio.create_task(reader())
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert consumers_of(shared_server.url, published) == []

    run(shared_server.url, work)


def test_unsubscribe_ends_who_waits(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url)

    async def work(jetstream: JetStream) -> None:
        subscriptions: list[Any] = [
            await subscribe(jetstream, stream=stream),
            await subscribe(jetstream, stream=stream, ordered=True),
        ]
        for subscription in subscriptions:
            waiting = asyncio.create_task(subscription.next())
            await asyncio.sleep(0)
            await subscription.unsubscribe()
            with pytest.raises(SubscriptionClosedError):
                await asyncio.wait_for(waiting, 60)

    run(shared_server.url, work)


# Trouble


def test_a_closed_connection_is_an_error_not_an_end(
    shared_server: NatsServer, published: str
) -> None:
    async def work(jetstream: JetStream) -> None:
        subscription = await subscribe(jetstream, stream=published)
        assert len(await sequences(subscription, 5)) == 5
        waiting = asyncio.create_task(anext(subscription))
        await asyncio.sleep(0)
        await jetstream.connection.close()
        with pytest.raises(ConnectError):
            await asyncio.wait_for(waiting, 60)

    run(shared_server.url, work)


def test_a_stream_deleted_under_a_subscription_is_an_error(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url)

    async def work(jetstream: JetStream) -> None:
        config = ConsumerConfig(idle_heartbeat=0.1)
        subscription = await subscribe(jetstream, stream=stream, config=config)
        waiting = asyncio.create_task(anext(subscription))
        api(shared_server.url, f"STREAM.DELETE.{stream}")
        with pytest.raises(ConsumerDeletedError):
            await asyncio.wait_for(waiting, 60)
        with pytest.raises(ConsumerDeletedError):
            await anext(subscription)
        await subscription.unsubscribe()

    run(shared_server.url, work)


def test_a_slow_caller_is_told_what_was_dropped(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url)

    async def work(jetstream: JetStream) -> None:
        none = ConsumerConfig(ack_policy="none")
        async with await subscribe(
            jetstream, stream=stream, config=none, pending_bytes=100_000
        ) as subscription:
            await asyncio.to_thread(fill, shared_server.url, stream, 1000, 1000)
            await flushed(jetstream.connection.client)
            with pytest.raises(SlowConsumerError, match=r"\d+ messages were dropped.*flow_control"):
                [await subscription.next(15) for _ in range(1000)]

    run(shared_server.url, work)


def test_flow_control_lets_the_server_wait_for_a_slow_caller(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 6000, 10_000)

    async def work(jetstream: JetStream) -> None:
        config = ConsumerConfig(ack_policy="none", flow_control=True, idle_heartbeat=5.0)
        async with await subscribe(jetstream, stream=stream, config=config) as subscription:
            # The caller rests until the server does: it says that it waits.
            inbox = subscription._arrivals._inbox
            sizes = [0]

            async def rests() -> bool:
                sizes.append(inbox.nbytes)
                await asyncio.sleep(0.05)
                return inbox.nbytes > 0 and len(set(sizes[-5:])) == 1

            await until("the server rests", rests)
            assert inbox.nbytes < 40 << 20
            found = await sequences(subscription, 6000)
            assert found == list(range(1, 6001))
            assert inbox.dropped == 0

    run(shared_server.url, work)


def test_what_the_user_may_not_do_is_an_error(tmp_path: Path) -> None:
    config = tmp_path / "server.conf"
    config.write_text("""
        authorization { users: [
          { user: all, password: one }
          { user: deaf, password: two, permissions: { subscribe: { deny: "to.>" } } }
          { user: keeper, password: four, permissions: {
              publish: { deny: "$JS.API.CONSUMER.DELETE.>" } } }
          { user: mute, password: three, permissions: {
              publish: { deny: "$JS.API.CONSUMER.MSG.NEXT.>" } } }
        ] }
    """)
    with NatsServer(config=config) as server:
        every = server.url.replace("//", "//all:one@")
        stream = make_stream(every, 1)
        make_consumer(every, stream, "push", deliver_subject=f"to.{stream}")
        make_consumer(every, stream, "pull")

        async def deaf(jetstream: JetStream) -> None:
            with pytest.raises(PermissionDeniedError, match=rf"to\.{stream}"):
                await subscribe(jetstream, stream=stream, bind="push")
            mine = ConsumerConfig(deliver_subject=f"to.me.{stream}")
            with pytest.raises(PermissionDeniedError, match=rf"to\.me\.{stream}"):
                await subscribe(jetstream, stream=stream, config=mine)
            assert consumers_of(every, stream) == ["pull", "push"]

        async def mute(jetstream: JetStream) -> None:
            async with await subscribe(jetstream, stream=stream, bind="pull", pull=True) as pull:
                with pytest.raises(PermissionDeniedError, match=r"MSG\.NEXT"):
                    await pull.fetch(1, 10)
                for _ in range(2):
                    with pytest.raises(PermissionDeniedError, match=r"MSG\.NEXT"):
                        await asyncio.wait_for(anext(pull), 60)

        async def keeper(jetstream: JetStream) -> None:
            async with await subscribe(jetstream, stream=stream, ordered=True) as subscription:
                await subscription.next(15)
            # The connection is sound, and others use it: it is not made anew.
            assert await jetstream.connection.alive(5)
            assert jetstream.connection.reconnects == 0

        run(server.url.replace("//", "//deaf:two@"), deaf)
        run(server.url.replace("//", "//mute:three@"), mute)
        run(server.url.replace("//", "//keeper:four@"), keeper)


# Read-after-write


@pytest.mark.parametrize("kind", [{}, {"pull": True}, {"ordered": True}])
def test_a_consumer_waits_for_the_sequence(
    shared_server: NatsServer, kind: dict[str, bool]
) -> None:
    stream = make_stream(shared_server.url, 5)

    async def work(jetstream: JetStream) -> None:
        asked: Any = subscribe
        with pytest.raises(MinLastSequenceError) as raised:
            await asked(jetstream, stream=stream, min_last_seq=6, reach_timeout=0.5, **kind)
        assert (raised.value.code, raised.value.err_code) == (412, 10180)
        assert consumers_of(shared_server.url, stream) == []
        waiting = asyncio.create_task(asked(jetstream, stream=stream, min_last_seq=6, **kind))
        await asyncio.sleep(0)
        assert not waiting.done()
        await asyncio.to_thread(fill, shared_server.url, stream, 1)
        subscription = await waiting
        if not kind:
            info = await jetstream.consumer_info(stream, subscription.info.name)
            assert info["delivered"]["stream_seq"] + info["num_pending"] == 6
        if "pull" in kind:
            assert subscription.info.num_pending == 6
        found = [(await anext(subscription)).metadata.stream_seq for _ in range(6)]
        assert found == [1, 2, 3, 4, 5, 6]
        await subscription.unsubscribe()
        assert consumers_of(shared_server.url, stream) == []

    run(shared_server.url, work)


def test_no_released_server_keeps_min_last_seq(shared_server: NatsServer) -> None:
    """Why it is kept by the library: the field is refused, or has no effect."""
    stream = make_stream(shared_server.url, 1)

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

    answer = with_client(shared_server.url, work)
    assert "error" not in answer or answer["error"]["err_code"] == 10025
