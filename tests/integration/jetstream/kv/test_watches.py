"""Watches (ADR-8): their options, the end signal, updates, batches, cancelled reads."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from nats_stream_source.errors import (
    BucketNotFoundError,
    ConfigurationError,
    DataLossError,
    InvalidNameError,
    MinLastSequenceError,
    StreamNotFoundError,
)
from nats_stream_source.jetstream.kv import requests, watch as module
from nats_stream_source.jetstream.kv.entry import Entry
from nats_stream_source.jetstream.kv.store import KeyValue
from nats_stream_source.jetstream.kv.watch import Watch
from nats_stream_source.jetstream.ordered import consumer
from nats_stream_source.jetstream.publish.publisher import Publisher
from nats_stream_source.wire.consumer.intake import Batcher
from tests.integration.jetstream.kv.stores import FAST, opened, take, watched_bucket
from tests.support.nats.backup import back_up
from tests.support.nats.buckets import (
    consumers,
    create_bucket,
    delete,
    publish,
    purge,
    put,
    put_many,
)
from tests.support.wait import wait_until_async

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
    url: str,
    request: pytest.FixtureRequest,
    keys: tuple[str, ...],
    options: dict[str, Any],
    expected: list[tuple[str, int, str]],
) -> None:
    """The initial entries, the signal once, then what is written."""
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
async def test_bucket_empty(url: str, history: int, options: dict[str, Any]) -> None:
    name = f"empty{history}{len(options)}{'updates_only' in options}"

    async with watched_bucket(url, name, history) as kv, kv.watch(**options) as watch:
        assert await watch.initial() == []
        await kv.put("a", b"1")
        assert await take(watch, 1) == [("a", 1, "PUT")]


async def test_signal_by_heartbeat_only(url: str) -> None:
    """The stream's last message was removed, so no message marks the end."""
    async with watched_bucket(url, "beat") as kv:
        await kv.put("a", b"1")
        await kv.put("b", b"1")
        await kv.jetstream.call("STREAM.PURGE.KV_beat", {"filter": "$KV.beat.b"})
        async with kv.watch(heartbeat=FAST) as watch:
            assert await take(watch, 2) == [("a", 1, "PUT"), None]
            assert watch.reader is not None
            assert watch.reader.cursor.seen_through == 2


@pytest.mark.parametrize("history", [1, 5])
async def test_signal_where_last_sequence_matches_no_filter(
    url: str, monkeypatch: pytest.MonkeyPatch, history: int
) -> None:
    """Large values: the end is the stream's last sequence. An older server delivers that entry."""
    monkeypatch.setattr(requests, "_MAX_VALUE_BYTES", 0)
    monkeypatch.setattr(consumer, "_FIXED_IN", (99, 0))
    async with watched_bucket(url, f"beyond{history}", history) as kv:
        for key in ("a.x", "b.x", "c.x"):
            await kv.put(key, b"1")
        async with kv.watch("a.*", "b.*", heartbeat=FAST) as watch:
            assert await take(watch, 3) == [("a.x", 1, "PUT"), ("b.x", 2, "PUT"), None]
            await kv.put("a.x", b"2")
            assert await take(watch, 1) == [("a.x", 4, "PUT")]


@pytest.mark.parametrize("removed", ["before the start", "after the start"])
async def test_signal_where_entries_from_revision_were_removed(url: str, removed: str) -> None:
    """No message is delivered: only a heartbeat shows that the replica has reached the end."""
    name = f"rest{removed.split()[0]}"
    async with watched_bucket(url, name) as kv:
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


async def test_values_and_meta_only(url: str) -> None:
    async with watched_bucket(url, "meta", history=2) as kv:
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
    url: str, keys: tuple[str, ...], options: dict[str, Any], message: str
) -> None:
    with contextlib.suppress(RuntimeError):
        create_bucket(url, "contra")
    async with opened(url, "contra") as kv:
        with pytest.raises(ConfigurationError, match=message):
            kv.watch(*keys, **options)
        for bad in ("a b", ">.a", "a*", "a."):
            with pytest.raises(InvalidNameError):
                kv.watch(bad)


async def test_bucket_missing(url: str) -> None:
    create_bucket(url, "short")

    async with opened(url, "short", request_timeout=1.0) as kv:
        with pytest.raises(MinLastSequenceError, match="412, 10180"):
            await kv.watch(min_last_revision=1).start()
        await KeyValue.delete_bucket(kv.jetstream, "short")
        for least in (None, 1):
            with pytest.raises(BucketNotFoundError):
                await kv.watch(min_last_revision=least).initial()


async def test_initial_and_then_updates(url: str) -> None:
    async with watched_bucket(url, "then") as kv:
        await kv.put("a", b"1")
        watch = kv.watch_all()
        assert [entry.key for entry in await watch.initial()] == ["a"]
        assert await watch.initial() == [], "there is no second one"
        await kv.put("b", b"1")
        async for entry in watch:
            assert isinstance(entry, Entry)
            assert entry.key == "b"
            break
        with pytest.raises(RuntimeError, match="already being read"):
            watch.batches()
        await watch.close()
        await watch.close()
        with pytest.raises(StopAsyncIteration):
            await watch.__anext__()


async def test_batches(url: str) -> None:
    """The same as frames: markers and reserved keys left out where the entries are."""

    async with watched_bucket(url, "cols", history=2) as kv:
        messages: list[Any] = [(f"$KV.cols.k{i}", b"x", None) for i in range(1000)]
        messages += [("$KV.cols._kv.x", b"x", None), ("$KV.cols.k0", b"", {"KV-Operation": "DEL"})]
        await asyncio.to_thread(publish, url, messages)
        async with kv.watch(include_history=True, ignore_deletes=True) as watch:
            revisions: list[int] = []
            async for frames in watch.batches():
                if frames is None:
                    break
                assert len(frames)
                revisions += frames.stream_seq.tolist()
            assert revisions == list(range(1, 1001))


async def test_first_read_cancelled_leaves_nothing(url: str) -> None:
    async with watched_bucket(url, "cancel") as kv:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(kv.watch("x", updates_only=True).__anext__(), 0)


async def test_read_cancelled_loses_nothing(url: str) -> None:
    """A reader with a deadline reads on after it: the deadline does not end the watch."""
    async with watched_bucket(url, "patient", history=5) as kv:
        await kv.put("k", b"")
        async with kv.watch() as watch:

            async def cancelled(turns: int) -> None:
                reading = asyncio.ensure_future(watch.__anext__())
                for _ in range(turns):
                    await asyncio.sleep(0)
                assert reading.cancel(), "there was nothing to read yet"
                with pytest.raises(asyncio.CancelledError):
                    await reading

            await cancelled(1)
            assert await take(watch, 2) == [("k", 1, "PUT"), None]
            for turns in range(10):
                await cancelled(turns)
                await kv.put("k", b"")
                assert await take(watch, 1) == [("k", turns + 2, "PUT")]


async def test_watch_closed_while_read_elsewhere(url: str) -> None:
    async with watched_bucket(url, "elsewhere") as kv:
        watch = kv.watch()
        await watch.initial()
        readers = [asyncio.ensure_future(anext(watch, "end")) for _ in range(2)]
        await asyncio.sleep(0)
        await watch.close()
        assert await asyncio.gather(*readers) == ["end", "end"]


async def test_future_revision_survives_reconnect(url: str) -> None:
    async with watched_bucket(url, "far", history=9) as kv:
        await kv.put("a", b"1")
        async with kv.watch(resume_from_revision=5, heartbeat=FAST) as watch:
            assert await take(watch, 1) == [None]
            waiting = asyncio.ensure_future(watch.__anext__())
            while watch.reader is None or not watch.reader.cursor.rebuilds:
                kv.jetstream.connection.reconnect()
                await kv.jetstream.connection.wait_connected(5)
                await asyncio.wait({waiting}, timeout=0.1)
                assert not waiting.done() or waiting.result()
            for _ in range(5):
                await kv.put("a", b"2")
            entry = await asyncio.wait_for(waiting, 60)
            assert entry is not None
            assert (entry.revision, entry.key) == (5, "a")
            assert await take(watch, 1) == [("a", 6, "PUT")]


async def test_watches_many_on_one_connection(url: str) -> None:
    async with watched_bucket(url, "many") as kv:
        for i in range(20):
            await kv.put(f"k{i}", b"1")

        async def follow(i: int) -> list[tuple[str, int, str] | None]:
            async with kv.watch(f"k{i}") as watch:
                found = await take(watch, 2)
                await kv.put(f"k{i}", b"2")
                return found + await take(watch, 1)

        found = await asyncio.gather(*(follow(i) for i in range(20)))
        for i, (initial, signal, update) in enumerate(found):
            assert (initial, signal) == ((f"k{i}", i + 1, "PUT"), None)
            assert update is not None
            assert update[0] == f"k{i}"


@pytest.mark.parametrize("replaced", [False, True])
async def test_bucket_deleted_or_replaced(url: str, replaced: bool) -> None:
    name = f"deleted{replaced}"
    create_bucket(url, name)

    async with opened(url, name) as kv:
        await kv.put("a", b"1")
        async with kv.watch(heartbeat=FAST) as watch:
            await watch.initial()
            await KeyValue.delete_bucket(kv.jetstream, name)
            if replaced:
                await asyncio.to_thread(create_bucket, url, name)
            error = DataLossError if replaced else StreamNotFoundError
            for _ in range(2):
                with pytest.raises(
                    error, match="was deleted and re-created" if replaced else "not found"
                ):
                    await asyncio.wait_for(watch.__anext__(), 60)
    if replaced:
        assert consumers(url, name) == []


@pytest.mark.parametrize("start", ["include_history", "updates_only"])
async def test_bucket_rolled_back_and_grown_again(url: str, start: str) -> None:
    """An older backup: the revisions that it lacks are written again while the watch is idle."""
    name = f"grown_{start}"
    options: dict[str, Any] = {start: True}

    create_bucket(url, name, 64)  # in files: older servers back up no other storage
    async with opened(url, name) as kv:
        put_many(url, name, ((f"k{i}", b"1") for i in range(10)))
        restore = back_up(url, f"KV_{name}")
        put_many(url, name, ((f"k{i}", b"2") for i in range(10)))
        async with kv.watch(heartbeat=FAST, **options) as watch:
            assert len(await watch.initial()) == (0 if start == "updates_only" else 20)

            def roll_back() -> None:
                restore()
                put_many(url, name, ((f"n{i}", b"3") for i in range(15)))

            waiting = asyncio.ensure_future(watch.__anext__())
            await wait_until_async(lambda: consumers(url, name), "a consumer")
            await asyncio.to_thread(roll_back)
            with pytest.raises(DataLossError, match="rolled back during the read: sequence 20 "):
                await asyncio.wait_for(waiting, 60)


@pytest.mark.parametrize("history", [1, 3])
async def test_dump_under_writes_has_every_key(url: str, history: int) -> None:
    """Keys are overwritten between the start and their turn: their entries are delivered later."""
    count = 2000
    name = f"steady{history}"

    async with watched_bucket(url, name, history) as kv:
        publisher = kv.jetstream.connection.service(Publisher)
        names = [f"$KV.{name}.k{i}" for i in range(count)]
        await asyncio.gather(*[await publisher.send(subject, b"1") for subject in names])
        stop = False
        written = 0

        async def write() -> None:
            nonlocal written
            while not stop:
                for subject in names[::-7]:
                    await publisher.publish(subject, b"2")
                    written += 1

        writers = [asyncio.create_task(write()) for _ in range(4)]
        try:
            for _ in range(4):
                before = written
                async with kv.watch() as watch:
                    entries = await asyncio.wait_for(watch.initial(), 60)
                assert written > before, "somebody wrote meanwhile"
                assert {entry.key for entry in entries} == {f"k{i}" for i in range(count)}
                revisions = [entry.revision for entry in entries]
                assert revisions == sorted(set(revisions))
        finally:
            stop = True
            await asyncio.gather(*writers)


def in_small_steps(watch: Watch, rows: int = 10) -> None:
    """Let the watch read as where there are many keys."""
    assert watch.reader is not None
    watch.reader.intake._batcher = Batcher(rows, 1 << 20)


@pytest.mark.parametrize("history", [1, 3])
async def test_signal_waits_for_overtaken_keys(url: str, history: int) -> None:
    """Overwritten after the start, before their turn: they come after what was last then."""
    async with watched_bucket(url, f"overtaken{history}", history) as kv:
        for i in range(100):
            await kv.put(f"k{i}", b"1")
        async with kv.watch() as watch:
            in_small_steps(watch)
            for i in range(20):
                await kv.put(f"k{i}", b"2")
            entries = await watch.initial()
            assert [(entry.key, entry.revision) for entry in entries] == [
                *((f"k{i}", i + 1) for i in range(20, 100)),
                *((f"k{i}", i + 101) for i in range(20)),
            ]


@pytest.mark.parametrize("meta_only", [False, True])
async def test_overtaken_key_is_sent_once_before_signal(
    url: str, monkeypatch: pytest.MonkeyPatch, meta_only: bool
) -> None:
    """Where waiting does not help: the leader has it, and it is sent ahead of its turn."""
    monkeypatch.setattr(module, "_CATCH_UPS", 0)

    async with watched_bucket(url, f"outrun{meta_only}") as kv:
        for i in range(100):
            await kv.put(f"k{i}", b"1")
        async with kv.watch(meta_only=meta_only) as watch:
            in_small_steps(watch)
            for i in range(20):
                await kv.put(f"k{i}", b"22")
            await kv.delete("k3")
            initial = [(e.key, e.revision, e.operation) for e in await watch.initial()]
            assert initial[:80] == [(f"k{i}", i + 1, "PUT") for i in range(20, 100)]
            overtaken = {(f"k{i}", i + 101, "PUT") for i in range(20)} - {("k3", 104, "PUT")}
            assert set(initial[80:]) == overtaken | {("k3", 121, "DEL")}
            assert len(initial) == 100
            await kv.put("end", b"")
            assert await take(watch, 1) == [("end", 122, "PUT")], "nothing comes twice"


async def test_signal_of_watch_from_revision_does_not_wait_for_new_entries(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CATCH_UPS", 0)
    async with watched_bucket(url, "onward") as kv:
        for i in range(5):
            await kv.put(f"k{i}", b"1")
        async with kv.watch(resume_from_revision=2) as watch:
            in_small_steps(watch, 1)
            await kv.put("k0", b"2")
            assert [entry.revision for entry in await watch.initial()] == [2, 3, 4, 5]
            assert await take(watch, 1) == [("k0", 6, "PUT")]
