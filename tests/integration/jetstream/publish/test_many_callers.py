"""Thousands of callers of one publisher at a time: each has its PubAck, or a named error soon."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Sequence
from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import AckLostError, ConnectError
from nats_stream_source.jetstream import KeyValue, KeyValueConfig, ObjectStore, connect
from nats_stream_source.jetstream.publish.publisher import IN_FLIGHT, Publisher
from tests.support.wait import wait_until_async


async def outcomes(work: Sequence[Awaitable[object]]) -> Counter[type]:
    results = await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), 60)
    return Counter(type(result) for result in results)


async def test_connection_closes_while_messages_wait_for_their_turn(
    nats_server: NatsServer,
) -> None:
    async with connect(nats_server.url) as jetstream:
        bucket = await KeyValue.create_bucket(jetstream, KeyValueConfig("closed"))
        await bucket.put("first", b"")
        publisher = jetstream.connection.service(Publisher)
        nats_server.pause()
        try:
            puts = [asyncio.create_task(bucket.put(f"k{i}", b"")) for i in range(3 * IN_FLIGHT)]
            slots = publisher._in_flight.slots
            await wait_until_async(slots.locked, "all turns are taken")
            await jetstream.connection.close()
            ended = await outcomes(puts)
        finally:
            nats_server.resume()
    assert ended == {AckLostError: IN_FLIGHT, ConnectError: 2 * IN_FLIGHT}


async def test_server_is_away_while_messages_wait_for_their_turn(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The callers wait side by side, not each thousand after the one before it."""
    async with connect(nats_server.url, request_timeout=1.0) as jetstream:
        connection = jetstream.connection
        bucket = await KeyValue.create_bucket(jetstream, KeyValueConfig("away"))
        await bucket.put("first", b"")
        await asyncio.to_thread(nats_server.kill)
        await wait_until_async(lambda: not connection.online.is_set(), "the connection is lost")
        wait, remaining = connection.wait_connected, list[float]()

        async def wait_connected(seconds: float, waited: float = 0.0) -> None:
            remaining.append(seconds - waited)
            await wait(seconds, waited)

        monkeypatch.setattr(connection, "wait_connected", wait_connected)
        puts = [bucket.put(f"k{i}", b"") for i in range(5 * IN_FLIGHT)]
        assert await outcomes(puts) == {ConnectError: 5 * IN_FLIGHT}
        assert len(remaining) == 5 * IN_FLIGHT
        # The time in which they waited for the others counts.
        assert max(remaining[IN_FLIGHT:]) < 1.0


async def test_full_buffer_while_messages_wait_for_their_turn(tmp_path: Path) -> None:
    """The time in which a message waits for others is not that of its retries (429)."""
    config = tmp_path / "buffer.conf"
    config.write_text("jetstream { max_buffered_msgs: 50 }\n")
    with NatsServer(config=config) as server:
        async with connect(server.url) as jetstream:
            bucket = await KeyValue.create_bucket(jetstream, KeyValueConfig("full"))
            publisher = jetstream.connection.service(Publisher)
            sent = publisher._in_flight._serial
            ended = await outcomes([bucket.put(f"k{i % 200}", b"") for i in range(20 * IN_FLIGHT)])
            assert ended == {int: 20 * IN_FLIGHT}
            assert publisher._in_flight._serial - sent > 20 * IN_FLIGHT, "none was rejected"


async def test_chunks_of_object_while_buffer_is_full(tmp_path: Path) -> None:
    """The stream rejects chunks and stores those behind: the object has its bytes in order."""
    config = tmp_path / "buffer.conf"
    config.write_text("jetstream { max_buffered_msgs: 100 }\n")
    with NatsServer(config=config) as server:
        async with connect(server.url) as jetstream:
            store = await ObjectStore.create(jetstream, "objects")
            publisher = jetstream.connection.service(Publisher)
            objects = [b"%d," % number * 100_000 for number in range(6)]
            await asyncio.gather(
                *(
                    store.put(f"o{number}", data, chunk_size=2000)
                    for number, data in enumerate(objects)
                )
            )
            messages = (await jetstream.stream_info(store.stream)).messages
            assert messages == sum(len(data) // 2000 for data in objects) + len(objects)
            assert publisher._in_flight._serial > messages, "no chunk was rejected"
            for number, data in enumerate(objects):
                assert await store.get(f"o{number}") == data
