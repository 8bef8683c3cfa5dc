"""Whole objects: put, get, replace, delete, links, watch and list; reads after a write (ADR-53)."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from nats_stream_source.errors import (
    BucketExistsError,
    BucketNotFoundError,
    ConfigurationError,
    MinLastSequenceError,
    ObjectIsLinkError,
    ObjectNotFoundError,
)
from nats_stream_source.jetstream.object_store.info import ObjectInfo, chunk_subject, meta_subject
from nats_stream_source.jetstream.object_store.store import ObjectStore, _split_chunks
from tests.integration.jetstream.object_store.stores import MEGABYTE, left, opened_store
from tests.support.nats.buckets import publish
from tests.support.nats.streams import stream_state
from tests.support.nats.topology import hub_and_leaf, make_mirror

pytestmark = pytest.mark.servers


def consumer_count(url: str) -> int:
    return stream_state(url, "OBJ_b")["consumer_count"]


@pytest.mark.parametrize("size", [0, 1, 131_072, 131_073, 1_000_000])
async def test_object_roundtrip(url: str, size: int) -> None:
    data = MEGABYTE[:size]

    async with opened_store(url) as store:
        info = await store.put("a/b c.ü", data, description="it", metadata={"m": "1"})
        assert (info.size, info.chunks) == (size, -(-size // 131_072))
        assert info.sequence == info.chunks + 1
        found = await store.info("a/b c.ü", min_last_seq=info.sequence)
        assert found == replace(info, modified_ns=found.modified_ns)
        assert found.modified_ns > 0
        assert await store.get("a/b c.ü", min_last_seq=info.sequence) == data
    assert consumer_count(url) == 0


async def test_data_from_files_and_iterators(store: ObjectStore) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for size in (1, 299_999, 0, 700_000):
            yield MEGABYTE[:size]

    await store.put("file", io.BytesIO(MEGABYTE), chunk_size=300_000)
    assert (await store.info("file")).chunks == 4
    assert await store.get("file") == MEGABYTE
    info = await store.put("parts", parts(), chunk_size=100_000)
    assert (info.size, info.chunks) == (1_000_000, 10)
    assert len([chunk async for chunk in store.chunks(info)]) == 10


async def test_object_replaces_another(url: str, store: ObjectStore) -> None:
    first = await store.put("a", b"x" * 300_000)
    second = await store.put("a", b"new", headers={"h": ["1", "2"]})
    assert await store.get("a") == b"new"
    assert second.sequence > first.sequence
    assert (await store.info("a")).headers == {"h": ["1", "2"]}
    assert [one.name for one in await store.list()] == ["a"]
    assert set(left(url)) == {chunk_subject("b", second.nuid), meta_subject("b", "a")}


async def test_object_deleted(url: str, store: ObjectStore) -> None:
    await store.put("a", b"x")
    gone = await store.delete("a")
    assert (gone.deleted, gone.size, gone.sequence) == (True, 0, 3)
    with pytest.raises(ObjectNotFoundError, match="'a' was deleted from store 'b'"):
        await store.get("a", min_last_seq=gone.sequence)
    assert (await store.info("a", deleted=True)).sequence == 3
    assert (await store.delete("a")).sequence == 3
    assert await store.list() == ()
    assert [one.deleted for one in await store.list(deleted=True)] == [True]
    assert list(left(url)) == [meta_subject("b", "a")]

    assert (await store.put("a", b"again")).sequence == 5
    assert await store.get("a") == b"again"


async def test_watch_reports_objects(url: str) -> None:
    async with opened_store(url) as store:
        await store.put("a", b"1")
        await store.put("b", b"1")
        watch = store.watch()
        seen = []
        async for info in watch:
            seen.append(info and (info.name, info.size, info.deleted))
            if len(seen) == 3:
                await store.put("a", b"12")
                await store.delete("b")
            if len(seen) == 5:
                break
        await watch.aclose()
        assert seen == [
            *(("a", 1, False), ("b", 1, False), None),
            *(("a", 2, False), ("b", 0, True)),
        ]
        watch = store.watch(updates_only=True)
        assert await watch.__anext__() is None
        await watch.aclose()
    assert consumer_count(url) == 0


async def test_list_under_writes_has_every_object(store: ObjectStore) -> None:
    """An object that is replaced before its turn comes has left the range that is being read."""
    names = {f"o{i}" for i in range(200)}

    for name in sorted(names):
        await store.put(name, b"1")
    stream = await store._stream_info(None)
    for name in ("o7", "o77"):
        await store.put(name, b"2")
    listed = {one.name: one.size for one in await store._list_objects(stream)}
    assert set(listed) == names
    assert listed["o7"] == 1


async def test_links(url: str, store: ObjectStore) -> None:
    info = await store.put("a", b"there")
    links = {"one": ("b", "a"), "all": ("b", ""), "chain": ("b", "one")}
    for name, link in links.items():
        meta = ObjectInfo("b", name, info.nuid, link=link)
        publish(url, [(meta_subject("b", name), meta.encoded(), None)])
    assert await store.get("one") == b"there"
    with pytest.raises(ObjectIsLinkError, match="whole store 'b'"):
        await store.get("all")
    with pytest.raises(ObjectIsLinkError, match="another link, 'one'"):
        await store.get("chain")
    with pytest.raises(ObjectIsLinkError):
        [chunk async for chunk in store.chunks(await store.info("one"))]


async def test_store_or_object_missing(store: ObjectStore) -> None:
    with pytest.raises(ObjectNotFoundError, match="'none' is not in store 'b'"):
        await store.info("none")
    with pytest.raises(ObjectNotFoundError):
        await store.delete("none")
    with pytest.raises(ConfigurationError, match="expected a name"):
        await store.put("", b"")
    other = ObjectStore(store.jetstream, "other")
    for read in (other.info("a"), other.list(), other.put("a", b"")):
        with pytest.raises(BucketNotFoundError, match="store 'other' does not exist"):
            await read
    with pytest.raises(BucketExistsError):
        await ObjectStore.create(store.jetstream, "b", max_bytes=5)


async def test_large_parts_are_cut_in_one_go() -> None:
    """Each cut once copied all that was left: minutes for what takes milliseconds."""

    async def cut() -> list[bytes]:
        async def parts() -> AsyncIterator[bytes]:
            yield MEGABYTE * 16
            yield b"end"

        return [piece async for piece in _split_chunks(parts(), 256)]

    pieces = await asyncio.wait_for(cut(), 60)
    assert b"".join(pieces) == MEGABYTE * 16 + b"end"
    assert {len(piece) for piece in pieces[:-1]} == {256}


async def test_sequence_too_high_until_written(url: str) -> None:
    async with opened_store(url) as store:
        early = {"min_last_seq": (await store.put("a", b"1")).sequence + 2}
    async with opened_store(url, request_timeout=1.0) as store:
        for read in (store.info("a", **early), store.get("a", **early), store.list(**early)):
            with pytest.raises(MinLastSequenceError) as caught:
                await read
            assert (caught.value.code, caught.value.err_code) == (412, 10180)
    async with opened_store(url, request_timeout=20.0) as store:
        waiting = asyncio.ensure_future(store.get("a", **early))
        await store.put("a", b"2")
        assert await waiting == b"2"


async def test_object_in_lagging_mirror() -> None:
    """Put at the hub, it is not in the leaf's mirror yet: with its sequence it is waited for."""
    with hub_and_leaf() as both:
        async with opened_store(both.hub.url) as store:
            await ObjectStore.create(store.jetstream, "b")
        # Without it, a mirror on 2.10 stands still at the first meta message.
        allowed = {"allow_rollup_hdrs": True}
        make_mirror(both.leaf.url, "OBJ_b", "OBJ_b", source_domain="hub", **allowed)
        both.line.hold()
        async with opened_store(both.hub.url) as store:
            info = await store.put("a", MEGABYTE)

        async with opened_store(both.leaf.url, request_timeout=10.0) as store:
            with pytest.raises(ObjectNotFoundError):
                await store.get("a")
            assert await store.list() == ()
            waiting = asyncio.gather(
                store.get("a", min_last_seq=info.sequence),
                store.list(min_last_seq=info.sequence),
            )
            done, _ = await asyncio.wait({waiting}, timeout=0.2)
            assert not done
            both.line.release()
            data, listed = await waiting
            assert data == MEGABYTE
            assert [one.sequence for one in listed] == [info.sequence]
