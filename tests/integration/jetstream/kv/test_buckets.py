"""The configuration of key-value buckets (ADR-8): create, open, update, delete, limits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    ApiError,
    BucketExistsError,
    BucketNotFoundError,
    InvalidNameError,
    NoStreamError,
    UnsupportedStreamError,
)
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.kv.config import ExternalSource, KeyValueConfig, Republish
from nats_stream_source.jetstream.kv.store import KeyValue
from tests.integration.jetstream.kv.stores import new_bucket
from tests.support.nats.buckets import api, flushed, server_version
from tests.support.nats.streams import create_stream

pytestmark = pytest.mark.servers


async def test_server_configuration_equals_document(shared_server: NatsServer) -> None:
    """The document's example, as the server has stored it, without this package's own names."""
    async with new_bucket(shared_server.url, KeyValueConfig("CONFIGURATION", history=5)) as kv:
        await kv.put("auth.username", b"bob")
        info = api(shared_server.url, "STREAM.INFO.KV_CONFIGURATION")
        assert (await kv.status()).stream_info["config"] == info["config"]
    config = info["config"]
    assert config["subjects"] == ["$KV.CONFIGURATION.>"]
    assert (config["max_msgs_per_subject"], config["num_replicas"]) == (5, 1)
    assert (config["storage"], config["retention"]) == ("file", "limits")
    assert (config["max_age"], config["duplicate_window"]) == (0, 120_000_000_000)
    assert (config["allow_rollup_hdrs"], config["deny_delete"]) == (True, True)
    # The number of keys, and of bytes, is not limited.
    assert (config["max_msgs"], config["max_bytes"], config["max_msg_size"]) == (-1, -1, -1)
    assert info["state"]["messages"] == 1
    # A server refuses a duplicate window longer than max_age.
    async with new_bucket(shared_server.url, KeyValueConfig("brief", ttl=60)) as kv:
        config = (await kv.status()).stream_info["config"]
        assert config["duplicate_window"] == config["max_age"] == 60_000_000_000


async def test_deleted_bucket_is_named_by_every_read(shared_server: NatsServer) -> None:
    async with new_bucket(shared_server.url, KeyValueConfig("dropped", history=5)) as kv:
        await kv.put("a", b"1")
        await KeyValue.delete_bucket(kv.jetstream, "dropped")
        for read in (
            kv.get("a"),
            kv.get("a", min_last_revision=1),
            kv.get_revision("a", 1),
            kv.history("a"),
            kv.keys(),
            kv.keys("a"),
            kv.status(),
            kv.purge_deletes(),
            kv.watch().initial(),
        ):
            with pytest.raises(BucketNotFoundError, match="bucket 'dropped' does not exist"):
                await read


PROPERTIES = [
    KeyValueConfig(
        "p1",
        description="all of it",
        history=3,
        ttl=60,
        max_value_size=1000,
        max_bytes=100_000,
        storage="memory",
        compression=False,
        metadata={"who": "me"},
    ),
    KeyValueConfig("p2", compression=True, ttl=600),
    KeyValueConfig("p3", republish=Republish("$KV.p3.>", "copy.>", headers_only=True)),
]


@pytest.mark.parametrize("config", PROPERTIES)
async def test_properties_on_server(shared_server: NatsServer, config: KeyValueConfig) -> None:
    async with new_bucket(shared_server.url, config) as kv:
        assert (await kv.status()).config == config


async def test_create_twice_open_update_delete(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as js:
        config = KeyValueConfig("life", history=2)
        with pytest.raises(BucketNotFoundError, match="'life' does not exist"):
            await KeyValue.open(js, "life")
        await (await KeyValue.create_bucket(js, config)).put("a", b"1")
        again = await KeyValue.create_bucket(js, config)
        assert (await again.get("a")).value == b"1"
        with pytest.raises(BucketExistsError, match="update_bucket"):
            await KeyValue.create_bucket(js, KeyValueConfig("life", history=3))
        await KeyValue.update_bucket(js, KeyValueConfig("life", history=3))
        opened = await KeyValue.open(js, "life")
        assert opened.bucket.history == 3
        assert (await opened.get("a")).value == b"1"
        await KeyValue.delete_bucket(js, "life")
        for gone in (KeyValue.delete_bucket(js, "life"), KeyValue.update_bucket(js, config)):
            with pytest.raises(ApiError, match=r"not found|does not exist"):
                await gone
        with pytest.raises(NoStreamError):
            await opened.put("a", b"2")


async def test_update_resets_omitted_settings(shared_server: NatsServer) -> None:
    new = server_version(shared_server.url) >= (2, 11)
    full = KeyValueConfig(
        "less",
        compression=True,
        metadata={"a": "b"},
        republish=Republish("$KV.less.>", "less.>"),
        sources=[ExternalSource("other")],
        limit_marker_ttl=2 if new else None,
    )

    async with new_bucket(shared_server.url, full) as kv:
        assert (await kv.status()).config.stream_config() == full.stream_config()
        less = KeyValueConfig("less", history=3)
        await KeyValue.update_bucket(kv.jetstream, less)
        assert (await kv.status()).config == less


async def test_bucket_name_invalid(shared_server: NatsServer) -> None:
    create_stream(shared_server.url, "KV_x1", "x1.>")

    async with connect(shared_server.url) as js:
        with pytest.raises(UnsupportedStreamError, match="is not a bucket"):
            await KeyValue.open(js, "x1")
        with pytest.raises(InvalidNameError):
            await KeyValue.open(js, "a.b")
        with pytest.raises(InvalidNameError):
            await KeyValue.delete_bucket(js, "*")


async def test_republish(shared_server: NatsServer) -> None:
    config = KeyValueConfig("republish", republish=Republish("$KV.republish.>", "said.>"))
    async with new_bucket(shared_server.url, config) as kv:
        heard = asyncio.get_running_loop().create_future()

        async def hear(message: Any) -> None:
            heard.set_result((message.subject, message.data, message.headers["Nats-Sequence"]))

        client = kv.jetstream.connection.client
        await client.subscribe("said.>", cb=hear)
        await flushed(client)
        revision = await kv.put("a.b", b"1")
        assert await asyncio.wait_for(heard, 60) == ("said.a.b", b"1", str(revision))
