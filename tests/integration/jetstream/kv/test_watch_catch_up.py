"""The end-of-initial-data signal of a watch (ADR-8) under steady writes."""

from __future__ import annotations

import asyncio

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.kv import watch as module
from nats_stream_source.jetstream.publish.publisher import Publisher
from nats_stream_source.wire.consumer.batches import Batcher
from tests.integration.jetstream.kv.watches import take, watched_bucket

pytestmark = pytest.mark.servers


@pytest.mark.parametrize("history", [1, 3])
async def test_dump_under_writes_has_every_key(shared_server: NatsServer, history: int) -> None:
    """Keys are overwritten between the start and their turn: their entries are delivered later."""
    count = 2000
    name = f"steady{history}"

    async with watched_bucket(shared_server.url, name, history) as kv:
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


@pytest.mark.parametrize("history", [1, 3])
async def test_signal_waits_for_overtaken_keys(shared_server: NatsServer, history: int) -> None:
    """Overwritten after the start, before their turn: they come after what was last then."""
    async with watched_bucket(shared_server.url, f"overtaken{history}", history) as kv:
        for i in range(100):
            await kv.put(f"k{i}", b"1")
        async with kv.watch() as watch:
            reader = watch.reader
            assert reader is not None
            # Small steps, as where there are many keys.
            reader._intake._batcher = Batcher(10, 1 << 20)
            for i in range(20):
                await kv.put(f"k{i}", b"2")
            entries = await watch.initial()
            assert [(entry.key, entry.revision) for entry in entries] == [
                *((f"k{i}", i + 1) for i in range(20, 100)),
                *((f"k{i}", i + 101) for i in range(20)),
            ]


@pytest.mark.parametrize("meta_only", [False, True])
async def test_overtaken_key_is_sent_once_before_signal(
    shared_server: NatsServer, monkeypatch: pytest.MonkeyPatch, meta_only: bool
) -> None:
    """Where waiting does not help: the leader has it, and it is sent ahead of its turn."""
    monkeypatch.setattr(module, "_CATCH_UPS", 0)

    async with watched_bucket(shared_server.url, f"outrun{meta_only}") as kv:
        for i in range(100):
            await kv.put(f"k{i}", b"1")
        async with kv.watch(meta_only=meta_only) as watch:
            reader = watch.reader
            assert reader is not None
            reader._intake._batcher = Batcher(10, 1 << 20)
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
