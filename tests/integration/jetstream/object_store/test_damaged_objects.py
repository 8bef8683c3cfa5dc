"""Damaged and replaced objects, refused writes and bad meta messages are errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from nats_stream_source.errors import (
    BadObjectInfoError,
    MessageTooLargeError,
    ObjectDamagedError,
    StreamFullError,
)
from nats_stream_source.jetstream.object_store.info import Digest, ObjectInfo, meta_subject
from nats_stream_source.jetstream.object_store.store import ObjectStore
from tests.integration.jetstream.object_store.stores import MEGABYTE, left, opened_store
from tests.support.nats.buckets import publish
from tests.support.nats.streams import stream_state

pytestmark = pytest.mark.servers


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
    "payload",
    [b"", b"{", b"[]", b'{"name": "a"}', b'{"name": "a", "bucket": "b", "size": "5"}'],
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
