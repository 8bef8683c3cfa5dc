"""Object stores with concurrent writers, nats-py's own client, other accounts and domains."""

from __future__ import annotations

import asyncio

import pytest
from nats.aio.client import Client

from nats_stream_source.connection.connection import Connection
from nats_stream_source.errors import NoStreamError, ObjectNotFoundError, WrongLastSequenceError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.object_store.info import chunk_subject, meta_subject
from nats_stream_source.jetstream.object_store.store import MAPPING, ObjectStore
from nats_stream_source.jetstream.subjects import api_prefix
from tests.integration.jetstream.object_store.stores import MEGABYTE, left, opened_store
from tests.support.nats.buckets import with_client
from tests.support.nats.topology import (
    ADR19_API_PREFIX,
    ADR19_INBOX_PREFIX,
    adr19_server,
    hub_and_leaf,
)

pytestmark = pytest.mark.servers


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
        async with opened_store(both.hub.url) as store:
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
