"""The ordered reader without an end, as watches use it: immediate, bounded, under faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ConnectError, MinLastSequenceError
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import ENDLESS, RangeRequest
from nats_stream_source.jetstream.reusable_connection import SharedConnection
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.wire.consumer.cursor import Rebuild
from nats_stream_source.wire.consumer.deliveries import Deliveries
from tests.support.event_loop import deadline
from tests.support.nats.buckets import (
    api,
    bucket_info,
    consumers,
    create_bucket,
    fill_bucket,
    put,
    put_many,
)
from tests.support.proxy.fault_proxy import Proxy, is_delivery
from tests.support.wait import wait_until_async

DEADLINE = 60.0  # seconds for what takes milliseconds, or some on a busy machine

UNHEARD = 30.0
"""Seconds: a heartbeat for tests of other things, so that a server that is held up is not lost."""


@asynccontextmanager
async def following(
    server: NatsServer, *, through: str = "", **request: Any
) -> AsyncIterator[tuple[OrderedReader, AsyncIterator[Deliveries]]]:
    """An endless, eager reader of the bucket ``b``, and its batches."""
    created = bucket_info(server.url, "b")["created"]
    request = {"start": 0, "end": ENDLESS, "eager": True, "heartbeat": 0.1, **request}
    async with connect(through or server.url) as jetstream:
        link = SharedConnection(jetstream.connection)
        reader = OrderedReader(link, RangeRequest("KV_b", KnownStream(created), **request))
        async with aclosing(reader.batches()) as batches, deadline(DEADLINE):
            yield reader, batches


async def rows(batches: AsyncIterator[Deliveries], count: int) -> list[int]:
    """The next ``count`` stream sequences."""
    found: list[int] = []
    while len(found) < count:
        found += (await anext(batches)).stream_seq.tolist()
    return found


async def test_reach_is_reported_by_empty_batch(nats_server: NatsServer) -> None:
    url = nats_server.url
    fill_bucket(url, "b", [("a", b"1"), ("other", b"2"), ("other", b"3")])

    async with following(nats_server, filters=("$KV.b.a",), min_last_seq=3) as (reader, batches):
        assert await rows(batches, 1) == [1]
        assert len(await anext(batches)) == 0
        assert reader.cursor.seen_through == 3
        put(url, "b", "a", b"4")
        assert await rows(batches, 1) == [4]


async def test_reach_never_comes(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b")
    put(nats_server.url, "b", "k", b"v")

    async with following(nats_server, min_last_seq=5, catch_up_timeout=0.3) as (_, batches):
        assert await rows(batches, 1) == [1]
        with pytest.raises(MinLastSequenceError, match=r"up to sequence 5: .* has reached 1 "):
            await anext(batches)
    assert consumers(nats_server.url, "b") == []


async def test_last_per_subject_restarts_after_gap(nats_server: NatsServer) -> None:
    """Each key's last value comes once, none of the older ones, though a message was lost."""
    url = nats_server.url
    fill_bucket(url, "b", ((f"k{i % 50}", b"v") for i in range(200)), history=10)
    lost = iter([True])
    hit = b"$KV.b.k30 "

    with Proxy(
        nats_server.port, lambda f: not (is_delivery(f) and hit in f and next(lost, False))
    ) as proxy:
        async with following(
            nats_server,
            through=proxy.url,
            filters=("$KV.b.>",),
            last_per_subject=True,
            min_last_seq=200,
            heartbeat=UNHEARD,
        ) as (reader, batches):
            assert await rows(batches, 50) == list(range(151, 201))
            put(url, "b", "k1", b"w")
            assert await rows(batches, 1) == [201]
            assert reader.cursor.rebuilds == [Rebuild.GAP]
        assert len(proxy.dropped) == 1


async def test_reader_paused_holds_bounded_backlog(nats_server: NatsServer) -> None:
    """Flow control makes the server wait; nothing is lost, and no consumer is rebuilt."""
    url = nats_server.url
    create_bucket(url, "b", history=64)
    count, size = 60_000, 1000

    async with following(nats_server, heartbeat=UNHEARD) as (reader, batches):
        assert len(await anext(batches)) == 0
        inbox = reader._consumer.inbox
        assert inbox is not None
        writing = asyncio.get_running_loop().run_in_executor(
            None, put_many, url, "b", ((f"k{i % 2000}", b"x" * size) for i in range(count))
        )
        most = 0
        while not writing.done():
            await asyncio.sleep(0.01)
            most = max(most, inbox.nbytes)
        await writing
        assert 0 < most < count * size / 2
        assert await rows(batches, count) == list(range(1, count + 1))
        assert reader.cursor.rebuilds == []
        assert inbox.dropped == 0


async def test_backlog_without_flow_control_is_gap(nats_server: NatsServer) -> None:
    url = nats_server.url
    create_bucket(url, "b", history=64)

    async with following(nats_server) as (reader, batches):
        reader._consumer.flow_control = False
        assert len(await anext(batches)) == 0
        inbox = reader._consumer.inbox
        assert inbox is not None
        inbox.max_bytes = 100_000
        put_many(url, "b", ((f"k{i % 100}", b"x" * 1000) for i in range(1000)))
        await wait_until_async(lambda: inbox.dropped, "the inbox drops messages")
        assert await rows(batches, 1000) == list(range(1, 1001))
        assert Rebuild.GAP in reader.cursor.rebuilds


async def test_restarts_while_idle_do_not_exhaust_attempts(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b")

    async with following(nats_server, attempts=2) as (reader, batches):
        assert len(await anext(batches)) == 0
        cursor = reader.cursor
        waiting = asyncio.ensure_future(rows(batches, 1))
        for times in range(1, 4):
            # A consumer of its own is enough to be lost: the server need not go down for that.
            for name in await asyncio.to_thread(consumers, nats_server.url, "b"):
                await asyncio.to_thread(api, nats_server.url, f"CONSUMER.DELETE.KV_b.{name}")
            await wait_until_async(
                lambda n=times: len(cursor.rebuilds) >= n and not cursor.failed_rebuilds,
                "the consumer is rebuilt",
            )
        put(nats_server.url, "b", "k", b"v")
        assert await waiting == [1]


async def test_readers_survive_connection_closed_by_one(nats_server: NatsServer) -> None:
    """A shared connection reconnects and is not closed; a paused server does not end readers."""
    url = nats_server.url
    create_bucket(url, "b", history=5)
    created = bucket_info(url, "b")["created"]

    async with connect(url) as jetstream, deadline(DEADLINE):
        link = SharedConnection(jetstream.connection)
        request = RangeRequest("KV_b", KnownStream(created), 0, ENDLESS, eager=True, heartbeat=0.1)
        readers = [OrderedReader(link, request) for _ in range(2)]
        async with aclosing(readers[0].batches()) as one, aclosing(readers[1].batches()) as two:
            for batches in (one, two):
                assert len(await anext(batches)) == 0
            put(url, "b", "k", b"v")
            assert [await rows(one, 1), await rows(two, 1)] == [[1], [1]]
            await link.drop()
            put(url, "b", "k", b"w")
            assert [await rows(one, 1), await rows(two, 1)] == [[2], [2]]
            assert jetstream.connection.reconnects == 1
    with pytest.raises(ConnectError):
        await link.connection()
    assert consumers(url, "b") == []
