"""Publishing with PubAcks: what the server responds, and what it does not; thousands of callers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    AckLostError,
    AckTimeoutError,
    ConfigurationError,
    ConnectError,
    MessageTooLargeError,
    NoStreamError,
    PermissionDeniedError,
    ProtocolError,
    PublishError,
    StreamFullError,
    WrongLastSequenceError,
)
from nats_stream_source.jetstream import KeyValue, KeyValueConfig, connect
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.publish.pub_ack import (
    EXPECTED_LAST_SUBJECT_SEQUENCE,
    MSG_ID,
    PubAck,
)
from nats_stream_source.jetstream.publish.publisher import IN_FLIGHT, Publisher
from nats_stream_source.jetstream.retry import retry
from tests.support.nats.streams import create_stream
from tests.support.nats.topology import configured_server
from tests.support.proxy.fault_proxy import Proxy
from tests.support.wait import wait_until_async


@asynccontextmanager
async def publishing(url: str, stream: str = "", **settings: Any) -> AsyncIterator[Publisher]:
    """A publisher; where ``stream`` is given, the stream is created first."""
    if stream:
        create_stream(url, stream)
    async with connect(url, **settings) as jetstream:
        yield jetstream.connection.service(Publisher)


ANSWERS: list[tuple[bytes, PubAck]] = [
    (b'{"stream":"S","seq":7}', PubAck("S", 7)),
    (b'{"stream":"S","seq":7,"duplicate":true}', PubAck("S", 7, duplicate=True)),
    (b'{"stream":"S","domain":"hub","seq":1}', PubAck("S", 1, domain="hub")),
    (b'{"stream":"S","seq":1,"domain":"","val":"3"}', PubAck("S", 1)),
]


@pytest.mark.parametrize(("payload", "expected"), ANSWERS)
def test_pub_acks(payload: bytes, expected: PubAck) -> None:
    assert PubAck.parse("s", payload) == expected


@pytest.mark.parametrize(
    "payload", [b"", b"+OK", b"[]", b"7", b"{}", b'{"stream":"S"}', b'{"stream":"S","seq":"x"}']
)
def test_pub_ack_invalid(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="invalid PubAck for a message on 's'"):
        PubAck.parse("s", payload)


REFUSALS: list[tuple[int, str, type[PublishError], int | None]] = [
    (10071, "wrong last sequence: 5", WrongLastSequenceError, 5),
    (10071, "wrong last sequence", WrongLastSequenceError, None),
    (10164, "wrong last sequence", WrongLastSequenceError, None),
    (10077, "maximum bytes exceeded", StreamFullError, None),
    (10054, "message size exceeds maximum allowed", MessageTooLargeError, None),
    (10060, "expected stream does not match", PublishError, None),
]


@pytest.mark.parametrize(("err_code", "text", "kind", "last_seq"), REFUSALS)
def test_refusals(err_code: int, text: str, kind: type[PublishError], last_seq: int | None) -> None:
    payload = f'{{"error":{{"code":400,"err_code":{err_code},"description":"{text}"}}}}'
    with pytest.raises(PublishError, match=text) as caught:
        PubAck.parse("s", payload.encode())
    assert type(caught.value) is kind
    assert (caught.value.code, caught.value.err_code) == (400, err_code)
    assert getattr(caught.value, "last_seq", None) == last_seq


async def test_messages_many_in_flight(url: str) -> None:
    most = 0
    async with publishing(url, "many") as publisher:
        futures = []
        for i in range(3000):
            futures.append(await publisher.send(f"many.{i % 7}", b"%d" % i))
            most = max(most, sum(not future.done() for future in futures[-1100:]))
        acks = await asyncio.gather(*futures)
        assert acks == [PubAck("many", i) for i in range(1, 3001)]
        assert repr(publisher) == "<Publisher 0 of 1000 in flight>"
    assert 100 < most <= 1000


async def test_room_for_one(url: str, jetstream: JetStream) -> None:
    create_stream(url, "one")
    publisher = Publisher(jetstream.connection, in_flight=1)
    try:
        first = await publisher.send("one.a")
        second = await publisher.send("one.a")
        assert first.done(), "the second had to wait for the first one's PubAck"
        assert (await second).seq == 2
    finally:
        await publisher.close()


async def test_headers_that_server_acts_on(url: str) -> None:
    async with publishing(url, "act") as publisher:

        async def publish(subject: str, **headers: str) -> PubAck:
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            return await publisher.publish(subject, b"x", headers=names)

        assert await publisher.publish("act.a", headers={MSG_ID: "m1"}) == PubAck("act", 1)
        again = await publisher.publish("act.a", headers={MSG_ID: "m1"})
        assert again == PubAck("act", 1, duplicate=True)
        first = {EXPECTED_LAST_SUBJECT_SEQUENCE: "0"}
        with pytest.raises(WrongLastSequenceError, match="wrong last sequence: 1") as caught:
            await publisher.publish("act.a", headers=first)
        assert caught.value.last_seq == 1
        assert (await publisher.publish("act.b", headers=first)).seq == 2
        expected = {"Nats-Expected-Last-Sequence": "2"}
        assert (await publisher.publish("act.a", headers=expected)).seq == 3
        for wrong in (
            {"Nats-Expected-Stream": "other"},
            expected,
            {"Nats-Expected-Last-Msg-Id": "m1"},
        ):
            with pytest.raises(PublishError):
                await publisher.publish("act.a", headers=wrong)
        assert (await publish("act.c", X="ü")).seq == 4


async def test_message_too_large(url: str) -> None:
    create_stream(url, "large", max_msg_size=100)

    async with publishing(url) as publisher:
        with pytest.raises(MessageTooLargeError, match="10054"):
            await publisher.publish("large.a", b"x" * 101)
        for payload, headers in ((b"x" * (1 << 20), {"A": "b"}), (b"x" * (1 << 20) + b"y", None)):
            with pytest.raises(MessageTooLargeError, match="max_payload of 1048576"):
                await publisher.publish("large.a", payload, headers=headers)
        # The connection has not suffered.
        assert (await publisher.publish("large.a", b"x")).seq == 1


async def test_stream_missing(url: str) -> None:
    async with publishing(url) as publisher:
        with pytest.raises(NoStreamError, match=r"'nowhere\.x'"):
            await publisher.publish("nowhere.x")


@pytest.mark.parametrize(
    ("subject", "headers"),
    [
        ("a b", None),
        ("", None),
        ("bad.a", {"A:": "b"}),
        ("bad.a", {"": "b"}),
        ("bad.a", {"A b": "c"}),
        ("bad.a", {"A": "b\r\nC: d"}),
        ("bad.a", {"A": " b"}),
    ],
)
async def test_message_unsendable(url: str, subject: str, headers: dict[str, str] | None) -> None:
    async with publishing(url) as publisher:
        with pytest.raises(ConfigurationError):
            await publisher.publish(subject, headers=headers)
        assert repr(publisher) == "<Publisher 0 of 1000 in flight>", "the room is free again"


async def test_response_invalid(url: str) -> None:
    async with publishing(url) as publisher:
        client = publisher._connection.client

        async def answer(message: Any) -> None:
            await client.publish(message.reply.rpartition(".")[0] + ".nobody", b"{}")
            await message.respond(b"not JSON")

        await client.subscribe("garbage", cb=answer)
        with pytest.raises(ProtocolError, match="invalid PubAck for a message on 'garbage'"):
            await publisher.publish("garbage")


async def test_response_late(url: str) -> None:
    async with publishing(url, request_timeout=0.3) as publisher:
        await publisher._connection.client.subscribe("silence")
        futures = [await publisher.send("silence") for _ in range(3)]
        for future in futures:
            with pytest.raises(AckTimeoutError, match=r"'silence': no PubAck .* within 0\.3 s"):
                await future
        assert repr(publisher) == "<Publisher 0 of 1000 in flight>"


async def test_loop_blocked_loses_nothing(url: str) -> None:
    """The deadline is over before the messages have left."""
    async with publishing(url, "held", request_timeout=1.0) as publisher:
        await publisher.publish("held.a")
        futures = [await publisher.send("held.a", b"x" * 100) for _ in range(500)]
        time.sleep(1.5)  # noqa: ASYNC251
        assert [(await future).seq for future in futures] == list(range(2, 502))


async def test_lost_connection_fails_only_messages_in_flight(nats_server: NatsServer) -> None:
    create_stream(nats_server.url, "s")
    with Proxy(nats_server.port) as proxy:
        async with publishing(proxy.url) as publisher:
            assert (await publisher.publish("s.a")).seq == 1
            proxy.verdict = lambda frame: b'"stream":"s"' not in frame
            futures = [await publisher.send("s.a") for _ in range(10)]
            await wait_until_async(lambda: len(proxy.dropped) == 10, "all PubAcks are lost")
            proxy.cut()
            for future in futures:
                with pytest.raises(AckLostError, match="may or may not be stored"):
                    await future
            # They were: nobody could know.
            proxy.verdict = lambda frame: True
            assert (await publisher.publish("s.a")).seq == 12
            assert publisher._connection.reconnects == 1
        assert len(proxy.dropped) == 10


async def disconnected(publisher: Publisher) -> None:
    online = publisher._connection.online
    await wait_until_async(lambda: not online.is_set(), "the connection is lost")


async def test_publishing_waits_for_connection(tmp_path: Path) -> None:
    with NatsServer(store=tmp_path) as server:
        async with publishing(server.url, "s") as publisher:
            await publisher.publish("s.a")
            await asyncio.to_thread(server.stop)
            await disconnected(publisher)
            again = retry(
                lambda: publisher.publish("s.a"),
                seconds=10,
                # The server serves clients before it has its streams.
                on_error=lambda error: isinstance(error, NoStreamError),
            )
            waiting = asyncio.create_task(again)
            await asyncio.to_thread(server.start)
            assert (await waiting).seq == 2


async def test_connection_late(nats_server: NatsServer) -> None:
    async with publishing(nats_server.url, "s", request_timeout=1.0) as publisher:
        await publisher.publish("s.a")
        await asyncio.to_thread(nats_server.stop)
        await disconnected(publisher)
        with pytest.raises(ConnectError, match="within 1 s"):
            await publisher.publish("s.a")


async def test_publisher_closed(url: str) -> None:
    async with connect(url) as jetstream:
        connection = jetstream.connection
        publisher = connection.service(Publisher)
        assert connection.service(Publisher) is publisher
        await connection.client.subscribe("silence")
        future = await publisher.send("silence")
    with pytest.raises(AckLostError, match="was closed"):
        await future
    with pytest.raises(ConnectError, match="is closed"):
        await publisher.publish("silence")


async def test_waiter_cancelled_frees_its_place(url: str, jetstream: JetStream) -> None:
    create_stream(url, "away")
    publisher = Publisher(jetstream.connection, in_flight=1)
    try:
        (await publisher.send("away.a")).cancel()
        waiting = asyncio.create_task(publisher.publish("away.a"))
        assert (await waiting).seq == 2
        blocked = asyncio.create_task(publisher.publish("away.a"))
        blocked.cancel()
        await asyncio.gather(blocked, return_exceptions=True)
        assert (await publisher.publish("away.a")).stream == "away"
    finally:
        await publisher.close()


async def test_denied() -> None:
    config = """authorization { users: [
      {user: admin, password: p},
      {user: writer, password: p, permissions: {publish: {deny: ["s.Secret"]}}},
      {user: deaf, password: p, permissions: {subscribe: {deny: ["_INBOX.>"]}}},
    ]}"""
    with configured_server(config) as server:
        create_stream(server.url.replace("//", "//admin:p@"), "s")

        async with publishing(server.url, user="writer", password="p") as publisher:
            denied = await publisher.send("s.Secret")
            allowed = await publisher.send("s.open")
            with pytest.raises(PermissionDeniedError, match=r"'s\.Secret'"):
                await denied
            assert (await allowed).seq == 1
        async with publishing(server.url, user="deaf", password="p") as publisher:
            for _ in range(2):
                with pytest.raises(PermissionDeniedError, match="inbox_prefix"):
                    await publisher.publish("s.open")


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


async def test_full_buffer_while_messages_wait_for_their_turn() -> None:
    """The time in which a message waits for others is not that of its retries (429)."""
    with configured_server("jetstream { max_buffered_msgs: 50 }\n") as server:
        async with connect(server.url) as jetstream:
            bucket = await KeyValue.create_bucket(jetstream, KeyValueConfig("full"))
            publisher = jetstream.connection.service(Publisher)
            sent = publisher._in_flight._serial
            ended = await outcomes([bucket.put(f"k{i % 200}", b"") for i in range(20 * IN_FLIGHT)])
            assert ended == {int: 20 * IN_FLIGHT}
            assert publisher._in_flight._serial - sent > 20 * IN_FLIGHT, "none was rejected"
