"""The options of a watch (ADR-8): which entries are sent, in which order, and one end signal."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    BucketNotFoundError,
    ConfigurationError,
    InvalidNameError,
    MinLastSequenceError,
)
from nats_stream_source.jetstream.kv.store import KeyValue
from tests.integration.jetstream.kv.watches import FAST, opened, take, watched_bucket
from tests.support.nats.buckets import create_bucket, delete, purge, put, put_many

pytestmark = pytest.mark.servers


def fill(url: str, name: str) -> None:
    """Keys a.x (2 revisions), b (deleted), a.y (purged), c."""
    put_many(url, name, [("a.x", b"1"), ("b", b"1"), ("a.y", b"1"), ("a.x", b"2")])
    delete(url, name, "b")
    purge(url, name, "a.y")
    put(url, name, "c", b"1")


LATEST = [("a.x", 4, "PUT"), ("b", 5, "DEL"), ("a.y", 6, "PURGE"), ("c", 7, "PUT")]
ALL = [("a.x", 1, "PUT"), ("b", 2, "PUT"), *LATEST]

OPTIONS: list[tuple[str, tuple[str, ...], dict[str, Any], list[tuple[str, int, str]]]] = [
    ("default", (), {}, LATEST),
    ("empty", ("",), {}, LATEST),
    ("all", (">",), {}, LATEST),
    ("history", (), {"include_history": True}, ALL),
    ("no deletes", (), {"ignore_deletes": True}, [LATEST[0], LATEST[3]]),
    (
        "history, no deletes",
        (),
        {"include_history": True, "ignore_deletes": True},
        [ALL[0], ALL[1], LATEST[0], LATEST[3]],
    ),
    ("meta only", (), {"meta_only": True}, LATEST),
    ("updates only", (), {"updates_only": True}, []),
    ("one key", ("a.x",), {}, LATEST[:1]),
    ("one key's history", ("a.x",), {"include_history": True}, [ALL[0], LATEST[0]]),
    ("wildcard", ("a.*",), {}, [LATEST[0], LATEST[2]]),
    ("several", ("a.>", "c"), {}, [LATEST[0], LATEST[2], LATEST[3]]),
    ("no match", ("z.*",), {}, []),
    ("from a revision", (), {"resume_from_revision": 5}, LATEST[1:]),
    ("from a revision, filtered", ("a.*", "b"), {"resume_from_revision": 5}, LATEST[1:3]),
    ("from a revision to come", (), {"resume_from_revision": 8}, []),
    ("with a least revision", (), {"min_last_revision": 7}, LATEST),
]


@pytest.mark.parametrize(
    ("keys", "options", "expected"), [one[1:] for one in OPTIONS], ids=[one[0] for one in OPTIONS]
)
async def test_options(
    shared_server: NatsServer,
    request: pytest.FixtureRequest,
    keys: tuple[str, ...],
    options: dict[str, Any],
    expected: list[tuple[str, int, str]],
) -> None:
    """The initial entries, the signal once, then what is written."""
    url = shared_server.url
    name = f"o{abs(hash(request.node.name))}"

    async with watched_bucket(url, name, history=5) as kv:
        await asyncio.to_thread(fill, url, name)
        async with kv.watch(*keys, **options) as watch:
            assert await take(watch, len(expected) + 1) == [*expected, None]
            assert watch.initial_done
            await kv.put("a.x", b"new")
            await kv.delete("a.x")
            await kv.put("c", b"new")
            updates: list[tuple[str, int, str] | None] = [
                ("a.x", 8, "PUT"),
                ("a.x", 9, "DEL"),
                ("c", 10, "PUT"),
            ]
            if options.get("ignore_deletes"):
                del updates[1]
            if keys == ("a.x",) or keys == ("a.*",) or keys == ("a.*", "b"):
                del updates[2]
            if keys == ("z.*",):
                updates = []
            assert await take(watch, len(updates)) == updates
            reader = watch.reader
            assert reader is not None
            assert reader.cursor.rebuilds == []


@pytest.mark.parametrize("history", [1, 5])
@pytest.mark.parametrize("options", [{}, {"include_history": True}, {"updates_only": True}])
async def test_bucket_empty(
    shared_server: NatsServer, history: int, options: dict[str, Any]
) -> None:
    name = f"empty{history}{len(options)}{'updates_only' in options}"

    async with watched_bucket(shared_server.url, name, history) as kv, kv.watch(**options) as watch:
        assert await watch.initial() == []
        await kv.put("a", b"1")
        assert await take(watch, 1) == [("a", 1, "PUT")]


async def test_signal_by_heartbeat_only(shared_server: NatsServer) -> None:
    """The stream's last message was removed, so no message marks the end."""
    async with watched_bucket(shared_server.url, "beat") as kv:
        await kv.put("a", b"1")
        await kv.put("b", b"1")
        await kv.jetstream.call("STREAM.PURGE.KV_beat", {"filter": "$KV.beat.b"})
        async with kv.watch(heartbeat=FAST) as watch:
            assert await take(watch, 2) == [("a", 1, "PUT"), None]
            assert watch.reader is not None
            assert watch.reader.cursor.seen_through == 2


@pytest.mark.parametrize("removed", ["before the start", "after the start"])
async def test_signal_where_entries_from_revision_were_removed(
    shared_server: NatsServer, removed: str
) -> None:
    """No message is delivered: only a heartbeat shows that the replica has reached the end."""
    name = f"rest{removed.split()[0]}"
    async with watched_bucket(shared_server.url, name) as kv:
        for i in range(20):
            await kv.put(f"k{i}", b"1")
        await kv.put("x", b"1")
        await kv.delete("x")
        if removed == "before the start":
            assert await kv.purge_deletes(older_than=0) == 1
        async with kv.watch(resume_from_revision=21, heartbeat=FAST) as watch:
            if removed == "after the start":
                await kv.jetstream.call(f"STREAM.PURGE.KV_{name}")
            assert await take(watch, 1) == [None]
            await kv.put("y", b"1")
            assert await take(watch, 1) == [("y", 23, "PUT")]


async def test_values_and_meta_only(shared_server: NatsServer) -> None:
    async with watched_bucket(shared_server.url, "meta", history=2) as kv:
        await kv.put("a", b"1")
        await kv.put("a", b"12345")
        async with kv.watch(include_history=True) as watch:
            first, last = await watch.initial()
            assert (first.value, first.delta, first.bucket) == (b"1", 1, "meta")
            assert (last.value, last.delta) == (b"12345", 0)
        async with kv.watch(meta_only=True) as watch:
            (entry,) = await watch.initial()
            assert entry.value == b""
            assert entry.headers is not None
            assert entry.headers.get("Nats-Msg-Size") == "5"


CONTRADICTIONS: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    ((), {"include_history": True, "updates_only": True}, "are both set"),
    ((), {"include_history": True, "resume_from_revision": 1}, "are both set"),
    ((), {"updates_only": True, "resume_from_revision": 1}, "are both set"),
    ((), {"resume_from_revision": 0}, "expected an integer from 1 to"),
    ((), {"resume_from_revision": True}, "expected an integer from 1 to"),
    ((), {"min_last_revision": "1"}, "expected an integer from 0 to"),
    ((), {"heartbeat": 0.05}, "at least 0.1 seconds"),
    (("a.*", "a.b"), {}, "overlap"),
    ((">", "a"), {}, "overlap"),
]


@pytest.mark.parametrize(("keys", "options", "message"), CONTRADICTIONS)
async def test_contradictions(
    shared_server: NatsServer, keys: tuple[str, ...], options: dict[str, Any], message: str
) -> None:
    with contextlib.suppress(RuntimeError):
        create_bucket(shared_server.url, "contra")
    async with opened(shared_server.url, "contra") as kv:
        with pytest.raises(ConfigurationError, match=message):
            kv.watch(*keys, **options)
        for bad in ("a b", ">.a", "a*", "a."):
            with pytest.raises(InvalidNameError):
                kv.watch(bad)


async def test_bucket_missing(shared_server: NatsServer) -> None:
    create_bucket(shared_server.url, "short")

    async with opened(shared_server.url, "short", request_timeout=1.0) as kv:
        with pytest.raises(MinLastSequenceError, match="412, 10180"):
            await kv.watch(min_last_revision=1).start()
        await KeyValue.delete_bucket(kv.jetstream, "short")
        for least in (None, 1):
            with pytest.raises(BucketNotFoundError):
                await kv.watch(min_last_revision=least).initial()
