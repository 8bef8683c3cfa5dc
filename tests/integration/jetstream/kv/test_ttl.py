"""TTLs of buckets and entries, and the markers that the server writes."""

from __future__ import annotations

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    ConfigurationError,
    KeyDeletedError,
    KeyNotFoundError,
    ProtocolError,
    ServerTooOldError,
    TtlNotSupportedError,
)
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.kv.config import KeyValueConfig
from nats_stream_source.jetstream.kv.store import KeyValue
from tests.integration.jetstream.kv.stores import new_bucket
from tests.support.nats.buckets import publish
from tests.support.wait import wait_until_async

pytestmark = pytest.mark.servers


async def test_ttl_of_bucket(shared_server: NatsServer) -> None:
    async with new_bucket(shared_server.url, KeyValueConfig("aging", ttl=0.5)) as kv:
        server = (await kv.status()).stream_info["config"]
        assert (server["max_age"], server["duplicate_window"]) == (500_000_000, 500_000_000)
        await kv.put("a", b"1")
        assert await kv.keys() == ["a"]

        async def expired() -> bool:
            return await kv.keys() == []

        await wait_until_async(expired, "expired")
        with pytest.raises(KeyNotFoundError):
            await kv.get("a")


async def test_ttl_of_entry_and_its_marker(shared_server: NatsServer) -> None:
    """A value that expires leaves a marker, which get, history, keys and watch read alike."""
    async with connect(shared_server.url) as js:
        config = KeyValueConfig("ttl", history=3, limit_marker_ttl=2)
        try:
            kv = await KeyValue.create_bucket(js, config)
        except ServerTooOldError as error:
            assert "2.11" in str(error)  # noqa: PT017
            assert await js.api_level() == 0
            return
        brief = await KeyValue.create_bucket(js, KeyValueConfig("ttl1", limit_marker_ttl=1))
        await brief.put("purge", b"1")
        await brief.purge("purge", ttl=1)
        await kv.put("put", b"1", ttl=2)
        await kv.create("create", b"1", ttl=2)
        await kv.put("stays", b"1")
        assert sorted(await kv.keys()) == ["create", "put", "stays"]
        markers = {}
        async with kv.watch(updates_only=True) as watch:
            async for entry in watch:
                if entry is not None:
                    markers[entry.key] = entry
                if len(markers) == 2:
                    break
        assert {key: entry.operation for key, entry in markers.items()} == {
            "put": "PURGE",
            "create": "PURGE",
        }
        headers = markers["put"].headers
        assert headers is not None
        assert headers.get("Nats-Marker-Reason") == "MaxAge"
        assert await kv.keys() == ["stays"]
        with pytest.raises(KeyDeletedError, match="PURGE"):
            await kv.get("put")
        assert [entry.operation for entry in await kv.history("put")] == ["PURGE"]
        # Over a marker of the server's a key can be created again.
        assert await kv.create("put", b"2") > 0

        async def nothing_left() -> bool:
            return (await brief.status()).values == 0

        await wait_until_async(nothing_left, "nothing left")


async def test_entry_that_expires_makes_older_revision_current_again(
    shared_server: NatsServer,
) -> None:
    """A marker is only written for a key without an older revision; the TTL is lengthened."""
    async with connect(shared_server.url) as js:
        if await js.api_level() == 0:
            return
        kv = await KeyValue.create_bucket(
            js, KeyValueConfig("older", history=2, limit_marker_ttl=2)
        )
        old = await kv.put("both", b"old")
        await kv.put("both", b"short", ttl=1)
        single = await kv.put("single", b"short", ttl=1)
        message = await js.message("KV_older", seq=single)
        assert message is not None
        assert b"Nats-TTL: 2\r\n" in message.headers, "lengthened to that of markers"

        async def expired() -> bool:
            entries = await kv.history("both") + await kv.history("single")
            return [e.operation for e in entries] == ["PUT", "PURGE"]

        await wait_until_async(expired, "the older revision, and the marker of the other key")
        assert (await kv.get("both")).revision == old


REASONS = [("MaxAge", "PURGE"), ("Purge", "PURGE"), ("Remove", "DEL"), ("Other", "PUT")]


async def test_marker_reasons_and_unknown_operations(shared_server: NatsServer) -> None:
    messages = [
        (f"$KV.reasons.{reason}", b"x", {"Nats-Marker-Reason": reason}) for reason, _ in REASONS
    ]
    messages.append(("$KV.reasons.Unknown", b"x", {"KV-Operation": "MOVE"}))
    expected = {**dict(REASONS), "Unknown": "PUT"}

    async with new_bucket(shared_server.url, KeyValueConfig("reasons")) as kv:
        publish(shared_server.url, messages)
        async with kv.watch() as watch:
            assert {e.key: e.operation for e in await watch.initial()} == expected
        live = [key for key, operation in expected.items() if operation == "PUT"]
        assert sorted(await kv.keys()) == sorted(live)
        for key, operation in expected.items():
            assert [e.operation for e in await kv.history(key)] == [operation]
            if operation == "PUT":
                assert (await kv.get(key)).value == b"x"
            else:
                with pytest.raises(KeyDeletedError, match=operation):
                    await kv.get(key)


async def test_ttl_in_bucket_without_ttls(shared_server: NatsServer) -> None:
    async with new_bucket(shared_server.url, KeyValueConfig("nottl")) as kv:
        await kv.put("a", b"1")
        for call in (
            kv.put("a", b"", ttl=1),
            kv.create("b", b"", ttl=1),
            kv.update("a", b"", 1, ttl=1),
            kv.purge("a", ttl=1),
        ):
            with pytest.raises(TtlNotSupportedError, match=r"limit_marker_ttl, on a server from"):
                await call
        for wrong in (0, 0.5, 1.5, -1):
            with pytest.raises(ConfigurationError, match="1 second or more"):
                await kv.put("a", b"", ttl=wrong)
        assert (await kv.status()).last_revision == 1


async def test_marker_with_ttl_removes_key_that_is_not_utf8(shared_server: NatsServer) -> None:
    """As docs/troubleshooting.md describes it: requests, which are JSON, cannot name the key."""
    async with connect(shared_server.url) as js:
        if await js.api_level() == 0:
            return
        kv = await KeyValue.create_bucket(js, KeyValueConfig("raw", limit_marker_ttl=1))
        await kv.put("a", b"1")
        write = js.connection.writer.write

        async def has_messages(count: int) -> bool:
            return (await js.stream_info("KV_raw")).messages == count

        await write(memoryview(b"PUB $KV.raw.\xff 1\r\nx\r\n"))
        await wait_until_async(lambda: has_messages(2), "stored")
        with pytest.raises(
            ProtocolError, match=r"b'\$KV\.raw\.\\xff' is not UTF-8; .*'Nats-TTL: 1s'"
        ):
            await kv.keys()
        headers = b"NATS/1.0\r\nKV-Operation: PURGE\r\nNats-Rollup: sub\r\nNats-TTL: 1s\r\n\r\n"
        line = b"HPUB $KV.raw.\xff %d %d\r\n" % (len(headers), len(headers))
        await write(memoryview(line + headers + b"\r\n"))
        await wait_until_async(lambda: has_messages(1), "removed")
        assert await kv.keys() == ["a"]
