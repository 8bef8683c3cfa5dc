"""Consumers of subscriptions: found, created, shared, deleted and refused (ADR-15)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    ApiError,
    ConsumerDiffersError,
    ConsumerModeError,
    ConsumerNotFoundError,
    DeliverGroupError,
    DuplicateSubscriptionError,
    NoMatchingStreamError,
    StreamNotFoundError,
    SubscribeError,
    SubscriptionClosedError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.subscriptions.message import JsMessage
from nats_stream_source.jetstream.subscriptions.push import Subscription
from nats_stream_source.jetstream.subscriptions.subscribe import (
    ConsumerConfig,
    subscribe,
    subscribe_ordered,
    subscribe_pull,
)
from tests.support.nats.buckets import consumers_of
from tests.support.nats.subscriptions import (
    connected,
    consumer_info,
    fill,
    make_consumer,
    make_stream,
    sequences,
)
from tests.support.nats.topology import CONSUMER_LIMITS
from tests.support.proxy.fault_proxy import Proxy
from tests.support.wait import wait_until_async

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
            with pytest.raises(SubscribeError, match="neither subject nor stream is set"):
                await subscribe(jetstream)
            assert proxy.sent == []
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
    with pytest.raises(StreamNotFoundError):
        await subscribe(jetstream, stream="MISSING")


async def test_push_consumer_is_created_as_requested(
    url: str, jetstream: JetStream, stream: str
) -> None:
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
    url: str, jetstream: JetStream, limits: dict[str, int], min_last_seq: int | None
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
    url: str, jetstream: JetStream, config: ConsumerConfig, limits: dict[str, int], cure: str
) -> None:
    stream = make_stream(url, 3, consumer_limits=limits)
    with pytest.raises(ApiError, match=cure):
        await subscribe(jetstream, stream=stream, config=config)
    if config.ack_policy:
        follows_cure = ConsumerConfig(ack_policy="none", max_ack_pending=-1)
        async with await subscribe(jetstream, stream=stream, config=follows_cure) as subscription:
            assert await sequences(subscription, 3) == [1, 2, 3]


async def test_consumer_created_is_deleted_at_end(url: str, jetstream: JetStream) -> None:
    stream = make_stream(url, 1)

    ephemeral = await subscribe(jetstream, f"{stream}.>")
    durable = await subscribe(jetstream, f"{stream}.>", durable="d")
    pull = await subscribe_pull(jetstream, f"{stream}.>", durable="p")
    ordered = await subscribe_ordered(jetstream, f"{stream}.>")
    assert (await ordered.next(5)).metadata.stream_seq == 1
    names = consumers_of(url, stream)
    assert {"d", "p", ephemeral.info.name} < set(names)
    assert len(names) == 4
    assert ephemeral.info.push_bound
    for subscription in (ephemeral, durable, pull, ordered):
        await subscription.unsubscribe()
        await subscription.unsubscribe()
    assert consumers_of(url, stream) == []
    with pytest.raises(SubscriptionClosedError):
        await ephemeral.next()
    assert [message async for message in ephemeral] == []
    with pytest.raises(SubscriptionClosedError):
        await pull.fetch()
    assert [message async for message in pull] == []


async def test_consumer_found_is_kept(url: str, jetstream: JetStream, published: str) -> None:
    quick = {"deliver_subject": f"to.{published}", "ack_wait": 200_000_000}
    make_consumer(url, published, "push", **quick)
    make_consumer(url, published, "pull")

    for how in ({"durable": "push"}, {"bind": "push"}):
        async with await subscribe(jetstream, stream=published, **how) as subscription:
            assert len(await sequences(subscription, 2)) == 2
    async with await subscribe_pull(jetstream, stream=published, bind="pull") as pull:
        assert len(await pull.fetch(5)) == 5
    assert set(consumers_of(url, published)) == {"push", "pull"}


async def test_consumer_to_bind_must_exist(url: str, jetstream: JetStream) -> None:
    stream = make_stream(url, 1)

    with pytest.raises(ConsumerNotFoundError):
        await subscribe(jetstream, stream=stream, bind="missing")
    assert consumers_of(url, stream) == []
    # A pull subscription goes on, and works once the consumer is there.
    async with await subscribe_pull(jetstream, stream=stream, bind="later") as pull:
        make_consumer(url, stream, "later")
        assert len(await pull.fetch(1)) == 1
    assert consumers_of(url, stream) == ["later"]


async def test_consumer_mismatch_is_refused(url: str, jetstream: JetStream) -> None:
    stream = make_stream(url, 1)
    make_consumer(url, stream, "push", deliver_subject=f"to.{stream}")
    make_consumer(url, stream, "pull", max_deliver=7)

    async def refused(error: type[Exception], kind: Any = subscribe, **how: Any) -> None:
        with pytest.raises(error):
            await kind(jetstream, stream=stream, **how)

    await refused(ConsumerModeError, subscribe_pull, bind="push")
    await refused(ConsumerModeError, bind="pull")
    await refused(DeliverGroupError, bind="push", queue="g")
    differs = ConsumerConfig(max_deliver=8)
    await refused(ConsumerDiffersError, subscribe_pull, durable="pull", config=differs)
    same = ConsumerConfig(max_deliver=7)
    (await subscribe_pull(jetstream, stream=stream, durable="pull", config=same))
    async with await subscribe(jetstream, stream=stream, bind="push"):
        # The server notes a subscription a moment later.
        await wait_until_async(
            lambda: bool(consumer_info(url, stream, "push").get("push_bound")), "bound"
        )
        await refused(DuplicateSubscriptionError, bind="push")
    assert set(consumers_of(url, stream)) == {"push", "pull"}


async def test_server_refusal_leaves_nothing(url: str, jetstream: JetStream, stream: str) -> None:
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
    assert consumers_of(url, stream) == []


async def test_queue_group_shares_messages(url: str, jetstream: JetStream, stream: str) -> None:
    got: dict[str, list[int]] = {"one": [], "two": []}

    def to(name: str) -> Any:
        async def callback(message: JsMessage) -> None:
            got[name].append(message.metadata.stream_seq)
            await message.ack()

        return callback

    one = await subscribe(jetstream, f"{stream}.>", queue="workers", callback=to("one"))
    async with connected(url) as elsewhere:
        two = await subscribe(elsewhere, f"{stream}.>", queue="workers", callback=to("two"))
        # Without a name of its own, the consumer is the queue's.
        assert consumers_of(url, stream) == ["workers"]
        assert (one.consumer.created, two.consumer.created) == (True, False)
        await asyncio.to_thread(fill, url, stream, 200)
        await wait_until_async(lambda: len(got["one"]) + len(got["two"]) >= 200, "all 200")
        assert sorted(got["one"] + got["two"]) == list(range(1, 201))
        assert got["one"]
        assert got["two"]
        # The member that found the consumer leaves it to the others.
        await two.unsubscribe()
        assert consumers_of(url, stream) == ["workers"]
    await one.unsubscribe()
    # The member that created it takes it away, as the document says (and regrets).
    assert consumers_of(url, stream) == []


class Racing(JetStream):
    """Reports once that a consumer is missing, after all requests have arrived."""

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


async def race(jetstream: JetStream, kind: Callable[..., Any] = subscribe, **how: Any) -> list[Any]:
    barrier, others = asyncio.Event(), list[int]()
    racers = [Racing(jetstream, barrier, others) for _ in range(2)]
    attempts = (kind(racer, durable="d", **how) for racer in racers)
    outcome = await asyncio.gather(*attempts, return_exceptions=True)
    assert sum(racer.lost for racer in racers) == 1
    return outcome


async def test_creators_concurrent_report_duplicate(url: str, jetstream: JetStream) -> None:
    stream = make_stream(url, 3)

    outcome = await race(jetstream, stream=stream)
    (winner,) = (one for one in outcome if isinstance(one, Subscription))
    (error,) = (one for one in outcome if isinstance(one, Exception))
    assert isinstance(error, DuplicateSubscriptionError)
    assert winner.consumer.created
    assert await sequences(winner, 3) == [1, 2, 3]
    await winner.unsubscribe()


async def test_creator_without_interest_is_duplicate(url: str, jetstream: JetStream) -> None:
    stream = make_stream(url)

    class Late(JetStream):
        async def add_consumer(self, stream: str, config: dict[str, Any]) -> dict[str, Any]:
            make_consumer(url, stream, config["name"], deliver_subject="elsewhere")
            return await super().add_consumer(stream, config)

    with pytest.raises(DuplicateSubscriptionError, match="at the same time"):
        await subscribe(Late(jetstream.connection), stream=stream, durable="d")
    assert consumers_of(url, stream) == ["d"]


async def test_creators_concurrent_in_queue_group_join(
    url: str, jetstream: JetStream, stream: str
) -> None:
    outcome = await race(jetstream, stream=stream, queue="q")
    assert all(isinstance(one, Subscription) for one in outcome)
    assert sorted(one.consumer.created for one in outcome) == [False, True]
    assert len({one.info.config["deliver_subject"] for one in outcome}) == 1
    await asyncio.to_thread(fill, url, stream, 100)

    parts: list[list[int]] = [[] for _ in outcome]

    async def take(subscription: Subscription, part: list[int]) -> None:
        async for message in subscription:
            part.append(message.metadata.stream_seq)
            await message.ack()

    taking = [asyncio.ensure_future(take(*one)) for one in zip(outcome, parts, strict=True)]
    await wait_until_async(lambda: sum(map(len, parts)) >= 100, "all messages")
    for one in taking:
        one.cancel()
    await asyncio.wait(taking)
    assert all(parts)
    assert sorted(seq for part in parts for seq in part) == list(range(1, 101))
    for one in sorted(outcome, key=lambda one: bool(one.consumer.created)):
        await one.unsubscribe()
    assert consumers_of(url, stream) == []


async def test_creators_concurrent_of_pull_consumer_own_it_once(
    url: str, jetstream: JetStream
) -> None:
    stream = make_stream(url, 4)

    one, two = await race(jetstream, subscribe_pull, stream=stream)
    assert sorted((one.consumer.created, two.consumer.created)) == [False, True]
    assert len(await one.fetch(2)) == len(await two.fetch(2)) == 2
    await (two if one.consumer.created else one).unsubscribe()
    assert consumers_of(url, stream) == ["d"]
