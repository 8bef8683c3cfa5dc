"""Objects: put, get, watch, list, damaged, replaced, and with other clients and accounts."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from nats.aio.client import Client

from nats_stream_source.connection.connection import Connection
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    BadObjectInfoError,
    BucketExistsError,
    BucketNotFoundError,
    ConfigurationError,
    MessageTooLargeError,
    MinLastSequenceError,
    NoStreamError,
    ObjectDamagedError,
    ObjectIsLinkError,
    ObjectNotFoundError,
    StreamFullError,
    WrongLastSequenceError,
)
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.object_store.reader import (
    Digest,
    ObjectInfo,
    chunk_subject,
    meta_subject,
)
from nats_stream_source.jetstream.object_store.store import MAPPING, ObjectStore, _split_chunks
from nats_stream_source.jetstream.subjects import api_prefix
from tests.support.nats.buckets import api, publish, with_client
from tests.support.nats.streams import stream_state
from tests.support.nats.topology import (
    ADR19_API_PREFIX,
    ADR19_INBOX_PREFIX,
    adr19_server,
    hub_and_leaf,
    make_mirror,
)

pytestmark = pytest.mark.servers

MEGABYTE = bytes(range(256)) * 4096


@asynccontextmanager
async def opened_store(
    url: str, bucket: str = "b", request_timeout: float = 2.0, **settings: Any
) -> AsyncIterator[ObjectStore]:
    async with connect(url, request_timeout=request_timeout, **settings) as jetstream:
        yield ObjectStore(jetstream, bucket)


def left(url: str, stream: str = "OBJ_b") -> dict[str, int]:
    """How many messages each subject of the store has."""
    answer = api(url, f"STREAM.INFO.{stream}", {"subjects_filter": ">"})
    return answer["state"].get("subjects") or {}


@pytest.fixture
async def url(shared_server: NatsServer) -> str:
    """A server with an empty store ``b``."""
    if "OBJ_b" in (api(shared_server.url, "STREAM.NAMES").get("streams") or ()):
        api(shared_server.url, "STREAM.DELETE.OBJ_b")
    async with opened_store(shared_server.url) as store:
        await ObjectStore.create(store.jetstream, "b")
    return shared_server.url


@pytest.fixture
async def store(url: str) -> AsyncIterator[ObjectStore]:
    """The store ``b`` on a connection of its own."""
    async with opened_store(url) as store:
        yield store


def consumer_count(url: str) -> int:
    return stream_state(url, "OBJ_b")["consumer_count"]


@pytest.mark.parametrize("size", [0, 1, 131_072, 131_073, 1_000_000])
async def test_object_roundtrip(url: str, store: ObjectStore, size: int) -> None:
    data = MEGABYTE[:size]
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


async def test_watch_reports_objects(url: str, store: ObjectStore) -> None:
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
                store.get("a", min_last_seq=info.sequence), store.list(min_last_seq=info.sequence)
            )
            done, _ = await asyncio.wait({waiting}, timeout=0.2)
            assert not done
            both.line.release()
            data, listed = await waiting
            assert data == MEGABYTE
            assert [one.sequence for one in listed] == [info.sequence]


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
_FIELDS = ("bucket", "name", "nuid", "size", "chunks", "digest", "headers", "metadata", "options")
_META = st.fixed_dictionaries({}, optional=dict.fromkeys(_FIELDS, _ANYTHING))


@given(
    st.binary(max_size=50) | (_META | _ANYTHING).map(lambda one: json.dumps(one).encode()),
    st.integers(0, 2**62),
)
def test_payload_is_read_or_refused(payload: bytes, sequence: int) -> None:
    with contextlib.suppress(BadObjectInfoError):
        assert ObjectInfo.parse(payload, sequence, 0).sequence == sequence


_TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


@given(
    st.builds(
        ObjectInfo,
        bucket=st.just("b"),
        name=_TEXT.filter(bool),
        nuid=_TEXT.filter(lambda text: not set(".*> ") & set(text)),
        size=st.integers(0, 2**63),
        chunks=st.integers(0, 2**32),
        digest=_TEXT,
        deleted=st.booleans(),
        description=_TEXT,
        headers=st.dictionaries(_TEXT, st.lists(_TEXT)),
        metadata=st.dictionaries(_TEXT, _TEXT),
        link=st.none() | st.tuples(st.just("c"), _TEXT),
        chunk_size=st.none() | st.integers(1, 2**32),
    )
)
def test_meta_data_survive_encoding(info: ObjectInfo) -> None:
    assert ObjectInfo.parse(info.encoded(), 0, 0) == info


@pytest.mark.parametrize("digest", ["", "MD5=AAAA", "SHA-256=AAAA", "SHA-256=ü"])
def test_digest_invalid(digest: str) -> None:
    with pytest.raises(BadObjectInfoError, match="is not a SHA-256 digest"):
        Digest().verify(ObjectInfo("b", "a", digest=digest))


def test_digest_in_lower_case_without_padding_is_accepted() -> None:
    told = Digest().text.replace("SHA", "sha").rstrip("=")
    Digest().verify(ObjectInfo("b", "a", digest=told))


async def test_missing_chunks_are_error(store: ObjectStore) -> None:
    info = await store.put("a", MEGABYTE)
    await store.jetstream.call("STREAM.MSG.DELETE.OBJ_b", {"seq": 3, "no_erase": True})
    with pytest.raises(ObjectDamagedError, match=r"917504 bytes in 7 chunks, expected"):
        await store.get("a", min_last_seq=info.sequence)


async def test_bytes_with_another_digest_are_error(url: str, store: ObjectStore) -> None:
    info = await store.put("a", b"right")
    wrong = Digest()
    wrong.add(b"wrong")
    meta = replace(info, digest=wrong.text)
    publish(url, [(meta_subject("b", "a"), meta.encoded(), {"Nats-Rollup": "sub"})])
    with pytest.raises(ObjectDamagedError, match="do not have the digest SHA-256="):
        await store.get("a")


async def test_object_replaced_while_read(store: ObjectStore) -> None:
    await store.put("a", MEGABYTE)
    looked_up = store.info

    async def outdated(name: str, **more: Any) -> ObjectInfo:
        """The meta data from before the put that comes between."""
        found = await looked_up(name, **more)
        store.info = looked_up
        await store.put("a", b"new")
        return found

    store.info = outdated
    assert await store.get("a") == b"new"
    assert store.info == looked_up


async def test_put_refused_leaves_nothing(url: str, store: ObjectStore) -> None:
    small = await ObjectStore.create(store.jetstream, "small", max_bytes=300_000)
    with pytest.raises(StreamFullError):
        await small.put("a", MEGABYTE)
    assert left(url, "OBJ_small") == {}
    with pytest.raises(MessageTooLargeError):
        await small.put("a", MEGABYTE * 2, chunk_size=2_000_000)

    async def broken() -> AsyncIterator[bytes]:
        yield MEGABYTE[:200_000]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk"):
        await small.put("a", broken())
    assert left(url, "OBJ_small") == {}
    assert await small.list() == ()


@pytest.mark.parametrize(
    "payload", [b"", b"{", b"[]", b'{"name": "a"}', b'{"name": "a", "bucket": "b", "size": "5"}']
)
async def test_meta_message_invalid(url: str, payload: bytes) -> None:
    publish(url, [(meta_subject("b", "a"), payload, None)])
    seq = stream_state(url, "OBJ_b")["last_seq"]  # 2 where a reconnect published twice
    error = f"could not parse the object meta message at sequence {seq}"
    for read in (lambda store: store.get("a"), lambda store: store.list()):
        async with opened_store(url) as store:
            with pytest.raises(BadObjectInfoError, match=error):
                await read(store)


@pytest.mark.parametrize("nuid", [">", "*", "a.b", "x y"])
async def test_meta_message_for_all_chunks_destroys_nothing(
    url: str, store: ObjectStore, nuid: str
) -> None:
    await store.put("good", MEGABYTE)
    meta = ObjectInfo("b", "bad", nuid, size=1, chunks=1, digest=Digest().text)
    publish(url, [(meta_subject("b", "bad"), meta.encoded(), None)])
    with pytest.raises(BadObjectInfoError, match="is not a subject token"):
        await store.get("bad")
    with pytest.raises(BadObjectInfoError):
        await store.delete("bad")
    await store.put("bad", b"put right")
    assert await store.get("bad") == b"put right"
    assert await store.get("good") == MEGABYTE


async def test_writers_of_one_object_at_same_time_leave_no_chunks_behind(
    url: str, store: ObjectStore
) -> None:
    async with await Connection.open(store.jetstream.connection.settings) as connection:
        stores = [store, ObjectStore(JetStream(connection), "b")] * 3
        for _ in range(3):
            writes = [one.put("a", bytes([i]) * 300_000) for i, one in enumerate(stores)]
            done = await asyncio.gather(*writes, stores[1].delete("a"), return_exceptions=True)
            assert not [one for one in done if isinstance(one, WrongLastSequenceError)]
    last = await store.info("a", deleted=True)
    expected = {meta_subject("b", "a")}
    if not last.deleted:
        expected.add(chunk_subject("b", last.nuid))
        assert len(await store.get("a")) == 300_000
    assert set(left(url)) == expected


async def test_nats_py_reads_and_writes_same_objects(url: str, store: ObjectStore) -> None:
    async def exchange(client: Client) -> None:
        theirs = await client.jetstream().object_store("b")
        assert (await theirs.get("ours")).data == MEGABYTE
        await theirs.put("theirs", MEGABYTE)
        assert {one.name for one in await theirs.list()} == {"ours", "theirs"}

    async def delete(client: Client) -> None:
        await (await client.jetstream().object_store("b")).delete("ours")

    await store.put("ours", MEGABYTE)
    with_client(url, exchange)
    assert await store.get("theirs") == MEGABYTE
    assert [one.name for one in await store.list()] == ["ours", "theirs"]
    with_client(url, delete)
    with pytest.raises(ObjectNotFoundError):
        await store.get("ours")


async def test_object_through_account_import() -> None:
    with adr19_server(object_store=True) as accounts:
        async with opened_store(accounts.exporter) as store:
            await ObjectStore.create(store.jetstream, "b")
        async with opened_store(
            accounts.importer, api_prefix=ADR19_API_PREFIX, inbox_prefix=ADR19_INBOX_PREFIX
        ) as store:
            await _round_trip(store)
        assert list(left(accounts.exporter)) == [meta_subject("b", "a")]


async def test_object_in_other_domain() -> None:
    mapping = MAPPING.replace("<domain>", "hub")
    with hub_and_leaf(hub_options=mapping) as both:
        async with opened_store(both.hub.url) as store:
            await ObjectStore.create(store.jetstream, "b")
        async with opened_store(both.leaf.url, api_prefix=api_prefix(domain="hub")) as store:
            await _round_trip(store)
        assert list(left(both.hub.url)) == [meta_subject("b", "a")]


async def test_domain_without_mapping_of_writes() -> None:
    """Servers map ``$KV`` and ``$OBJ`` by themselves, not ``$O``: the error names what to add."""
    with hub_and_leaf() as both:
        async with opened_store(both.hub.url) as store:
            await ObjectStore.create(store.jetstream, "b")
            await store.put("a", b"1")
        async with opened_store(both.leaf.url, api_prefix=api_prefix(domain="hub")) as store:
            assert await store.get("a") == b"1"
            for write in (store.put("a", b"2"), store.delete("a")):
                with pytest.raises(NoStreamError, match=r"mappings: .*API\.\$O\.>"):
                    await write
            assert await store.get("a") == b"1"


async def _round_trip(store: ObjectStore) -> None:
    info = await store.put("a", MEGABYTE)
    assert await store.get("a", min_last_seq=info.sequence) == MEGABYTE
    assert [one.sequence for one in await store.list()] == [info.sequence]
    await store.delete("a")
