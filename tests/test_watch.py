"""Watches (ADR-8): what is sent, in which order, and the end-of-initial-data signal, once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from buckets import consumers, create_bucket, delete, publish, purge, put, put_many

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    BucketNotFoundError,
    ConfigurationError,
    DataLossError,
    InvalidNameError,
    MinLastSequenceError,
    StreamNotFoundError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.connection import Connection, ConnectionSettings
from nats_stream_source.jetstream.entry import Entry
from nats_stream_source.jetstream.key_value import KeyValue
from nats_stream_source.jetstream.publish import Publisher
from nats_stream_source.jetstream.watch import Watch, WatchOptions
from nats_stream_source.wire.batches import Batcher
from nats_stream_source.wire.columns import ack_tokens

pytestmark = pytest.mark.servers

Work = Callable[[KeyValue], Coroutine[Any, Any, None]]
FAST = 0.1  # seconds between heartbeats


@asynccontextmanager
async def opened(url: str, name: str, **more: Any) -> AsyncIterator[KeyValue]:
    connection = await Connection.open(ConnectionSettings(servers=(url,), **more))
    try:
        yield await KeyValue.open(JetStream(connection), name)
    finally:
        await connection.close()


def with_bucket(url: str, name: str, work: Work, history: int = 1) -> None:
    create_bucket(url, name, history, storage="memory")

    async def whole() -> None:
        async with opened(url, name) as kv:
            await work(kv)

    asyncio.run(whole())
    assert consumers(url, name) == [], "a watch leaves no consumer behind"


async def take(watch: Watch, count: int) -> list[tuple[str, int, str] | None]:
    """The next items as (key, revision, operation), the signal as None."""
    found: list[tuple[str, int, str] | None] = []
    while len(found) < count:
        entry = await asyncio.wait_for(watch.__anext__(), 60)
        found.append(entry and (entry.key, entry.revision, entry.operation))
    return found


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
def test_options(
    shared_server: NatsServer,
    request: pytest.FixtureRequest,
    keys: tuple[str, ...],
    options: dict[str, Any],
    expected: list[tuple[str, int, str]],
) -> None:
    """The initial entries, the signal once, then what is written."""
    url = shared_server.url
    name = f"o{abs(hash(request.node.name))}"

    async def work(kv: KeyValue) -> None:
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

    with_bucket(url, name, work, history=5)


@pytest.mark.parametrize("history", [1, 5])
@pytest.mark.parametrize("options", [{}, {"include_history": True}, {"updates_only": True}])
def test_an_empty_bucket(shared_server: NatsServer, history: int, options: dict[str, Any]) -> None:
    name = f"empty{history}{len(options)}{'updates_only' in options}"

    async def work(kv: KeyValue) -> None:
        async with kv.watch(**options) as watch:
            assert await watch.initial() == []
            await kv.put("a", b"1")
            assert await take(watch, 1) == [("a", 1, "PUT")]

    with_bucket(shared_server.url, name, work, history)


def test_a_bucket_whose_messages_are_all_gone(shared_server: NatsServer) -> None:
    async def work(kv: KeyValue) -> None:
        await kv.put("a", b"1")
        await kv.put("b", b"1")
        await kv.jetstream.call("STREAM.PURGE.KV_gone")
        async with kv.watch() as watch:
            assert await watch.initial() == []

    with_bucket(shared_server.url, "gone", work)


def test_the_signal_by_heartbeat_only(shared_server: NatsServer) -> None:
    """The stream's last message is gone, so no message says that this is all."""

    async def work(kv: KeyValue) -> None:
        await kv.put("a", b"1")
        await kv.put("b", b"1")
        await kv.jetstream.call("STREAM.PURGE.KV_beat", {"filter": "$KV.beat.b"})
        async with kv.watch(heartbeat=FAST) as watch:
            assert await take(watch, 2) == [("a", 1, "PUT"), None]
            assert watch.reader is not None
            assert watch.reader.cursor.seen_through == 2

    with_bucket(shared_server.url, "beat", work)


def test_values_and_meta_only(shared_server: NatsServer) -> None:
    async def work(kv: KeyValue) -> None:
        await kv.put("a", b"12345")
        async with kv.watch() as watch:
            (entry,) = await watch.initial()
            assert (entry.value, entry.delta, entry.bucket) == (b"12345", 0, "meta")
        async with kv.watch(meta_only=True) as watch:
            (entry,) = await watch.initial()
            assert entry.value == b""
            assert entry.headers is not None
            assert entry.headers.get("Nats-Msg-Size") == "5"

    with_bucket(shared_server.url, "meta", work)


def test_delta_counts_down(shared_server: NatsServer) -> None:
    async def work(kv: KeyValue) -> None:
        for i in range(5):
            await kv.put("a", b"%d" % i)
        async with kv.watch(include_history=True) as watch:
            assert [entry.delta for entry in await watch.initial()] == [4, 3, 2, 1, 0]

    with_bucket(shared_server.url, "delta", work, history=5)


CONTRADICTIONS: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    ((), {"include_history": True, "updates_only": True}, "exclude each other"),
    ((), {"include_history": True, "resume_from_revision": 1}, "exclude each other"),
    ((), {"updates_only": True, "resume_from_revision": 1}, "exclude each other"),
    ((), {"resume_from_revision": 0}, "begin at 1"),
    ((), {"heartbeat": 0.05}, "shortest"),
    (("a.*", "a.b"), {}, "overlap"),
    ((">", "a"), {}, "overlap"),
]


@pytest.mark.parametrize(("keys", "options", "message"), CONTRADICTIONS)
def test_contradictions(
    shared_server: NatsServer, keys: tuple[str, ...], options: dict[str, Any], message: str
) -> None:
    async def whole() -> None:
        async with opened(shared_server.url, "contra") as kv:
            with pytest.raises(ConfigurationError, match=message):
                kv.watch(*keys, **options)
            for bad in ("a b", ">.a", "a*", "a."):
                with pytest.raises(InvalidNameError):
                    kv.watch(bad)

    with contextlib.suppress(RuntimeError):
        create_bucket(shared_server.url, "contra")
    asyncio.run(whole())


def test_a_bucket_that_is_not_there(shared_server: NatsServer) -> None:
    create_bucket(shared_server.url, "short")

    async def whole() -> None:
        async with opened(shared_server.url, "short", request_timeout=1.0) as kv:
            with pytest.raises(MinLastSequenceError, match="412, 10180"):
                await kv.watch(min_last_revision=1).start()
            await KeyValue.delete_bucket(kv.jetstream, "short")
            for least in (None, 1):
                with pytest.raises(BucketNotFoundError):
                    await kv.watch(min_last_revision=least).initial()

    asyncio.run(whole())


def test_initial_and_then_updates(shared_server: NatsServer) -> None:
    async def work(kv: KeyValue) -> None:
        await kv.put("a", b"1")
        watch = kv.watch_all()
        assert [entry.key for entry in await watch.initial()] == ["a"]
        assert await watch.initial() == [], "there is no second one"
        await kv.put("b", b"1")
        async for entry in watch:
            assert isinstance(entry, Entry)
            assert entry.key == "b"
            break
        with pytest.raises(RuntimeError, match="being read already"):
            watch.batches()
        await watch.close()
        await watch.close()
        with pytest.raises(StopAsyncIteration):
            await watch.__anext__()

    with_bucket(shared_server.url, "then", work)


def test_batches(shared_server: NatsServer) -> None:
    """The same as frames: markers and reserved keys left out where the entries are."""
    url = shared_server.url

    async def work(kv: KeyValue) -> None:
        messages: list[Any] = [(f"$KV.cols.k{i}", b"x", None) for i in range(1000)]
        messages += [("$KV.cols._kv.x", b"x", None), ("$KV.cols.k0", b"", {"KV-Operation": "DEL"})]
        await asyncio.to_thread(publish, url, messages)
        async with kv.watch(include_history=True, ignore_deletes=True) as watch:
            revisions: list[int] = []
            async for frames in watch.batches():
                if frames is None:
                    break
                assert len(frames)
                revisions += ack_tokens(frames).stream_seq.tolist()
            assert revisions == list(range(1, 1001))

    with_bucket(url, "cols", work, history=2)


def test_a_cancelled_reader_leaves_nothing_behind(shared_server: NatsServer) -> None:
    async def work(kv: KeyValue) -> None:
        for options in ({}, {"updates_only": True}):
            async with kv.watch(**options) as watch:
                await watch.initial()
                waiting = asyncio.ensure_future(watch.__anext__())
                await asyncio.sleep(0)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(kv.watch("x", updates_only=True).__anext__(), 0)

    with_bucket(shared_server.url, "cancel", work)


def test_a_read_that_is_cancelled_loses_nothing(shared_server: NatsServer) -> None:
    """Whoever waits with a deadline reads on after it; that is no end of the watch."""

    async def work(kv: KeyValue) -> None:
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

    with_bucket(shared_server.url, "patient", work, history=5)


def test_closing_a_watch_that_is_being_read_elsewhere(shared_server: NatsServer) -> None:
    async def work(kv: KeyValue) -> None:
        watch = kv.watch()
        await watch.initial()
        readers = [asyncio.ensure_future(anext(watch, "end")) for _ in range(2)]
        await asyncio.sleep(0)
        await watch.close()
        assert await asyncio.gather(*readers) == ["end", "end"]

    with_bucket(shared_server.url, "elsewhere", work)


def test_a_revision_far_to_come_outlives_a_reconnect(shared_server: NatsServer) -> None:
    async def work(kv: KeyValue) -> None:
        await kv.put("a", b"1")
        async with kv.watch(resume_from_revision=5, heartbeat=FAST) as watch:
            assert await take(watch, 1) == [None]
            waiting = asyncio.ensure_future(watch.__anext__())
            while watch.reader is None or not watch.reader.cursor.rebuilds:
                kv.jetstream.connection.renew()
                await kv.jetstream.connection.until_connected(5)
                await asyncio.wait({waiting}, timeout=0.1)
                assert not waiting.done() or waiting.result()
            for _ in range(5):
                await kv.put("a", b"2")
            entry = await asyncio.wait_for(waiting, 60)
            assert entry is not None
            assert (entry.revision, entry.key) == (5, "a")
            assert await take(watch, 1) == [("a", 6, "PUT")]

    with_bucket(shared_server.url, "far", work, history=9)


def test_many_watches_on_one_connection(shared_server: NatsServer) -> None:
    async def work(kv: KeyValue) -> None:
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

    with_bucket(shared_server.url, "many", work)


# -- under writes that never pause ----------------------------------------------------------------


@pytest.mark.parametrize("history", [1, 3])
def test_a_dump_under_steady_writes_misses_no_key(shared_server: NatsServer, history: int) -> None:
    """Keys are overwritten between the start and their turn: their entry comes later, but comes."""
    count = 2000
    name = f"steady{history}"

    async def work(kv: KeyValue) -> None:
        publisher = kv.jetstream.connection.companion(Publisher)
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

    with_bucket(shared_server.url, name, work, history)


@pytest.mark.parametrize("history", [1, 3])
def test_the_signal_waits_for_keys_that_were_overtaken(
    shared_server: NatsServer, history: int
) -> None:
    """Overwritten after the start, before their turn: they come after what was last then."""

    async def work(kv: KeyValue) -> None:
        for i in range(100):
            await kv.put(f"k{i}", b"1")
        async with kv.watch() as watch:
            reader = watch.reader
            assert reader is not None
            reader._kept = Batcher(10, 1 << 20)  # small steps, as where there are many keys
            for i in range(20):
                await kv.put(f"k{i}", b"2")
            entries = await watch.initial()
            assert [(entry.key, entry.revision) for entry in entries] == [
                *((f"k{i}", i + 1) for i in range(20, 100)),
                *((f"k{i}", i + 101) for i in range(20)),
            ]

    with_bucket(shared_server.url, f"overtaken{history}", work, history)


@pytest.mark.parametrize(
    ("lasts", "signals_at"),
    [
        ([10], 10),  # nothing was written meanwhile
        ([20, 20], 20),
        ([100, 150, 160, 160], 160),  # the stretches become shorter: until nothing is new
        ([100, 200], 100),  # they do not: the writers are faster
        ([100, 150, 200], 150),
    ],
)
def test_how_long_a_watch_goes_on_catching_up(lasts: list[int], signals_at: int) -> None:
    async def whole() -> None:
        watch = Watch.__new__(Watch)
        watch._reach, watch._bound, watch._stretch, watch._seen = 10, None, 0, []
        answers = iter(lasts)

        async def last() -> int:
            return next(answers)

        watch._last = last  # type: ignore[method-assign]
        through = 10
        while not await watch._caught_up(through):
            through += 1
            assert through <= signals_at
        assert through == signals_at
        assert next(answers, None) is None, "every answer was needed"

    asyncio.run(whole())


@pytest.mark.parametrize("meta_only", [False, True])
def test_a_key_that_was_overtaken_is_sent_before_the_signal_and_once(
    shared_server: NatsServer, meta_only: bool
) -> None:
    """Where waiting does not help: the leader has it, and it is sent ahead of its turn."""

    class Outrun(Watch):
        async def _caught_up(self, through: int) -> bool:
            return True

    async def work(kv: KeyValue) -> None:
        for i in range(100):
            await kv.put(f"k{i}", b"1")
        options = WatchOptions(meta_only=meta_only)
        async with Outrun(kv._link, kv.bucket, options) as watch:
            reader = watch.reader
            assert reader is not None
            reader._kept = Batcher(10, 1 << 20)
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

    with_bucket(shared_server.url, f"outrun{meta_only}", work)


# -- the stream goes away -------------------------------------------------------------------------


def test_the_bucket_is_deleted(shared_server: NatsServer) -> None:
    create_bucket(shared_server.url, "deleted")

    async def whole() -> None:
        async with opened(shared_server.url, "deleted") as kv:
            await kv.put("a", b"1")
            async with kv.watch(heartbeat=FAST) as watch:
                await watch.initial()
                await KeyValue.delete_bucket(kv.jetstream, "deleted")
                with pytest.raises(StreamNotFoundError):
                    await asyncio.wait_for(watch.__anext__(), 60)
                with pytest.raises(StopAsyncIteration):
                    await watch.__anext__()

    asyncio.run(whole())


def test_the_bucket_is_replaced(shared_server: NatsServer) -> None:
    url = shared_server.url

    async def work(kv: KeyValue) -> None:
        await kv.put("a", b"1")
        async with kv.watch(heartbeat=FAST) as watch:
            await watch.initial()
            await KeyValue.delete_bucket(kv.jetstream, "replaced")
            await asyncio.to_thread(create_bucket, url, "replaced")
            with pytest.raises(DataLossError, match="deleted and made again"):
                await asyncio.wait_for(watch.__anext__(), 60)

    with_bucket(url, "replaced", work)


# -- a reader that stays away ---------------------------------------------------------------------


def test_a_watch_that_nobody_reads_is_bounded_and_loses_nothing(nats_server: NatsServer) -> None:
    """Flow control stops the server: what waits here stays far below what there is."""
    count, size = 20_000, 2000  # 40 MB
    create_bucket(nats_server.url, "b", 64, storage="memory")

    async def whole() -> None:
        async with (
            opened(nats_server.url, "b") as kv,
            opened(nats_server.url, "b") as other,
            kv.watch(heartbeat=1.0) as watch,
        ):
            assert await watch.initial() == []
            waiting = asyncio.ensure_future(watch.__anext__())
            publisher = other.jetstream.connection.companion(Publisher)
            futures = []
            for i in range(count):
                future = await publisher.send(f"$KV.b.k{i % 1000}", b"%d" % i + b"x" * size)
                futures.append(future)
            await asyncio.gather(*futures)
            first = await waiting
            assert first is not None
            reader = watch.reader
            assert reader is not None
            inbox = reader._inbox
            assert inbox is not None
            # Nobody has read since the first entry, and the server waits: it says so.
            deadline = asyncio.get_running_loop().time() + 20
            while (await consumer(other))["delivered"]["consumer_seq"] == 0 or not (
                await stands_still(other)
            ):
                assert asyncio.get_running_loop().time() < deadline
            delivered = (await consumer(other))["delivered"]["consumer_seq"]
            assert delivered < count // 4, "the server does not wait"
            assert inbox.nbytes < 8 << 20
            assert inbox.dropped == 0
            revisions = [first.revision]
            while revisions[-1] < count:
                entry = await asyncio.wait_for(watch.__anext__(), 60)
                assert entry is not None
                revisions.append(entry.revision)
            assert revisions == list(range(1, count + 1))
            assert reader.cursor.rebuilds == []

    asyncio.run(whole())


async def consumer(kv: KeyValue) -> dict[str, Any]:
    answer = await kv.jetstream.call("CONSUMER.LIST.KV_b")
    (info,) = answer["consumers"]
    return dict(info)


async def stands_still(kv: KeyValue) -> bool:
    """Whether the consumer delivers nothing for a while."""
    before = (await consumer(kv))["delivered"]["consumer_seq"]
    await asyncio.sleep(0.4)
    return bool((await consumer(kv))["delivered"]["consumer_seq"] == before)
