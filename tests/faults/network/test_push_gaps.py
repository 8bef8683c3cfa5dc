"""Push subscriptions report lost messages and missed heartbeats, and reconnect (ADR-15)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    ConsumerDeletedError,
    ConsumerGapError,
    MissedHeartbeatError,
    NatsSourceError,
    NextTimeoutError,
)
from nats_stream_source.jetstream.subscriptions.subscribe import (
    ConsumerConfig,
    subscribe,
    subscribe_ordered,
    subscribe_pull,
)
from nats_stream_source.wire.consumer.cursor import Rebuild
from tests.faults.network.push import all_of, through_proxy
from tests.support.nats.subscriptions import (
    connected,
    consumer_info,
    fill,
    make_consumer,
    make_stream,
)
from tests.support.proxy.fault_proxy import Delay, Outcome, Proxy, is_status
from tests.support.proxy.verdicts import Sequences, Status
from tests.support.wait import wait_until_async

BEATING = ConsumerConfig(ack_policy="none", idle_heartbeat=0.5)


async def test_message_lost_is_gap(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 10)
    fault = Sequences([4])
    async with through_proxy(shared_server, stream, fault) as (proxy, subscription):
        found, errors = await all_of(subscription, 10)
        # The message after the gap is not lost to the alarm.
        assert found == [1, 2, 3, 5, 6, 7, 8, 9, 10]
        assert [type(error) for error in errors] == [ConsumerGapError]
        assert "observed consumer sequence 5, expected 4" in str(errors[0])
    assert len(proxy.dropped) == 1


async def test_last_message_lost_is_found_by_heartbeat(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 10)
    fault = Sequences([10])
    errors: list[Exception] = []
    async with through_proxy(
        shared_server, stream, fault, config=BEATING, on_error=errors.append
    ) as (proxy, subscription):
        assert (await all_of(subscription, 9))[0] == list(range(1, 10))
        waiting = asyncio.create_task(subscription.next())
        await wait_until_async(lambda: bool(errors), "the alarm")
        await asyncio.to_thread(fill, shared_server.url, stream, 1)
        # And the count goes on after it: no second alarm.
        assert (await waiting).metadata.stream_seq == 11
        assert [type(error) for error in errors] == [ConsumerGapError]
    assert len(proxy.dropped) == 1


async def test_queue_group_detects_no_gaps(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url)
    fault = Sequences([4])
    async with through_proxy(
        shared_server, stream, fault, queue="q", config=ConsumerConfig(ack_policy="none")
    ) as (proxy, subscription):
        await asyncio.to_thread(fill, shared_server.url, stream, 10)
        found, errors = await all_of(subscription, 10)
        assert (found, errors) == ([1, 2, 3, 5, 6, 7, 8, 9, 10], [])
    assert len(proxy.dropped) == 1


async def test_consumer_bound_midway_has_no_gap_before(shared_server: NatsServer) -> None:
    url = shared_server.url
    stream = make_stream(url, 5)
    config = {"deliver_subject": f"to.{stream}", "idle_heartbeat": 100_000_000}
    make_consumer(url, stream, "d", ack_policy="none", **config)
    fault = Sequences([8])

    async with (
        connected(url) as jetstream,
        await subscribe(jetstream, stream=stream, durable="d") as subscription,
    ):
        assert await all_of(subscription, 5) == ([1, 2, 3, 4, 5], [])
    fill(url, stream, 5)
    async with through_proxy(shared_server, stream, fault, durable="d", config=None) as (
        proxy,
        subscription,
    ):
        found, errors = await all_of(subscription, 10)
        assert found == [6, 7, 9, 10]
        assert [type(error) for error in errors] == [ConsumerGapError]
    assert len(proxy.dropped) == 1


async def test_missed_heartbeats_raise_alarm(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 1)
    async with through_proxy(shared_server, stream, config=BEATING) as (proxy, subscription):
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


class SilentIntervals:
    """Two intervals without a heartbeat after the first one, then one heartbeat, then silence.

    The heartbeat that ends the two intervals comes a quarter of an interval late, so that a limit
    of two intervals is exceeded.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self.heartbeats = 0

    def __call__(self, frame: bytes) -> Outcome:
        if not is_status(frame, b"Idle Heartbeat"):
            return True
        self.heartbeats += 1
        if self.heartbeats == 3:
            return Delay(self._interval / 4)
        return self.heartbeats == 1


async def test_heartbeat_alarm_after_three_intervals(shared_server: NatsServer) -> None:
    """ADR-15, "Heartbeats": a push subscription raises, an ordered one rebuilds its consumer."""
    url, port = shared_server.url, shared_server.port
    interval = 1.0
    config = ConsumerConfig(idle_heartbeat=interval)

    async def push() -> None:
        stream, silent = make_stream(url, 1), SilentIntervals(interval)
        async with through_proxy(shared_server, stream, silent, config=config) as (
            _,
            subscription,
        ):
            await subscription.next(15)
            with pytest.raises(MissedHeartbeatError):
                await subscription.next(60)
            # Not after the second one, and not before two more were missed.
            assert silent.heartbeats >= 5

    async def ordered() -> None:
        stream, silent = make_stream(url, 1), SilentIntervals(interval)
        with Proxy(port, silent) as proxy:
            async with (
                connected(proxy.url) as jetstream,
                await subscribe_ordered(jetstream, stream=stream, config=config) as subscription,
            ):
                await subscription.next(15)
                waiting = asyncio.create_task(subscription.next())
                rebuilds = subscription.reader.cursor.rebuilds
                await wait_until_async(lambda: bool(rebuilds), "a rebuild")
                assert silent.heartbeats >= 5
                assert rebuilds == [Rebuild.MISSED_HEARTBEAT]
                proxy.verdict = lambda frame: True
                await asyncio.to_thread(fill, url, stream, 1)
                assert (await waiting).metadata.stream_seq == 2

    async def pull() -> None:
        stream, silent = make_stream(url), SilentIntervals(interval)
        with Proxy(port, silent) as proxy:
            async with (
                connected(proxy.url) as jetstream,
                await subscribe_pull(jetstream, stream=stream) as subscription,
            ):
                # Its heartbeats come at a quarter, half and three quarters of its time.
                assert await subscription.fetch(1, 4 * interval) == []
                assert silent.heartbeats >= 3

    await asyncio.gather(push(), ordered(), pull())


async def test_heartbeat_alarm_goes_to_callback(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 1)
    errors: list[Exception] = []
    found: list[int] = []

    async def callback(message: Any) -> None:
        found.append(message.metadata.stream_seq)

    async with through_proxy(
        shared_server,
        stream,
        Status("Idle"),
        config=BEATING,
        callback=callback,
        on_error=errors.append,
    ) as (proxy, _):
        await wait_until_async(lambda: len(errors) >= 2, "two alarms")
        await asyncio.to_thread(fill, shared_server.url, stream, 1)
        await wait_until_async(lambda: found == [1, 2], "both messages")
    assert {type(error) for error in errors} == {MissedHeartbeatError}
    assert proxy.dropped


async def test_busy_loop_does_not_miss_heartbeats(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url)

    async with (
        connected(shared_server.url) as jetstream,
        await subscribe(jetstream, stream=stream, config=BEATING) as subscription,
    ):
        waiting = asyncio.create_task(subscription.next())
        await asyncio.sleep(0.05)

        time.sleep(2.5)  # noqa: ASYNC251  (the loop stands still while five heartbeats arrive)
        await asyncio.to_thread(fill, shared_server.url, stream, 1)
        assert (await waiting).metadata.stream_seq == 1


# -- a lost connection -----------------------------------------------------------------------------


async def test_ephemeral_consumer_lost_with_server_is_error(nats_server: NatsServer) -> None:
    memory = {"mem_storage": True, "inactive_threshold": 0.2}
    stream = make_stream(nats_server.url, 3)

    async with connected(nats_server.url) as jetstream:
        config = ConsumerConfig(idle_heartbeat=0.2, **memory)
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


async def test_durable_consumer_resumes_after_lost_connection(shared_server: NatsServer) -> None:
    stream = make_stream(shared_server.url, 3)
    async with through_proxy(shared_server, stream, durable="d", config=None) as (
        proxy,
        subscription,
    ):
        for message in [await subscription.next(15) for _ in range(3)]:
            await message.ack_sync()
        waiting = asyncio.create_task(subscription.next())
        await asyncio.to_thread(proxy.cut)
        await wait_until_async(lambda: proxy.connections == 2, "a reconnect")
        await asyncio.to_thread(fill, shared_server.url, stream, 1)
        assert (await waiting).metadata.stream_seq == 4
        assert consumer_info(shared_server.url, stream, "d")["push_bound"]
