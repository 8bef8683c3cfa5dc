"""Object stores: whole objects or an error, read-after-write, and NATS's own client as a peer."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from buckets import api, publish, with_client
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client
from topology import (
    ADR19_API_PREFIX,
    ADR19_INBOX_PREFIX,
    adr19_server,
    hub_and_leaf,
    make_mirror,
)

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
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.connection import Connection, ConnectionSettings
from nats_stream_source.jetstream.object_info import (
    Digest,
    ObjectInfo,
    chunk_subject,
    meta_subject,
)
from nats_stream_source.jetstream.object_store import MAPPING, ObjectStore
from nats_stream_source.jetstream.object_write import _pieces
from nats_stream_source.jetstream.subjects import api_prefix

pytestmark = pytest.mark.servers

T = TypeVar("T")
MEGABYTE = bytes(range(256)) * 4096


def run(
    url: str, work: Callable[[ObjectStore], Awaitable[T]], bucket: str = "b", **settings: Any
) -> T:
    async def whole() -> T:
        settings.setdefault("request_timeout", 2.0)
        connection = await Connection.open(ConnectionSettings(servers=(url,), **settings))
        try:
            return await work(ObjectStore(JetStream(connection), bucket))
        finally:
            await connection.close()

    return asyncio.run(whole())


@pytest.fixture
def url(shared_server: NatsServer, request: pytest.FixtureRequest) -> str:
    """A server with an empty store ``b``."""
    if "OBJ_b" in (api(shared_server.url, "STREAM.NAMES").get("streams") or ()):
        api(shared_server.url, "STREAM.DELETE.OBJ_b")
    run(shared_server.url, lambda store: ObjectStore.create(store.jetstream, "b"))
    return shared_server.url


def left(url: str, stream: str = "OBJ_b") -> dict[str, int]:
    """How many messages each subject of the store has."""
    answer = api(url, f"STREAM.INFO.{stream}", {"subjects_filter": ">"})
    return answer["state"].get("subjects") or {}


def consumer_count(url: str) -> int:
    return api(url, "STREAM.INFO.OBJ_b")["state"]["consumer_count"]


# Whole objects


@pytest.mark.parametrize("size", [0, 1, 131_072, 131_073, 1_000_000])
def test_what_was_put_is_got(url: str, size: int) -> None:
    data = MEGABYTE[:size]

    async def work(store: ObjectStore) -> None:
        info = await store.put("a/b c.ü", data, description="it", metadata={"m": "1"})
        assert (info.size, info.chunks) == (size, -(-size // 131_072))
        assert info.sequence == info.chunks + 1
        found = await store.info("a/b c.ü", min_last_seq=info.sequence)
        assert found == replace(info, modified_ns=found.modified_ns)
        assert found.modified_ns > 0
        assert await store.get("a/b c.ü", min_last_seq=info.sequence) == data

    run(url, work)
    assert consumer_count(url) == 0


def test_data_from_files_and_iterators(url: str) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for size in (1, 299_999, 0, 700_000):
            yield MEGABYTE[:size]

    async def work(store: ObjectStore) -> None:
        await store.put("file", io.BytesIO(MEGABYTE), chunk_size=300_000)
        assert (await store.info("file")).chunks == 4
        assert await store.get("file") == MEGABYTE
        info = await store.put("parts", parts(), chunk_size=100_000)
        assert (info.size, info.chunks) == (1_000_000, 10)
        assert len([chunk async for chunk in store.chunks(info)]) == 10

    run(url, work)


def test_an_object_in_place_of_another(url: str) -> None:
    async def work(store: ObjectStore) -> None:
        first = await store.put("a", b"x" * 300_000)
        second = await store.put("a", b"new", headers={"h": ["1", "2"]})
        assert await store.get("a") == b"new"
        assert second.sequence > first.sequence
        assert (await store.info("a")).headers == {"h": ["1", "2"]}
        assert [one.name for one in await store.list()] == ["a"]
        assert set(left(url)) == {chunk_subject("b", second.nuid), meta_subject("b", "a")}

    run(url, work)


def test_a_deleted_object(url: str) -> None:
    async def work(store: ObjectStore) -> None:
        await store.put("a", b"x")
        gone = await store.delete("a")
        assert (gone.deleted, gone.size, gone.sequence) == (True, 0, 3)
        with pytest.raises(ObjectNotFoundError, match="'a' was deleted from the store 'b'"):
            await store.get("a", min_last_seq=gone.sequence)
        assert (await store.info("a", deleted=True)).sequence == 3
        assert (await store.delete("a")).sequence == 3
        assert await store.list() == ()
        assert [one.deleted for one in await store.list(deleted=True)] == [True]
        assert list(left(url)) == [meta_subject("b", "a")]

        assert (await store.put("a", b"again")).sequence == 5
        assert await store.get("a") == b"again"

    run(url, work)


def test_a_watch(url: str) -> None:
    async def work(store: ObjectStore) -> None:
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

    run(url, work)
    assert consumer_count(url) == 0


def test_a_list_under_writes_has_every_object(url: str) -> None:
    """An object that is replaced before its turn comes has left the range that is being read."""
    names = {f"o{i}" for i in range(200)}

    async def work(store: ObjectStore) -> None:
        for name in sorted(names):
            await store.put(name, b"1")
        stream = await store._stream_info(None)
        for name in ("o7", "o77"):
            await store.put(name, b"2")
        listed = {one.name: one.size for one in await store._list(stream)}
        assert set(listed) == names
        assert listed["o7"] == 1

    run(url, work)


# Read-after-write (ADR-53, "Object Store")


def test_a_sequence_that_is_too_high_and_then_comes(url: str) -> None:
    async def work(store: ObjectStore) -> None:
        for read in (store.info("a", **early), store.get("a", **early), store.list(**early)):
            with pytest.raises(MinLastSequenceError) as caught:
                await read
            assert (caught.value.code, caught.value.err_code) == (412, 10180)

    async def then(store: ObjectStore) -> None:
        waiting = asyncio.ensure_future(store.get("a", **early))
        await store.put("a", b"2")
        assert await waiting == b"2"

    early = {"min_last_seq": run(url, lambda store: store.put("a", b"1")).sequence + 2}
    run(url, work, request_timeout=1.0)
    run(url, then, request_timeout=20.0)


def test_an_object_in_a_mirror_that_lags() -> None:
    """Put at the hub, it is not in the leaf's mirror yet: with its sequence it is waited for."""
    with hub_and_leaf() as both:
        run(both.hub.url, lambda store: ObjectStore.create(store.jetstream, "b"))
        # Without it, a mirror on 2.10 stands still at the first meta message.
        allowed = {"allow_rollup_hdrs": True}
        make_mirror(both.leaf.url, "OBJ_b", "OBJ_b", source_domain="hub", **allowed)
        both.line.hold()
        info = run(both.hub.url, lambda store: store.put("a", MEGABYTE))

        async def work(store: ObjectStore) -> None:
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

        run(both.leaf.url, work, request_timeout=10.0)


# Damage, links, bad input


def test_chunks_that_are_gone_are_an_error(url: str) -> None:
    async def work(store: ObjectStore) -> None:
        info = await store.put("a", MEGABYTE)
        await store.jetstream.call("STREAM.MSG.DELETE.OBJ_b", {"seq": 3, "no_erase": True})
        with pytest.raises(ObjectDamagedError, match=r"917504 bytes in 7 chunks, written were"):
            await store.get("a", min_last_seq=info.sequence)

    run(url, work)


def test_bytes_with_another_digest_are_an_error(url: str) -> None:
    async def work(store: ObjectStore) -> None:
        info = await store.put("a", b"right")
        wrong = Digest()
        wrong.add(b"wrong")
        meta = replace(info, digest=wrong.text)
        publish(url, [(meta_subject("b", "a"), meta.encoded(), {"Nats-Rollup": "sub"})])
        with pytest.raises(ObjectDamagedError, match="do not have the digest SHA-256="):
            await store.get("a")

    run(url, work)


def test_an_object_that_is_replaced_while_it_is_read(url: str) -> None:
    async def work(store: ObjectStore) -> None:
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

    run(url, work)


def test_links(url: str) -> None:
    async def work(store: ObjectStore) -> None:
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

    run(url, work)


def test_no_store_no_object(url: str) -> None:
    async def work(store: ObjectStore) -> None:
        with pytest.raises(ObjectNotFoundError, match="'none' is not in the store 'b'"):
            await store.info("none")
        with pytest.raises(ObjectNotFoundError):
            await store.delete("none")
        with pytest.raises(ConfigurationError, match="has a name"):
            await store.put("", b"")
        other = ObjectStore(store.jetstream, "other")
        for read in (other.info("a"), other.list(), other.put("a", b"")):
            with pytest.raises(BucketNotFoundError, match="store 'other' does not exist"):
                await read
        with pytest.raises(BucketExistsError):
            await ObjectStore.create(store.jetstream, "b", max_bytes=5)

    run(url, work)


def test_a_put_that_is_refused_leaves_nothing(url: str) -> None:
    async def work(store: ObjectStore) -> None:
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

    run(url, work)


@pytest.mark.parametrize(
    "payload",
    [b"", b"{", b"[]", b'{"name": "a"}', b'{"name": "a", "bucket": "b", "size": "5"}'],
)
def test_a_meta_message_that_is_none(url: str, payload: bytes) -> None:
    publish(url, [(meta_subject("b", "a"), payload, None)])
    for read in (lambda store: store.get("a"), lambda store: store.list()):
        with pytest.raises(BadObjectInfoError, match="sequence 1 is none of an object store"):
            run(url, read)


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
def test_any_payload_is_read_or_refused(payload: bytes, sequence: int) -> None:
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
def test_a_digest_that_is_none(digest: str) -> None:
    with pytest.raises(BadObjectInfoError, match="is no SHA-256 digest"):
        Digest().check(ObjectInfo("b", "a", digest=digest))


def test_a_digest_in_small_letters_and_without_padding_counts() -> None:
    told = Digest().text.replace("SHA", "sha").rstrip("=")
    Digest().check(ObjectInfo("b", "a", digest=told))


# Others at the same time, and others who mean no good


def test_writers_of_one_object_at_the_same_time_leave_no_chunks_behind(url: str) -> None:
    async def work(store: ObjectStore) -> None:
        connection = await Connection.open(store.jetstream.connection.settings)
        try:
            stores = [store, ObjectStore(JetStream(connection), "b")] * 3
            for _ in range(3):
                writes = [one.put("a", bytes([i]) * 300_000) for i, one in enumerate(stores)]
                done = await asyncio.gather(*writes, stores[1].delete("a"), return_exceptions=True)
                assert not [one for one in done if isinstance(one, WrongLastSequenceError)]
        finally:
            await connection.close()
        last = await store.info("a", deleted=True)
        expected = {meta_subject("b", "a")}
        if not last.deleted:
            expected.add(chunk_subject("b", last.nuid))
            assert len(await store.get("a")) == 300_000
        assert set(left(url)) == expected

    run(url, work)


@pytest.mark.parametrize("nuid", [">", "*", "a.b", "x y"])
def test_a_meta_message_that_names_all_chunks_destroys_nothing(url: str, nuid: str) -> None:
    async def work(store: ObjectStore) -> None:
        await store.put("good", MEGABYTE)
        meta = ObjectInfo("b", "bad", nuid, size=1, chunks=1, digest=Digest().text)
        publish(url, [(meta_subject("b", "bad"), meta.encoded(), None)])
        with pytest.raises(BadObjectInfoError, match="is no subject token"):
            await store.get("bad")
        with pytest.raises(BadObjectInfoError):
            await store.delete("bad")
        await store.put("bad", b"put right")
        assert await store.get("bad") == b"put right"
        assert await store.get("good") == MEGABYTE

    run(url, work)


def test_large_parts_are_cut_in_one_go() -> None:
    """Each cut once copied all that was left: minutes for what takes milliseconds."""

    async def cut() -> list[bytes]:
        async def parts() -> AsyncIterator[bytes]:
            yield MEGABYTE * 16
            yield b"end"

        return [piece async for piece in _pieces(parts(), 256)]

    pieces = asyncio.run(asyncio.wait_for(cut(), 60))
    assert b"".join(pieces) == MEGABYTE * 16 + b"end"
    assert {len(piece) for piece in pieces[:-1]} == {256}


# Other clients, accounts, domains


def test_nats_own_client_reads_and_writes_the_same(url: str) -> None:
    async def exchange(client: Client) -> None:
        theirs = await client.jetstream().object_store("b")
        assert (await theirs.get("ours")).data == MEGABYTE
        await theirs.put("theirs", MEGABYTE)
        assert {one.name for one in await theirs.list()} == {"ours", "theirs"}

    async def delete(client: Client) -> None:
        await (await client.jetstream().object_store("b")).delete("ours")

    async def work(store: ObjectStore) -> None:
        await store.put("ours", MEGABYTE)
        with_client(url, exchange)
        assert await store.get("theirs") == MEGABYTE
        assert [one.name for one in await store.list()] == ["ours", "theirs"]
        with_client(url, delete)
        with pytest.raises(ObjectNotFoundError):
            await store.get("ours")

    run(url, work)


def test_through_an_account_import() -> None:
    with adr19_server(object_store=True) as accounts:
        run(accounts.exporter, lambda store: ObjectStore.create(store.jetstream, "b"))
        run(
            accounts.importer,
            _round_trip,
            api_prefix=ADR19_API_PREFIX,
            inbox_prefix=ADR19_INBOX_PREFIX,
        )
        assert list(left(accounts.exporter)) == [meta_subject("b", "a")]


def test_in_another_domain() -> None:
    mapping = MAPPING.replace("<domain>", "hub")
    with hub_and_leaf(hub_options=mapping) as both:
        run(both.hub.url, lambda store: ObjectStore.create(store.jetstream, "b"))
        run(both.leaf.url, _round_trip, api_prefix=api_prefix(domain="hub"))
        assert list(left(both.hub.url)) == [meta_subject("b", "a")]


def test_a_domain_that_does_not_map_the_writes() -> None:
    """Servers map ``$KV`` and ``$OBJ`` by themselves, not ``$O``: the error says what to add."""

    async def work(store: ObjectStore) -> None:
        assert await store.get("a") == b"1"
        for write in (store.put("a", b"2"), store.delete("a")):
            with pytest.raises(NoStreamError, match=r"mappings: .*API\.\$O\.>"):
                await write
        assert await store.get("a") == b"1"

    with hub_and_leaf() as both:
        run(both.hub.url, lambda store: ObjectStore.create(store.jetstream, "b"))
        run(both.hub.url, lambda store: store.put("a", b"1"))
        run(both.leaf.url, work, api_prefix=api_prefix(domain="hub"))


async def _round_trip(store: ObjectStore) -> None:
    info = await store.put("a", MEGABYTE)
    assert await store.get("a", min_last_seq=info.sequence) == MEGABYTE
    assert [one.sequence for one in await store.list()] == [info.sequence]
    await store.delete("a")
