"""Watches under lost frames, cut connections and restarts: every update, and one signal."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ConnectError
from nats_stream_source.jetstream.kv.watch import Watch
from nats_stream_source.wire.consumer import intake
from nats_stream_source.wire.consumer.cursor import Rebuild
from tests.integration.jetstream.kv.stores import opened
from tests.support.nats.buckets import consumers, create_bucket, put, put_many
from tests.support.proxy.fault_proxy import Proxy, Twice, is_delivery, is_status
from tests.support.proxy.verdicts import Share

KEYS, REVISIONS = 400, 3
Found = list[tuple[str, int] | None]


@pytest.fixture
def filled(nats_server: NatsServer) -> NatsServer:
    """A server with the bucket ``b``: 400 keys, 3 revisions of 1 KB each."""
    create_bucket(nats_server.url, "b", history=REVISIONS)
    put_many(nats_server.url, "b", ((f"k{i % KEYS}", b"x" * 1000) for i in range(KEYS * REVISIONS)))
    return nats_server


LATEST: Found = [(f"k{i}", KEYS * (REVISIONS - 1) + i + 1) for i in range(KEYS)]
ALL: Found = [(f"k{i % KEYS}", i + 1) for i in range(KEYS * REVISIONS)]


async def items(watch: Watch, count: int) -> Found:
    found: Found = []
    for _ in range(count):
        entry = await asyncio.wait_for(watch.__anext__(), 60)
        found.append(entry and (entry.key, entry.revision))
    return found


async def until_key(watch: Watch, last: str) -> Found:
    found: Found = []
    while not found or found[-1] is None or found[-1][0] != last:
        found += await items(watch, 1)
    return found


def rebuilds(watch: Watch) -> list[Rebuild]:
    assert watch.reader is not None
    return watch.reader.cursor.rebuilds


@pytest.mark.parametrize("include_history", [False, True])
async def test_lost_deliveries_among_initial_values(
    filled: NatsServer, include_history: bool
) -> None:
    lost = {3, 200, 201, 350}

    def verdict(frame: bytes) -> bool:
        if is_delivery(frame) and b"$KV.b.k" in frame:
            nonlocal delivered
            delivered += 1
            return delivered not in lost
        return True

    delivered = 0
    expected = ALL if include_history else LATEST
    with Proxy(filled.port, verdict) as proxy:
        async with opened(proxy.url, "b") as kv:
            watch = kv.watch(include_history=include_history, heartbeat=0.1)
            async with watch:
                initial = [(entry.key, entry.revision) for entry in await watch.initial()]
                assert initial == expected
                await kv.put("end", b"")
                assert await until_key(watch, "end") == [("end", 1201)]
                assert Rebuild.GAP in rebuilds(watch)
        assert len(proxy.dropped) >= 3
    assert consumers(filled.url, "b") == []


async def test_update_lost(filled: NatsServer) -> None:
    with Proxy(filled.port) as proxy:
        async with opened(proxy.url, "b") as kv, kv.watch(heartbeat=0.1) as watch:
            await watch.initial()
            proxy.verdict = lambda frame: bool(proxy.dropped) or not is_delivery(frame)
            await kv.put("lost", b"")
            await kv.put("end", b"")
            assert await until_key(watch, "end") == [("lost", 1201), ("end", 1202)]
            assert Rebuild.GAP in rebuilds(watch)
        assert len(proxy.dropped) == 1


async def test_last_update_lost(filled: NatsServer) -> None:
    """No later message shows the gap, but a heartbeat does."""
    with Proxy(filled.port) as proxy:
        async with opened(proxy.url, "b") as kv, kv.watch(heartbeat=0.1) as watch:
            await watch.initial()
            proxy.verdict = lambda frame: bool(proxy.dropped) or not is_delivery(frame)
            await kv.put("end", b"")
            assert await until_key(watch, "end") == [("end", 1201)]
            assert Rebuild.GAP in rebuilds(watch)
        assert len(proxy.dropped) == 1


async def test_lost_heartbeats_before_signal(nats_server: NatsServer) -> None:
    """The first heartbeats, which show the end, are lost: a new consumer is created."""
    create_bucket(nats_server.url, "b")
    put(nats_server.url, "b", "a", b"1")
    put(nats_server.url, "b", "b", b"1")

    with Proxy(nats_server.port) as proxy:
        proxy.verdict = lambda frame: not is_status(frame, b"Idle") or len(proxy.dropped) >= 4

        async with opened(proxy.url, "b") as kv:
            await kv.jetstream.call("STREAM.PURGE.KV_b", {"filter": "$KV.b.b"})
            async with kv.watch(heartbeat=0.1) as watch:
                assert [entry.key for entry in await watch.initial()] == ["a"]
                assert Rebuild.MISSED_HEARTBEAT in rebuilds(watch)
                await kv.put("end", b"")
                assert await until_key(watch, "end") == [("end", 3)]
        assert len(proxy.dropped) == 4


class FirstValues:
    """A verdict that lets only the first ``count`` values through, as long as it is to hold."""

    def __init__(self, count: int) -> None:
        self.hold = True
        self._left = count

    def __call__(self, frame: bytes) -> bool:
        if is_delivery(frame):
            self._left -= 1
            return not self.hold or self._left >= 0
        return not (self.hold and is_status(frame, b"Idle"))


@pytest.mark.parametrize("include_history", [False, True])
async def test_connection_cut_within_initial_values(
    filled: NatsServer, include_history: bool
) -> None:
    expected = ALL if include_history else LATEST
    first = FirstValues(100)
    with Proxy(filled.port, first) as proxy:
        async with opened(proxy.url, "b") as kv:
            async with kv.watch(include_history=include_history) as watch:
                found = await items(watch, 100)
                proxy.cut()
                first.hold = False
                found += [(entry.key, entry.revision) for entry in await watch.initial()]
                assert found == expected
                assert Rebuild.RECONNECTED in rebuilds(watch)
            assert kv.jetstream.connection.reconnects == 1
        assert proxy.dropped


async def test_keys_that_change_while_connection_is_lost_among_initial_values(
    filled: NatsServer,
) -> None:
    """The list of last values is requested again: nothing twice, nothing missing, in order."""
    first = FirstValues(100)
    with Proxy(filled.port, first) as proxy:
        async with opened(proxy.url, "b") as kv, kv.watch() as watch:
            found = await items(watch, 100)
            # One key of those that came, one of those that did not; and a new one.
            changed = [("k5", b"2"), ("k300", b"2"), ("new", b"1")]
            await asyncio.to_thread(put_many, filled.url, "b", changed)
            proxy.cut()
            first.hold = False
            found += [(entry.key, entry.revision) for entry in await watch.initial()]
            changes = [("k5", 1201), ("k300", 1202), ("new", 1203)]
            unchanged = [one for one in LATEST if one and one[0] != "k300"]
            assert found == [*unchanged, *changes]


async def test_server_restarts_while_watching(tmp_path: Path) -> None:
    with NatsServer(store=tmp_path) as server:
        create_bucket(server.url, "b", history=2)
        put(server.url, "b", "a", b"1")

        async with opened(server.url, "b") as kv, kv.watch(heartbeat=0.2) as watch:
            assert len(await watch.initial()) == 1
            waiting = asyncio.ensure_future(watch.__anext__())
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            await asyncio.to_thread(put_when_there, server.url)
            entry = await asyncio.wait_for(waiting, 60)
            assert entry is not None
            assert (entry.key, entry.revision) == ("end", 2)
            assert rebuilds(watch), "the consumer was lost with the server"


def put_when_there(url: str) -> None:
    """Put ``end``, once the server that starts has its streams."""
    for attempt in range(100):
        try:
            put(url, "b", "end", b"")
            return
        except Exception:  # whatever nats-py says while nobody answers
            if attempt == 99:
                raise


async def test_server_unavailable_while_watching(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b")

    async with opened(nats_server.url, "b", connect_timeout=1.0, request_timeout=1.0) as kv:
        watch = kv.watch(heartbeat=0.1)
        try:
            await watch.start()
            assert watch.reader is not None
            watch.reader.request = replace(watch.reader.request, attempts=2)
            assert await watch.initial() == []
            waiting = asyncio.ensure_future(watch.__anext__())
            await asyncio.to_thread(nats_server.stop)
            with pytest.raises(ConnectError):
                await asyncio.wait_for(waiting, 60)
        finally:
            await watch.close()


# -- a long list of last messages, which is complete and in order ----------------------------------


MANY = 4000


@pytest.fixture(scope="module")
def bucket(shared_server: NatsServer) -> str:
    """A bucket with a history, so that readers request a list; every third key has two entries."""
    create_bucket(shared_server.url, "long", 3)
    entries = [(f"k{i}", b"old") for i in range(0, MANY, 3)]
    put_many(shared_server.url, "long", entries + [(f"k{i}", b"%d" % i) for i in range(MANY)])
    return "long"


SHARES = {
    "0.4 % lost": Share(0.004, seed=1),
    "1 % lost": Share(0.01, seed=2),
    "1 % doubled": Share(0.01, seed=3, outcome=Twice()),
}


@pytest.mark.parametrize("how", SHARES)
async def test_watch_receives_every_key(shared_server: NatsServer, bucket: str, how: str) -> None:
    fault = SHARES[how]
    with Proxy(shared_server.port, fault) as proxy:
        async with opened(proxy.url, bucket) as kv:
            found: list[tuple[str, bytes, int]] = []
            async with kv.watch() as watch:
                async for entry in watch:
                    if entry is None:
                        break
                    found.append((entry.key, entry.value, entry.revision))
        assert fault.done > 5
        assert len(proxy.created) < 12
        assert set(proxy.created) == set(proxy.deleted)
    assert {key: value for key, value, _ in found} == {f"k{i}": b"%d" % i for i in range(MANY)}
    revisions = [revision for _, _, revision in found]
    assert all(one < other for one, other in itertools.pairwise(revisions)), "in order, once"


async def test_few_rows_may_wait_in_memory(
    shared_server: NatsServer, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a full memory the list is read in several parts, each from its beginning."""
    monkeypatch.setattr(intake, "_MAX_HELD_BYTES", 30_000)
    fault = Share(0.004, seed=4)
    with Proxy(shared_server.port, fault) as proxy:
        async with opened(proxy.url, bucket) as kv:
            keys = await asyncio.wait_for(kv.keys(), 120)
        assert fault.done > 5
    assert sorted(keys) == sorted(f"k{i}" for i in range(MANY))
