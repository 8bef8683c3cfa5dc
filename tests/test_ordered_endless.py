"""The ordered reader without an end, as watches use it: at once, bounded, through real trouble."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from buckets import api, consumers, create_bucket, delete_bucket, put, put_many, stream_info
from proxy import Proxy, is_delivery

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ConnectError, MinLastSequenceError, StreamNotFoundError
from nats_stream_source.jetstream.connection import Connection, ConnectionSettings
from nats_stream_source.jetstream.link import SharedLink
from nats_stream_source.jetstream.ordered import OrderedReader
from nats_stream_source.jetstream.range_request import ENDLESS, RangeRequest
from nats_stream_source.wire.columns import ack_tokens
from nats_stream_source.wire.cursor import Rebuild
from nats_stream_source.wire.frames import Frames

DEADLINE = 60.0  # seconds for what takes milliseconds, or some on a busy machine

UNHEARD = 30.0
"""Seconds: a heartbeat for tests of other things, so that a server that is held up is not lost."""

Work = Callable[[OrderedReader, AsyncIterator[Frames]], Coroutine[Any, Any, None]]


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Connection]:
    connection = await Connection.open(ConnectionSettings(servers=(url,)))
    try:
        yield connection
    finally:
        await connection.close()


def follow(url: str, server: NatsServer, work: Work, **request: Any) -> None:
    """Run ``work`` on an endless, eager reader of the bucket ``b``; nothing is left behind."""
    created = stream_info(server.url, "b")["created"]
    request = {"start": 0, "end": ENDLESS, "eager": True, "heartbeat": 0.1, **request}

    async def whole() -> None:
        async with connected(url) as connection:
            reader = OrderedReader(SharedLink(connection), RangeRequest("KV_b", created, **request))
            async with aclosing(reader.batches()) as batches:
                await asyncio.wait_for(work(reader, batches), DEADLINE)

    asyncio.run(whole())


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition; :func:`follow` has the deadline."""
    while not condition():  # noqa: ASYNC110 (it is the server's or another thread's doing)
        await asyncio.sleep(0.01)


async def rows(batches: AsyncIterator[Frames], count: int) -> list[int]:
    """The next ``count`` stream sequences."""
    found: list[int] = []
    while len(found) < count:
        found += ack_tokens(await anext(batches)).stream_seq.tolist()
    return found


def test_what_is_written_comes_at_once(nats_server: NatsServer) -> None:
    url = nats_server.url
    create_bucket(url, "b", history=5)
    put_many(url, "b", ((f"k{i}", b"v") for i in range(10)))

    async def work(reader: OrderedReader, batches: AsyncIterator[Frames]) -> None:
        assert await rows(batches, 10) == list(range(1, 11))
        for revision in range(11, 14):
            put(url, "b", "later", b"v")
            assert await rows(batches, 1) == [revision]

    follow(url, nats_server, work)
    assert consumers(url, "b") == []


def test_the_reach_is_told_by_an_empty_batch_when_no_message_tells_it(
    nats_server: NatsServer,
) -> None:
    url = nats_server.url
    create_bucket(url, "b")
    put_many(url, "b", [("a", b"1"), ("other", b"2"), ("other", b"3")])

    async def work(reader: OrderedReader, batches: AsyncIterator[Frames]) -> None:
        assert await rows(batches, 1) == [1]
        assert len(await anext(batches)) == 0
        assert reader.cursor.seen_through == 3
        put(url, "b", "a", b"4")
        assert await rows(batches, 1) == [4]

    follow(url, nats_server, work, filters=("$KV.b.a",), reach=3)


def test_an_empty_bucket_tells_its_reach_first(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b")

    async def work(reader: OrderedReader, batches: AsyncIterator[Frames]) -> None:
        assert len(await anext(batches)) == 0

    follow(nats_server.url, nats_server, work)


def test_a_reach_that_never_comes(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b")
    put(nats_server.url, "b", "k", b"v")

    async def work(reader: OrderedReader, batches: AsyncIterator[Frames]) -> None:
        assert await rows(batches, 1) == [1]
        with pytest.raises(MinLastSequenceError, match="has reached 1, not 5"):
            await anext(batches)

    follow(nats_server.url, nats_server, work, reach=5, catch_up=0.3)
    assert consumers(nats_server.url, "b") == []


def test_the_list_of_last_values_begins_anew_after_a_gap(nats_server: NatsServer) -> None:
    """Each key's last value comes once, none of the older ones, though a message was lost."""
    url = nats_server.url
    create_bucket(url, "b", history=10)
    put_many(url, "b", ((f"k{i % 50}", b"v") for i in range(200)))
    lost = iter([True])
    hit = b"$KV.b.k30 "

    with Proxy(
        nats_server.port, lambda f: not (is_delivery(f) and hit in f and next(lost, False))
    ) as proxy:

        async def work(reader: OrderedReader, batches: AsyncIterator[Frames]) -> None:
            assert await rows(batches, 50) == list(range(151, 201))
            put(url, "b", "k1", b"w")
            assert await rows(batches, 1) == [201]
            assert reader.cursor.rebuilds == [Rebuild.GAP]

        follow(
            proxy.url,
            nats_server,
            work,
            filters=("$KV.b.>",),
            last_per_subject=True,
            reach=200,
            heartbeat=UNHEARD,
        )
        assert len(proxy.dropped) == 1


def test_after_the_list_a_rebuild_brings_all_that_was_written(nats_server: NatsServer) -> None:
    """Behind the initial values every change counts, not only the last of each key."""
    url = nats_server.url
    create_bucket(url, "b", history=10)
    put_many(url, "b", ((f"k{i}", b"v") for i in range(5)))

    async def work(reader: OrderedReader, batches: AsyncIterator[Frames]) -> None:
        assert await rows(batches, 5) == [1, 2, 3, 4, 5]
        nats_server.terminate()
        nats_server.start()
        put_many(url, "b", (("k1", b"w") for _ in range(3)))
        assert await rows(batches, 3) == [6, 7, 8]
        assert reader.cursor.rebuilds

    follow(nats_server.url, nats_server, work, filters=("$KV.b.>",), last_per_subject=True, reach=5)
    assert consumers(url, "b") == []


def test_a_reader_that_is_away_holds_a_bounded_backlog(nats_server: NatsServer) -> None:
    """Flow control makes the server wait; nothing is lost, and no consumer is rebuilt."""
    url = nats_server.url
    create_bucket(url, "b", history=64)
    count, size = 60_000, 1000

    async def work(reader: OrderedReader, batches: AsyncIterator[Frames]) -> None:
        assert len(await anext(batches)) == 0
        inbox = reader._inbox
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

    follow(nats_server.url, nats_server, work, heartbeat=UNHEARD)


def test_without_flow_control_too_much_is_a_gap(nats_server: NatsServer) -> None:
    url = nats_server.url
    create_bucket(url, "b", history=64)

    async def work(reader: OrderedReader, batches: AsyncIterator[Frames]) -> None:
        reader._flow_control = False
        assert len(await anext(batches)) == 0
        inbox = reader._inbox
        assert inbox is not None
        inbox.most_bytes = 100_000
        put_many(url, "b", ((f"k{i % 100}", b"x" * 1000) for i in range(1000)))
        await until(lambda: inbox.dropped)
        assert await rows(batches, 1000) == list(range(1, 1001))
        assert Rebuild.GAP in reader.cursor.rebuilds

    follow(nats_server.url, nats_server, work)


def test_a_stream_deleted_meanwhile(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b")

    async def work(reader: OrderedReader, batches: AsyncIterator[Frames]) -> None:
        assert len(await anext(batches)) == 0
        delete_bucket(nats_server.url, "b")
        with pytest.raises(StreamNotFoundError):
            await anext(batches)

    follow(nats_server.url, nats_server, work)


def test_many_restarts_while_idle_are_no_reason_to_give_up(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b")

    async def work(reader: OrderedReader, batches: AsyncIterator[Frames]) -> None:
        assert len(await anext(batches)) == 0
        cursor = reader.cursor
        waiting = asyncio.ensure_future(rows(batches, 1))
        for times in range(1, 4):
            # A consumer of its own is enough to be lost: the server need not go down for that.
            for name in await asyncio.to_thread(consumers, nats_server.url, "b"):
                await asyncio.to_thread(api, nats_server.url, f"CONSUMER.DELETE.KV_b.{name}")
            await until(lambda n=times: len(cursor.rebuilds) >= n and not cursor.fruitless)
        put(nats_server.url, "b", "k", b"v")
        assert await waiting == [1]

    follow(nats_server.url, nats_server, work, attempts=2)


def test_two_readers_survive_a_connection_that_one_of_them_gives_up(
    nats_server: NatsServer,
) -> None:
    """A shared connection is made anew, not closed; a paused server is no end either."""
    url = nats_server.url
    create_bucket(url, "b", history=5)
    created = stream_info(url, "b")["created"]

    async def whole() -> None:
        async with connected(url) as connection:
            link = SharedLink(connection)
            request = RangeRequest("KV_b", created, 0, ENDLESS, eager=True, heartbeat=0.1)
            readers = [OrderedReader(link, request) for _ in range(2)]
            async with aclosing(readers[0].batches()) as one, aclosing(readers[1].batches()) as two:
                for batches in (one, two):
                    assert len(await anext(batches)) == 0
                put(url, "b", "k", b"v")
                assert [await rows(one, 1), await rows(two, 1)] == [[1], [1]]
                await link.drop()
                put(url, "b", "k", b"w")
                assert [await rows(one, 1), await rows(two, 1)] == [[2], [2]]
                assert connection.reconnects == 1
        with pytest.raises(ConnectError):
            await link.connection()

    asyncio.run(asyncio.wait_for(whole(), DEADLINE))
    assert consumers(url, "b") == []
