"""Subjects too long or denied, and other errors after which a server closes a connection."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from nats_stream_source.connection.connection import Connection
from nats_stream_source.connection.settings import ConnectionSettings
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import MessageTooLargeError, NameTooLongError, PermissionDeniedError
from nats_stream_source.jetstream import (
    BatchPublisher,
    DirectGet,
    FastIngestPublisher,
    JetStream,
    KeyValue,
    KeyValueConfig,
    MessageColumns,
    ObjectStore,
    Publisher,
    connect,
    subscribe_pull,
)
from tests.support.nats.buckets import create_bucket
from tests.support.nats.jwt_operator import Operator
from tests.support.nats.streams import create_stream
from tests.support.nats.topology import ChangingServer, configured_server, limited_server
from tests.support.wait import wait_until_async

LONG = "k" * 4096

Call = Callable[[JetStream], Awaitable[Any]]


async def put_first_key(jetstream: JetStream, key: str) -> None:
    await (await KeyValue.open(jetstream, "b")).put(key, b"v")


async def publish_columns(
    jetstream: JetStream, kind: type[Any], subject: str, data: bytes = b"2"
) -> None:
    async with kind(jetstream, "S") as publisher:
        await publisher.send(MessageColumns(pa.array(["S.a", subject]), pa.array([b"1", data])))
        await publisher.flush()


async def watch(jetstream: JetStream, *keys: str) -> None:
    async with (await KeyValue.open(jetstream, "b")).watch(*keys) as entries:
        await anext(aiter(entries))


async def consume(jetstream: JetStream, subject: str) -> None:
    await subscribe_pull(jetstream, subject, stream="S")


def kv(method: str, *args: Any) -> Call:
    async def call(jetstream: JetStream) -> Any:
        return await getattr(await KeyValue.open(jetstream, "b"), method)(*args)

    return call


CALLS: dict[str, Call] = {
    "put": kv("put", LONG, b"v"),
    "create": kv("create", LONG, b"v"),
    "update": kv("update", LONG, b"v", 1),
    "delete": kv("delete", LONG),
    "purge": kv("purge", LONG),
    "get": kv("get", LONG),
    "get a revision": lambda jetstream: DirectGet(jetstream, "KV_b").last(f"$KV.b.{LONG}"),
    "history": kv("history", LONG),
    "keys": kv("keys", LONG),
    "keys, two filters": kv("keys", LONG, "other"),
    "watch": lambda jetstream: watch(jetstream, LONG),
    "watch, two filters": lambda jetstream: watch(jetstream, LONG, "other"),
    "publish": lambda jetstream: jetstream.connection.service(Publisher).publish(f"S.{LONG}"),
    "columns": lambda jetstream: publish_columns(jetstream, BatchPublisher, f"S.{LONG}"),
    "fast ingest": lambda jetstream: publish_columns(jetstream, FastIngestPublisher, f"S.{LONG}"),
    "consumer": lambda jetstream: consume(jetstream, f"S.{LONG}"),
    "stream subjects": lambda jetstream: jetstream.subjects("S", f"S.{LONG}"),
    "stream message": lambda jetstream: jetstream.message("S", last_by_subj=f"S.{LONG}"),
    "inbox": lambda jetstream: jetstream.connection.open_inbox(LONG),
    "queue group": lambda jetstream: jetstream.connection.open_inbox("x", LONG),
}


@pytest.fixture(scope="module")
def server() -> Any:
    with NatsServer() as running:
        create_bucket(running.url, "b", history=5)
        create_stream(running.url, "S", allow_direct=True, allow_batched=True)
        yield running


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_name_too_long_for_line(server: NatsServer, call: Call) -> None:
    async with connect(server.url) as jetstream:
        with pytest.raises(NameTooLongError) as raised:
            await asyncio.wait_for(call(jetstream), 3)
        assert "at most 4,096 bytes" in str(raised.value)
        assert len(str(raised.value)) < 400
        assert raised.value.settings == ("max_control_line",)
        await put_first_key(jetstream, "other")
        assert jetstream.connection.reconnects == 0


def encoded(method: str, *args: Any) -> Call:
    async def call(jetstream: JetStream) -> Any:
        bucket = await KeyValue.open(jetstream, "b", key_codec="base64")
        return await getattr(bucket, method)(f"fleet.{'x' * 3200}", *args)

    return call


def store(method: str, *args: Any) -> Call:
    async def call(jetstream: JetStream) -> Any:
        objects = await ObjectStore.create(jetstream, "o")
        return await getattr(objects, method)(f"fleet/{'x' * 3200}", *args)

    return call


ENCODED: dict[str, Call] = {
    "put": encoded("put", b"v"),
    "create": encoded("create", b"v"),
    "delete": encoded("delete"),
    "get": encoded("get"),
    "history": encoded("history"),
    "object": store("put", b"v"),
    "object's info": store("info"),
    "object's deletion": store("delete"),
}


@pytest.mark.parametrize("call", ENCODED.values(), ids=ENCODED)
async def test_encoded_name_too_long_for_line(server: NatsServer, call: Call) -> None:
    """The error has the name as the caller wrote it, which the subject does not show."""
    async with connect(server.url) as jetstream:
        with pytest.raises(NameTooLongError) as raised:
            await call(jetstream)
        kind = r"(key 'fleet\.|object 'fleet/)"
        expected = kind + r"x+…' of 3,206 characters is too long: .* has 4,\d+ bytes, .* 4,096 "
        assert re.match(expected, str(raised.value))
        assert len(str(raised.value)) < 400
        assert raised.value.settings == ("max_control_line",)


async def longest(write: Callable[[int], Awaitable[Any]]) -> int:
    """The largest number for which ``write`` does not raise NameTooLongError."""
    fits, fails = 1, 5000
    while fails - fits > 1:
        middle = (fits + fails) // 2
        try:
            await write(middle)
            fits = middle
        except NameTooLongError:
            fails = middle
    return fits


@pytest.mark.parametrize("headers", [None, {"a": "b"}])
async def test_name_of_exact_limit_is_stored_and_read(
    server: NatsServer, headers: dict[str, str] | None
) -> None:
    """The longest key that is sent is one that the server accepts, and the last one that it does.

    Each way to read the key works too, although its API subject would be too long.
    """
    async with connect(server.url) as jetstream:
        publisher = jetstream.connection.service(Publisher)

        async def write(length: int) -> None:
            await publisher.publish(f"$KV.b.{'x' * length}", b"v", headers=headers)

        length = await longest(write)
        assert jetstream.connection.reconnects == 0
        assert jetstream.connection.control_line.longest == 4096
        bucket = await KeyValue.open(jetstream, "b")
        key = "x" * length
        assert (await bucket.get(key)).value == b"v"
        assert [entry.key for entry in await bucket.history(key)] != []
        assert await bucket.keys(key) == [key]
        async with bucket.watch(key) as entries:
            assert (await anext(aiter(entries))).key == key
        assert jetstream.connection.reconnects == 0


@pytest.mark.parametrize("kind", [BatchPublisher, FastIngestPublisher])
async def test_column_of_exact_limit_is_stored(server: NatsServer, kind: type[Any]) -> None:
    async with connect(server.url) as jetstream:
        await longest(lambda n: publish_columns(jetstream, kind, f"S.{'x' * n}"))
        assert jetstream.connection.reconnects == 0
        assert jetstream.connection.control_line.longest == 4096


@pytest.fixture
def strict() -> Any:
    with configured_server("max_control_line: 1024\n") as running:
        create_bucket(running.url, "b")
        create_stream(running.url, "S")
        yield running


@pytest.mark.parametrize("name", ["put", "columns", "consumer"])
async def test_limit_of_server_is_lower_than_setting(strict: NatsServer, name: str) -> None:
    """The server closes the connection; the call fails with the name, and others continue."""
    middle = "k" * 2000
    calls: dict[str, Call] = {
        "put": kv("put", middle, b"v"),
        "columns": lambda jetstream: publish_columns(jetstream, BatchPublisher, f"S.{middle}"),
        "consumer": lambda jetstream: consume(jetstream, f"S.{middle}"),
    }
    async with connect(strict.url) as jetstream:
        await put_first_key(jetstream, "first")
        with pytest.raises(NameTooLongError, match=r"it has 2,\d+ bytes"):
            await asyncio.wait_for(calls[name](jetstream), 9)
        await put_first_key(jetstream, "second")
        assert jetstream.connection.reconnects == 1


async def test_setting_as_limit_of_server(strict: NatsServer) -> None:
    async with connect(strict.url, max_control_line=1024) as jetstream:
        with pytest.raises(NameTooLongError, match="at most 1,024 bytes"):
            await put_first_key(jetstream, "k" * 2000)
        assert jetstream.connection.reconnects == 0


@pytest.mark.parametrize(
    ("frame", "closes"),
    [
        (b"SUB a..b 99\r\n", False),
        (b"PUB a 2000000\r\n", True),
        (b"PUB %b 0\r\n\r\n" % (b"a" * 5000), True),
        (b"UNKNOWN\r\n", True),
        (b"PUB a b c d\r\n", True),
    ],
    ids=["invalid subject", "max_payload", "max_control_line", "unknown", "arguments"],
)
async def test_connection_recovers_after_error(
    server: NatsServer, frame: bytes, closes: bool
) -> None:
    async with await Connection.open(ConnectionSettings((server.url,))) as connection:
        await connection.writer.write(memoryview(frame))
        if closes:
            await wait_until_async(lambda: connection.reconnects == 1, "reconnected")
        assert await connection.alive(5)
        await put_first_key(JetStream(connection), "afterwards")
        assert connection.reconnects == int(closes)


LARGE: dict[str, Call] = {
    "put": kv("put", "large", b"x" * 1001),
    "publish": lambda jetstream: jetstream.connection.service(Publisher).publish(
        "S.a", b"x" * 980, headers={"Nats-Msg-Id": "large"}
    ),
    "columns": lambda jetstream: publish_columns(jetstream, BatchPublisher, "S.a", b"x" * 1001),
    "fast ingest": lambda jetstream: publish_columns(
        jetstream, FastIngestPublisher, "S.a", b"x" * 1001
    ),
    "request": lambda jetstream: jetstream.call("STREAM.INFO.S", {"filter": "x" * 1000}),
}


@pytest.fixture(scope="module")
def limited_url() -> Iterator[str]:
    with limited_server() as url:
        yield url


@pytest.mark.parametrize("call", LARGE.values(), ids=LARGE)
async def test_message_larger_than_max_payload_of_account(limited_url: str, call: Call) -> None:
    """The server sends that limit after the client is connected."""
    async with connect(limited_url) as jetstream:
        bucket = await KeyValue.open(jetstream, "b")
        small = [asyncio.create_task(bucket.put(f"key{i}", b"x" * 1000)) for i in range(10)]
        with pytest.raises(MessageTooLargeError, match="max_payload of 1000"):
            await call(jetstream)
        await asyncio.gather(*small)
        assert jetstream.connection.reconnects == 0


async def test_max_payload_of_user_after_reconnect() -> None:
    operator = Operator()
    settings = {"credentials_content": operator.credentials(payload=1000)}
    with configured_server(operator.config()) as running:
        async with connect(running.url, **settings) as jetstream:
            connection = jetstream.connection
            assert await connection.alive(9)
            assert connection.client.max_payload == 1000
            connection.reconnect()
            await connection.wait_connected(9)
            assert await connection.alive(9)
            assert connection.client.max_payload == 1000


async def test_reconnect_to_server_with_lower_max_payload(tmp_path: Path) -> None:
    """Messages that were in flight are not sent to a server that does not accept them."""
    with NatsServer(store=tmp_path) as large:
        create_stream(large.url, "S")
        async with (
            connect(large.url, connect_timeout=20) as jetstream,
            BatchPublisher(jetstream, "S") as publisher,
        ):
            await publisher.send(MessageColumns(pa.array(["S.a"]), pa.array([b"x" * 10])))
            await publisher.flush()
            large.stop()
            sending = asyncio.create_task(
                publisher.send(MessageColumns(pa.array(["S.a"]), pa.array([b"x" * 5000])))
            )
            with configured_server("max_payload: 1000\n", store=tmp_path, port=large.port):
                await sending
                with pytest.raises(MessageTooLargeError, match="max_payload of 1000"):
                    await publisher.flush()
                assert (await jetstream.stream_info("S")).last_seq == 1


@pytest.fixture
def guarded(tmp_path: Path) -> ChangingServer:
    return ChangingServer(tmp_path)


def as_me(guarded: ChangingServer, **settings: Any) -> AbstractAsyncContextManager[JetStream]:
    return connect(guarded.server.url, user="me", password="right", **settings)


async def is_denied(work: Callable[[], Awaitable[object]], expected: bool) -> bool:
    try:
        await work()
    except PermissionDeniedError as error:
        return expected and "'_INBOX.>'; add it to the user's permissions" in str(error)
    return not expected


async def test_denied_subject_that_differs_in_case_from_another(guarded: ChangingServer) -> None:
    guarded.write(permissions='publish: { deny: "$KV.b.SECRET" }')
    with guarded.server:
        async with as_me(guarded) as jetstream:
            bucket = await KeyValue.create_bucket(jetstream, KeyValueConfig("b"))
            results = await asyncio.gather(
                *(bucket.put(key, b"") for key in ("SECRET", "secret", "Secret")),
                return_exceptions=True,
            )
            assert isinstance(results[0], PermissionDeniedError)
            assert "'$KV.b.SECRET'" in str(results[0])
            assert results[1:] == [1, 2]


async def test_denied_message_below_inbox_prefix_concerns_its_subject(
    guarded: ChangingServer,
) -> None:
    guarded.write(permissions='publish: { deny: "app.inbox.secret" }')
    with guarded.server:
        async with as_me(guarded, inbox_prefix="app.inbox") as jetstream:
            bucket = await KeyValue.create_bucket(jetstream, KeyValueConfig("b"))
            with pytest.raises(PermissionDeniedError, match=r"'app\.inbox\.secret'"):
                await jetstream.connection.request("app.inbox.secret")
            assert await bucket.put("k", b"") == 1
            assert jetstream.connection.reconnects == 0


async def test_inboxes_denied_and_permitted_again(guarded: ChangingServer) -> None:
    with guarded.server:
        async with as_me(guarded, request_timeout=2.0) as jetstream:
            bucket = await KeyValue.create_bucket(jetstream, KeyValueConfig("b"))
            await bucket.put("k", b"")
            works: tuple[Callable[[], Awaitable[object]], ...]
            works = bucket.status, lambda: bucket.put("k", b"")
            for work in works:
                guarded.change(permissions='subscribe: { deny: "_INBOX.>" }')
                await wait_until_async(partial(is_denied, work, True), "the inboxes are denied")
                guarded.change()
                await wait_until_async(partial(is_denied, work, False), "they are permitted")


async def test_first_refused_subscription_is_that_of_pub_acks(guarded: ChangingServer) -> None:
    """The message is not sent: its PubAck would not arrive."""
    guarded.write(more="max_subscriptions: 2")
    with guarded.server:
        async with as_me(guarded) as jetstream:
            bucket = await KeyValue.create_bucket(jetstream, KeyValueConfig("b"))
            other = await jetstream.connection.open_inbox("other")
            with pytest.raises(PermissionDeniedError, match="raise max_subscriptions"):
                await bucket.put("k", b"")
            with pytest.raises(PermissionDeniedError, match="raise max_subscriptions"):
                async with BatchPublisher(jetstream, "KV_b"):
                    pass
            await jetstream.connection.close_inbox(other)
            assert await bucket.put("k", b"") == 1
