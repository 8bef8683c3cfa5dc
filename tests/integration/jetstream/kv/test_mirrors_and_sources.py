"""Mirrors and sources of a bucket, also of another domain."""

from __future__ import annotations

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ConfigurationError, KeyExistsError
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.kv.config import ExternalSource, KeyValueConfig
from nats_stream_source.jetstream.kv.reader import ReadOnlyKeyValue
from nats_stream_source.jetstream.kv.store import KeyValue
from nats_stream_source.jetstream.subjects import api_prefix
from tests.integration.jetstream.kv.stores import new_bucket
from tests.support.nats.buckets import api, create_bucket, put_many
from tests.support.nats.topology import HubAndLeaf, hub_and_leaf, wait_for_seq
from tests.support.wait import wait_until_async

pytestmark = pytest.mark.servers


async def test_mirror_reads_and_writes_upstream_bucket(shared_server: NatsServer) -> None:
    async with new_bucket(shared_server.url, KeyValueConfig("main", history=3)) as main:
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


async def test_sources(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as js:
        for name in ("one", "two"):
            kv = await KeyValue.create_bucket(js, KeyValueConfig(name))
            await kv.put(f"from.{name}", name.encode())
            await kv.put("skipped", b"")
        both = await KeyValue.create_bucket(
            js,
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

    async def whole(both: HubAndLeaf) -> None:
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

    with hub_and_leaf() as both:
        await whole(both)


async def test_mirror_of_mirror_has_entries_of_first_bucket(nats_server: NatsServer) -> None:
    url = nats_server.url
    create_bucket(url, "a", 5)
    put_many(url, "a", [("x", b"1"), ("y", b"2")])
    for name, origin in (("b", "a"), ("c", "b")):
        mirror = {"name": f"KV_{name}", "mirror": {"name": f"KV_{origin}"}}
        api(url, f"STREAM.CREATE.KV_{name}", {**mirror, "max_msgs_per_subject": 5})
        wait_for_seq(url, f"KV_{name}", 2)
    async with connect(url) as js:
        kv = await KeyValue.open(js, "c")
        assert sorted(await kv.keys()) == ["x", "y"]
        assert (await kv.get("y")).value == b"2"
        async with kv.watch_all() as watch:
            assert [entry.key for entry in await watch.initial()] == ["x", "y"]
        assert await kv.put("z", b"3") == 3
