"""Read-after-write in object stores (ADR-53, "Object Store")."""

from __future__ import annotations

import asyncio

import pytest

from nats_stream_source.errors import MinLastSequenceError, ObjectNotFoundError
from nats_stream_source.jetstream.object_store.store import ObjectStore
from tests.integration.jetstream.object_store.stores import MEGABYTE, opened_store
from tests.support.nats.topology import hub_and_leaf, make_mirror

pytestmark = pytest.mark.servers


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
