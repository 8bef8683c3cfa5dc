"""Buckets (ADR-8): their configuration, mirrors and sources, and what nats-py does with them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from nats.aio.client import Client
from nats.js.errors import KeyNotFoundError as TheirKeyNotFoundError
from nats.js.kv import KeyValue as TheirBucket

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    ApiError,
    BucketExistsError,
    BucketNotFoundError,
    ConfigurationError,
    InvalidNameError,
    KeyDeletedError,
    KeyExistsError,
    NoStreamError,
    UnsupportedStreamError,
    WrongLastSequenceError,
)
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.kv.config import ExternalSource, KeyValueConfig, Republish
from nats_stream_source.jetstream.kv.reader import ReadOnlyKeyValue
from nats_stream_source.jetstream.kv.store import KeyValue
from nats_stream_source.jetstream.subjects import api_prefix
from tests.integration.jetstream.kv.stores import new_bucket
from tests.support.nats.buckets import (
    api,
    fill_bucket,
    flushed,
    server_version,
    with_client,
)
from tests.support.nats.streams import create_stream
from tests.support.nats.topology import hub_and_leaf, make_mirror
from tests.support.wait import wait_until_async

pytestmark = pytest.mark.servers


async def test_server_configuration_equals_document(url: str) -> None:
    """The document's example, as the server has stored it, without this package's own names."""
    async with new_bucket(url, KeyValueConfig("CONFIGURATION", history=5)) as kv:
        await kv.put("auth.username", b"bob")
        info = api(url, "STREAM.INFO.KV_CONFIGURATION")
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
    async with new_bucket(url, KeyValueConfig("brief", ttl=60)) as kv:
        config = (await kv.status()).stream_info["config"]
        assert config["duplicate_window"] == config["max_age"] == 60_000_000_000


async def test_deleted_bucket_is_named_by_every_read(url: str) -> None:
    async with new_bucket(url, KeyValueConfig("dropped", history=5)) as kv:
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
async def test_properties_on_server(url: str, config: KeyValueConfig) -> None:
    async with new_bucket(url, config) as kv:
        assert (await kv.status()).config == config


async def test_create_twice_open_update_delete(jetstream: JetStream) -> None:
    config = KeyValueConfig("life", history=2)
    with pytest.raises(BucketNotFoundError, match="'life' does not exist"):
        await KeyValue.open(jetstream, "life")
    await (await KeyValue.create_bucket(jetstream, config)).put("a", b"1")
    again = await KeyValue.create_bucket(jetstream, config)
    assert (await again.get("a")).value == b"1"
    with pytest.raises(BucketExistsError, match="update_bucket"):
        await KeyValue.create_bucket(jetstream, KeyValueConfig("life", history=3))
    await KeyValue.update_bucket(jetstream, KeyValueConfig("life", history=3))
    opened = await KeyValue.open(jetstream, "life")
    assert opened.bucket.history == 3
    assert (await opened.get("a")).value == b"1"
    await KeyValue.delete_bucket(jetstream, "life")
    for gone in (
        KeyValue.delete_bucket(jetstream, "life"),
        KeyValue.update_bucket(jetstream, config),
    ):
        with pytest.raises(ApiError, match=r"not found|does not exist"):
            await gone
    with pytest.raises(NoStreamError):
        await opened.put("a", b"2")


async def test_update_resets_omitted_settings(url: str) -> None:
    new = server_version(url) >= (2, 11)
    full = KeyValueConfig(
        "less",
        compression=True,
        metadata={"a": "b"},
        republish=Republish("$KV.less.>", "less.>"),
        sources=[ExternalSource("other")],
        limit_marker_ttl=2 if new else None,
    )

    async with new_bucket(url, full) as kv:
        assert (await kv.status()).config.stream_config() == full.stream_config()
        less = KeyValueConfig("less", history=3)
        await KeyValue.update_bucket(kv.jetstream, less)
        assert (await kv.status()).config == less


async def test_bucket_name_invalid(url: str, jetstream: JetStream) -> None:
    create_stream(url, "KV_x1", "x1.>")
    with pytest.raises(UnsupportedStreamError, match="is not a bucket"):
        await KeyValue.open(jetstream, "x1")
    with pytest.raises(InvalidNameError):
        await KeyValue.open(jetstream, "a.b")
    with pytest.raises(InvalidNameError):
        await KeyValue.delete_bucket(jetstream, "*")


async def test_republish(url: str) -> None:
    config = KeyValueConfig("republish", republish=Republish("$KV.republish.>", "said.>"))
    async with new_bucket(url, config) as kv:
        heard = asyncio.get_running_loop().create_future()

        async def hear(message: Any) -> None:
            heard.set_result((message.subject, message.data, message.headers["Nats-Sequence"]))

        client = kv.jetstream.connection.client
        await client.subscribe("said.>", cb=hear)
        await flushed(client)
        revision = await kv.put("a.b", b"1")
        assert await asyncio.wait_for(heard, 60) == ("said.a.b", b"1", str(revision))


async def test_mirror_reads_and_writes_upstream_bucket(url: str) -> None:
    async with new_bucket(url, KeyValueConfig("main", history=3)) as main:
        mirror = await KeyValue.create_bucket(
            main.jetstream, KeyValueConfig("copy", history=3, mirror=ExternalSource("main"))
        )
        await mirror.put("a", b"1")
        revision = await mirror.put("b", b"2")
        entry = await mirror.get("b", min_last_revision=revision)
        assert (entry.bucket, entry.key, entry.revision) == ("copy", "b", revision)
        await mirror.delete("a")
        created = await mirror.create("a", b"3")
        with pytest.raises(ConfigurationError, match="mirrors 'main'"):
            await mirror.purge_deletes()
        read_only = mirror.read_only()
        assert type(read_only) is ReadOnlyKeyValue
        for write in ("put", "create", "update", "delete", "purge", "purge_deletes"):
            assert not hasattr(read_only, write)
        assert (await read_only.get("a", min_last_revision=created)).value == b"3"
        assert (await read_only.get_revision("b", revision)).value == b"2"
        assert [e.operation for e in await read_only.history("a")] == ["PUT", "DEL", "PUT"]
        assert sorted(await read_only.keys()) == ["a", "b"]
        async with read_only.watch("b") as watch:
            assert [e.value for e in await watch.initial()] == [b"2"]
        assert (await read_only.status()).values == 4


async def test_sources(jetstream: JetStream) -> None:
    for name in ("one", "two"):
        kv = await KeyValue.create_bucket(jetstream, KeyValueConfig(name))
        await kv.put(f"from.{name}", name.encode())
        await kv.put("skipped", b"")
    both = await KeyValue.create_bucket(
        jetstream,
        KeyValueConfig(
            "both",
            sources=[
                ExternalSource("one", keys="from.>"),
                ExternalSource("two", keys="from.*"),
            ],
        ),
    )
    await both.put("own", b"3")

    async def all_there() -> bool:
        return sorted(await both.keys()) == ["from.one", "from.two", "own"]

    await wait_until_async(all_there, "all there")
    assert (await both.get("from.two")).value == b"two"


async def test_mirror_and_sources_in_other_domain() -> None:
    """The bucket is at the hub, its replicas at a leaf node."""
    with hub_and_leaf() as both:
        async with connect(both.hub.url) as hub, connect(both.leaf.url) as leaf:
            main = await KeyValue.create_bucket(hub, KeyValueConfig("main", history=3))
            assert await main.put("a", b"1") == 1
            upstream = ExternalSource("main", domain="hub")
            mirror = await KeyValue.create_bucket(
                leaf, KeyValueConfig("copy", history=3, mirror=upstream)
            )
            revision = await mirror.put("b", b"2")
            assert (await main.get("b")).revision == revision == 2
            assert (await mirror.get("b", min_last_revision=revision)).value == b"2"
            await mirror.delete("a")
            created = await mirror.create("a", b"3")
            assert created == 4
            with pytest.raises(KeyExistsError):
                await mirror.create("a", b"4")
            assert sorted(await mirror.keys(min_last_revision=created)) == ["a", "b"]
            assert [e.revision for e in await mirror.history("a")] == [1, 3, 4]
            async with mirror.watch(min_last_revision=created) as watch:
                assert [(e.key, e.value) for e in await watch.initial()] == [
                    ("b", b"2"),
                    ("a", b"3"),
                ]
            for name, keys in (("main", None), ("other", "b")):
                upstream = ExternalSource("main", domain="hub", keys=keys)
                config = KeyValueConfig(name, sources=[upstream])
                sourced = await KeyValue.create_bucket(leaf, config)
                expected = [keys] if keys else ["a", "b"]

                async def there(kv: KeyValue = sourced, keys: list[str] = expected) -> bool:
                    return sorted(await kv.keys()) == keys

                await wait_until_async(there, "there")
                assert (await sourced.get("b")).value == b"2"
        async with connect(both.hub.url, api_prefix=api_prefix(domain="leaf")) as js:
            mirror = await KeyValue.open(js, "copy")
            revision = await mirror.put("c", b"1")
            assert (await mirror.get("c", min_last_revision=revision)).value == b"1"


async def test_mirror_of_mirror_has_entries_of_first_bucket(nats_server: NatsServer) -> None:
    url = nats_server.url
    fill_bucket(url, "a", [("x", b"1"), ("y", b"2")], 5)
    for name, origin in (("b", "a"), ("c", "b")):
        make_mirror(url, f"KV_{name}", f"KV_{origin}", max_msgs_per_subject=5)
    async with connect(url) as js:
        kv = await KeyValue.open(js, "c")
        assert sorted(await kv.keys()) == ["x", "y"]
        assert (await kv.get("y")).value == b"2"
        async with kv.watch_all() as watch:
            assert [entry.key for entry in await watch.initial()] == ["x", "y"]
        assert await kv.put("z", b"3") == 3


async def write_entries(bucket: KeyValue | TheirBucket) -> None:
    await bucket.put("a.b", b"1")
    await bucket.update("a.b", b"2", 1)
    await bucket.create("c", b"3")
    await bucket.delete("c")
    await bucket.put("d", b"4")
    await bucket.purge("d")


async def test_nats_py_reads_what_this_package_writes(url: str) -> None:
    async with new_bucket(url, KeyValueConfig("ours", history=5)) as kv:
        await write_entries(kv)

    async def read(client: Client) -> None:
        theirs = await client.jetstream().key_value("ours")
        entry = await theirs.get("a.b")
        assert (entry.value, entry.revision) == (b"2", 2)
        for deleted in ("c", "d"):
            with pytest.raises(TheirKeyNotFoundError):
                await theirs.get(deleted)
        assert await theirs.keys() == ["a.b"]
        assert [one.value for one in await theirs.history("a.b")] == [b"1", b"2"]
        assert await watched(theirs) == [("a.b", b"2"), ("c", "DEL"), ("d", "PURGE")]
        status = await theirs.status()
        assert (status.bucket, status.history, status.values) == ("ours", 5, 5)

    with_client(url, read)


async def watched(bucket: TheirBucket) -> list[tuple[str, object]]:
    """The last entry of each key: its value, or the operation of its marker."""
    watcher = await bucket.watchall()
    found: list[tuple[str, object]] = []
    while (entry := await watcher.updates(timeout=30)) is not None:
        found.append((entry.key, entry.operation or entry.value))
    await watcher.stop()
    return found


async def test_entries_of_nats_py_are_read(url: str, jetstream: JetStream) -> None:
    async def write(client: Client) -> None:
        await write_entries(await client.jetstream().create_key_value(bucket="theirs", history=5))

    with_client(url, write)
    kv = await KeyValue.open(jetstream, "theirs")
    entry = await kv.get("a.b")
    assert (entry.value, entry.revision, entry.operation) == (b"2", 2, "PUT")
    for deleted in ("c", "d"):
        with pytest.raises(KeyDeletedError):
            await kv.get(deleted)
    assert await kv.keys() == ["a.b"]
    assert [one.value for one in await kv.history("a.b")] == [b"1", b"2"]
    assert [(one.key, one.operation) for one in await kv.watch().initial()] == [
        ("a.b", "PUT"),
        ("c", "DEL"),
        ("d", "PURGE"),
    ]
    with pytest.raises(WrongLastSequenceError):
        await kv.update("a.b", b"3", 1)
    assert await kv.create("c", b"5") > 0
