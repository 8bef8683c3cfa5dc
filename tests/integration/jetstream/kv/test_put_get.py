"""Write and read entries of a key-value bucket (ADR-8): put, get, delete, purge, key names."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    ConfigurationError,
    InvalidNameError,
    KeyDeletedError,
    KeyNotFoundError,
)
from nats_stream_source.jetstream.kv.config import KeyValueConfig
from nats_stream_source.jetstream.times import nanoseconds
from tests.integration.jetstream.kv.stores import new_bucket
from tests.support.nats.buckets import api, publish, put

pytestmark = pytest.mark.servers


async def test_put_get_delete_purge(shared_server: NatsServer) -> None:
    async with new_bucket(shared_server.url, KeyValueConfig("basic", history=10)) as kv:
        assert await kv.put("auth.username", b"bob") == 1
        entry = await kv.get("auth.username")
        assert (entry.bucket, entry.key, entry.value) == ("basic", "auth.username", b"bob")
        assert (entry.revision, entry.delta, entry.operation) == (1, 0, "PUT")
        last = {"last_by_subj": "$KV.basic.auth.username"}
        stored = api(shared_server.url, "STREAM.MSG.GET.KV_basic", last)
        assert entry.created_ns == nanoseconds(stored["message"]["time"])
        assert entry.created == datetime.fromtimestamp(
            entry.created_ns // 1000 / 10**6, timezone.utc
        )
        assert entry.headers is None
        assert await kv.put("auth.username", b"alice") == 2
        assert (await kv.get("auth.username")).value == b"alice"
        old = await kv.get_revision("auth.username", 1)
        # The distance to the latest is known in lists only.
        assert (old.value, old.delta) == (b"bob", 0)
        assert await kv.delete("auth.username") == 3
        with pytest.raises(KeyDeletedError, match="DEL at revision 3") as caught:
            await kv.get("auth.username")
        assert (caught.value.revision, caught.value.operation) == (3, "DEL")
        with pytest.raises(KeyDeletedError):
            await kv.get_revision("auth.username", 3)
        history = await kv.history("auth.username")
        assert [(e.value, e.revision, e.delta, e.operation) for e in history] == [
            (b"bob", 1, 2, "PUT"),
            (b"alice", 2, 1, "PUT"),
            (b"", 3, 0, "DEL"),
        ]
        assert await kv.purge("auth.username") == 4
        (only,) = await kv.history("auth.username")
        assert (only.revision, only.operation, only.delta) == (4, "PURGE", 0)
        with pytest.raises(KeyNotFoundError, match="revision 2 not found"):
            await kv.get_revision("auth.username", 2)
        # What is sent is what the document says.
        headers = only.headers
        assert headers is not None
        assert headers.get("KV-Operation") == "PURGE"
        assert headers.get("Nats-Rollup") == "sub"
        assert history[2].headers is not None
        assert history[2].headers.fields == (("KV-Operation", "DEL"),)


async def test_keys_that_are_not_there(shared_server: NatsServer) -> None:
    async with new_bucket(shared_server.url, KeyValueConfig("missing")) as kv:
        for missing in (kv.get("a"), kv.history("a"), kv.get_revision("a", 1)):
            with pytest.raises(KeyNotFoundError, match="'a'"):
                await missing
        assert await kv.keys() == []
        first = await kv.put("a", b"1")
        await kv.put("b", b"2")
        with pytest.raises(KeyNotFoundError, match="belongs to another key"):
            await kv.get_revision("b", first)
        for no_revision in (0, -1, None, "1", True, 1.0, 2**64):
            with pytest.raises(ConfigurationError, match="expected an integer from 1 to"):
                await kv.get_revision("b", no_revision)


async def test_names_are_checked_in_every_call(shared_server: NatsServer) -> None:
    async with new_bucket(shared_server.url, KeyValueConfig("names")) as kv:
        for name in ("", ".a", "a.", "a..b", "a b", "a*", "*", ">", "a.>", None, 5, b"a"):
            for call in (
                kv.get(name),
                kv.get_revision(name, 1),
                kv.history(name),
                kv.put(name, b""),
                kv.create(name, b""),
                kv.update(name, b"", 1),
                kv.delete(name),
                kv.purge(name),
            ):
                with pytest.raises(InvalidNameError):
                    await call
        for pattern in ("a.>.b", 5, b"a"):
            with pytest.raises(InvalidNameError):
                await kv.keys(pattern)
        with pytest.raises(ConfigurationError, match="overlap"):
            await kv.keys("a.*", "a.b")
        assert (await kv.status()).last_revision == 0, "nothing was written"


async def test_arguments_are_checked_before_anything_is_sent(shared_server: NatsServer) -> None:
    """A revision that is None would make the write unconditional; a server parses the others."""
    async with new_bucket(shared_server.url, KeyValueConfig("checked")) as kv:
        await kv.put("a", b"1")
        untyped: Any = kv
        for revision in (None, "", "1", -1, True, 1.0, 2**64):
            calls = [untyped.update("a", b"2", revision)]
            if revision is not None:
                calls += [
                    untyped.delete("a", revision=revision),
                    untyped.purge("a", revision=revision),
                    untyped.get("a", min_last_revision=revision),
                    untyped.history("a", min_last_revision=revision),
                    untyped.keys(min_last_revision=revision),
                ]
            for call in calls:
                with pytest.raises(ConfigurationError, match=r"expected an integer from 0 to 2"):
                    await call
        for value in ("text", None, 5):
            for call in (untyped.put("a", value), untyped.update("a", value, 1)):
                with pytest.raises(ConfigurationError, match="expected bytes"):
                    await call
        for ttl in (True, "5"):
            with pytest.raises(ConfigurationError, match="expected an integer of 1 second"):
                await untyped.put("a", b"2", ttl=ttl)
        assert (await kv.status()).last_revision == 1, "nothing was written"
        assert await untyped.put("a", bytearray(b"2")) == 2
        assert (await kv.get("a")).value == b"2"


async def test_reserved_keys_are_left_alone(shared_server: NatsServer) -> None:
    """``_kv…`` is read by its name, not listed, and never written."""
    async with new_bucket(shared_server.url, KeyValueConfig("own")) as kv:
        for name in ("_kv", "_kv.x", "_kvx"):
            for call in (
                kv.put(name, b""),
                kv.create(name, b""),
                kv.update(name, b"", 1),
                kv.delete(name),
                kv.purge(name),
            ):
                with pytest.raises(InvalidNameError, match="reserved"):
                    await call
        put(shared_server.url, "own", "_kv.x", b"internal")
        publish(shared_server.url, [("$KV.own._kv.y", b"", {"KV-Operation": "DEL"})])
        await kv.put("a._kv", b"1")
        assert await kv.keys() == ["a._kv"]
        assert (await kv.get("_kv.x")).value == b"internal"
        assert await kv.keys("_kv.>") == ["_kv.x"]
        async with kv.watch() as watch:
            assert [entry.key for entry in await watch.initial()] == ["a._kv"]
        assert await kv.purge_deletes(0) == 0


async def test_put_repeated_with_message_id(shared_server: NatsServer) -> None:
    async with new_bucket(shared_server.url, KeyValueConfig("dup", history=5)) as kv:
        assert await kv.put("a", b"1", msg_id="x") == 1
        assert await kv.put("a", b"1", msg_id="x") == 1
        assert (await kv.status()).values == 1
