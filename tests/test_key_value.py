"""Key-value buckets against a real server (ADR-8), with read-after-write (ADR-53)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from buckets import api, create_bucket, flushed, publish, put, server_version
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from proxy import Proxy
from topology import HubAndLeaf, hub_and_leaf

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    ApiError,
    BucketExistsError,
    BucketNotFoundError,
    ConfigurationError,
    InvalidNameError,
    KeyDeletedError,
    KeyExistsError,
    KeyNotFoundError,
    MessageTooLargeError,
    MinLastSequenceError,
    ProtocolError,
    ServerTooOldError,
    StreamFullError,
    TtlNotSupportedError,
    UnsupportedStreamError,
    WrongLastSequenceError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.connection import Connection, ConnectionSettings
from nats_stream_source.jetstream.key_value import KeyValue, ReadOnlyKeyValue
from nats_stream_source.jetstream.kv_config import KeyValueConfig, Republish, Upstream
from nats_stream_source.jetstream.publish import Publisher
from nats_stream_source.jetstream.subjects import api_prefix

pytestmark = pytest.mark.servers

Work = Callable[[KeyValue], Coroutine[Any, Any, None]]


@asynccontextmanager
async def jetstream(url: str, **more: Any) -> AsyncIterator[JetStream]:
    connection = await Connection.open(ConnectionSettings(servers=(url,), **more))
    try:
        yield JetStream(connection)
    finally:
        await connection.close()


def with_bucket(url: str, work: Work, config: KeyValueConfig) -> None:
    """Run ``work`` with a new bucket."""

    async def whole() -> None:
        async with jetstream(url) as js:
            await work(await KeyValue.create_bucket(js, config))

    asyncio.run(whole())


async def until(condition: Callable[[], Coroutine[Any, Any, bool]], seconds: float = 60) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not await condition():
        assert loop.time() < deadline, "the condition did not come true"
        await asyncio.sleep(0.01)


def has_ttl(kv: KeyValue) -> bool:
    """Whether the server has TTLs on single messages."""
    version = kv.jetstream.connection.client.connected_server_version
    return (version.major, version.minor) >= (2, 11)


# -- buckets --------------------------------------------------------------------------------------


def test_the_servers_configuration_is_the_documents(shared_server: NatsServer) -> None:
    async def work(kv: KeyValue) -> None:
        status = await kv.status()
        config = status.stream_info["config"]
        wanted = KeyValueConfig("made", history=5).stream_config()
        assert {name: config.get(name) for name in wanted if name != "description"} == {
            name: value for name, value in wanted.items() if name != "description"
        }
        assert status.config == KeyValueConfig("made", history=5)
        assert status.config.stream_config() == wanted
        assert (status.bucket, status.history, status.values) == ("made", 5, 0)
        assert (status.ttl, status.backing_store) == (None, "JetStream")

    with_bucket(shared_server.url, work, KeyValueConfig("made", history=5))


PROPERTIES = [
    KeyValueConfig(
        "p1",
        description="all of it",
        history=3,
        ttl=60,
        max_value_size=1000,
        max_bytes=100_000,
        storage="memory",
        compression=False,
        metadata={"who": "me"},
    ),
    KeyValueConfig("p2", compression=True, ttl=600),
    KeyValueConfig("p3", republish=Republish("$KV.p3.>", "copy.>", headers_only=True)),
]


@pytest.mark.parametrize("config", PROPERTIES)
def test_properties_on_the_server(shared_server: NatsServer, config: KeyValueConfig) -> None:
    async def work(kv: KeyValue) -> None:
        assert (await kv.status()).config == config

    with_bucket(shared_server.url, work, config)


def test_create_twice_open_update_delete(shared_server: NatsServer) -> None:
    async def whole() -> None:
        async with jetstream(shared_server.url) as js:
            config = KeyValueConfig("life", history=2)
            with pytest.raises(BucketNotFoundError, match="'life' does not exist"):
                await KeyValue.open(js, "life")
            await (await KeyValue.create_bucket(js, config)).put("a", b"1")
            again = await KeyValue.create_bucket(js, config)
            assert (await again.get("a")).value == b"1"
            with pytest.raises(BucketExistsError, match="update_bucket"):
                await KeyValue.create_bucket(js, KeyValueConfig("life", history=3))
            await KeyValue.update_bucket(js, KeyValueConfig("life", history=3))
            opened = await KeyValue.open(js, "life")
            assert opened.bucket.history == 3
            assert (await opened.get("a")).value == b"1"
            await KeyValue.delete_bucket(js, "life")
            for gone in (
                opened.status(),
                opened.keys(),
                opened.history("a"),
                KeyValue.delete_bucket(js, "life"),
                KeyValue.update_bucket(js, config),
            ):
                with pytest.raises(ApiError, match=r"not found|does not exist"):
                    await gone

    asyncio.run(whole())


def test_an_update_ends_what_it_leaves_out(shared_server: NatsServer) -> None:
    new = server_version(shared_server.url) >= (2, 11)
    full = KeyValueConfig(
        "less",
        compression=True,
        metadata={"a": "b"},
        republish=Republish("$KV.less.>", "less.>"),
        sources=[Upstream("other")],
        limit_marker_ttl=2 if new else None,
    )

    async def work(kv: KeyValue) -> None:
        assert (await kv.status()).config.stream_config() == full.stream_config()
        less = KeyValueConfig("less", history=3)
        await KeyValue.update_bucket(kv.jetstream, less)
        assert (await kv.status()).config == less

    with_bucket(shared_server.url, work, full)


def test_what_is_no_bucket(shared_server: NatsServer) -> None:
    api(shared_server.url, "STREAM.CREATE.KV_x1", {"name": "KV_x1", "subjects": ["x1.>"]})

    async def whole() -> None:
        async with jetstream(shared_server.url) as js:
            with pytest.raises(UnsupportedStreamError, match="is no bucket"):
                await KeyValue.open(js, "x1")
            with pytest.raises(InvalidNameError):
                await KeyValue.open(js, "a.b")
            with pytest.raises(InvalidNameError):
                await KeyValue.delete_bucket(js, "*")

    asyncio.run(whole())


# -- reading and writing --------------------------------------------------------------------------


def test_put_get_delete_purge(shared_server: NatsServer) -> None:
    async def work(kv: KeyValue) -> None:
        assert await kv.put("auth.username", b"bob") == 1
        entry = await kv.get("auth.username")
        assert (entry.bucket, entry.key, entry.value) == ("basic", "auth.username", b"bob")
        assert (entry.revision, entry.delta, entry.operation) == (1, 0, "PUT")
        assert entry.created.tzinfo is not None
        assert entry.headers is None
        assert await kv.put("auth.username", b"alice") == 2
        assert (await kv.get("auth.username")).value == b"alice"
        assert (await kv.get_revision("auth.username", 1)).value == b"bob"
        assert await kv.delete("auth.username") == 3
        with pytest.raises(KeyDeletedError, match="DEL at revision 3") as caught:
            await kv.get("auth.username")
        assert (caught.value.revision, caught.value.operation) == (3, "DEL")
        with pytest.raises(KeyDeletedError):
            await kv.get_revision("auth.username", 3)
        history = await kv.history("auth.username")
        assert [(e.value, e.revision, e.delta, e.operation) for e in history] == [
            (b"bob", 1, 2, "PUT"),
            (b"alice", 2, 1, "PUT"),
            (b"", 3, 0, "DEL"),
        ]
        assert await kv.purge("auth.username") == 4
        (only,) = await kv.history("auth.username")
        assert (only.revision, only.operation, only.delta) == (4, "PURGE", 0)
        with pytest.raises(KeyNotFoundError, match="no revision 2"):
            await kv.get_revision("auth.username", 2)
        # What is sent is what the document says.
        headers = only.headers
        assert headers is not None
        assert headers.get("KV-Operation") == "PURGE"
        assert headers.get("Nats-Rollup") == "sub"
        assert history[2].headers is not None
        assert history[2].headers.fields == (("KV-Operation", "DEL"),)

    with_bucket(shared_server.url, work, KeyValueConfig("basic", history=10))


def test_keys_that_are_not_there(shared_server: NatsServer) -> None:
    async def work(kv: KeyValue) -> None:
        for missing in (kv.get("a"), kv.history("a"), kv.get_revision("a", 1)):
            with pytest.raises(KeyNotFoundError, match="'a'"):
                await missing
        assert await kv.keys() == []
        first = await kv.put("a", b"1")
        await kv.put("b", b"2")
        with pytest.raises(KeyNotFoundError, match="another key's"):
            await kv.get_revision("b", first)
        with pytest.raises(ConfigurationError, match="begin at 1"):
            await kv.get_revision("b", 0)

    with_bucket(shared_server.url, work, KeyValueConfig("missing"))


def test_names_are_checked_in_every_call(shared_server: NatsServer) -> None:
    async def work(kv: KeyValue) -> None:
        for name in ("", ".a", "a.", "a..b", "a b", "a*", "*", ">", "a.>"):
            for call in (
                kv.get(name),
                kv.get_revision(name, 1),
                kv.history(name),
                kv.put(name, b""),
                kv.create(name, b""),
                kv.update(name, b"", 1),
                kv.delete(name),
                kv.purge(name),
            ):
                with pytest.raises(InvalidNameError):
                    await call
        with pytest.raises(InvalidNameError):
            await kv.keys("a.>.b")
        with pytest.raises(ConfigurationError, match="overlap"):
            await kv.keys("a.*", "a.b")
        assert (await kv.status()).last_revision == 0, "nothing was written"

    with_bucket(shared_server.url, work, KeyValueConfig("names"))


def test_reserved_keys_are_left_alone(shared_server: NatsServer) -> None:
    """``_kv…`` is read where it is asked for by name, not listed, and never written."""

    async def work(kv: KeyValue) -> None:
        for name in ("_kv", "_kv.x", "_kvx"):
            for call in (
                kv.put(name, b""),
                kv.create(name, b""),
                kv.update(name, b"", 1),
                kv.delete(name),
                kv.purge(name),
            ):
                with pytest.raises(InvalidNameError, match="reserved"):
                    await call
        put(shared_server.url, "own", "_kv.x", b"internal")
        publish(shared_server.url, [("$KV.own._kv.y", b"", {"KV-Operation": "DEL"})])
        await kv.put("a._kv", b"1")
        assert await kv.keys() == ["a._kv"]
        assert (await kv.get("_kv.x")).value == b"internal"
        assert await kv.keys("_kv.>") == ["_kv.x"]
        async with kv.watch() as watch:
            assert [entry.key for entry in await watch.initial()] == ["a._kv"]
        assert await kv.purge_deletes(0) == 0

    with_bucket(shared_server.url, work, KeyValueConfig("own"))


def test_update_needs_the_revision(shared_server: NatsServer) -> None:
    async def work(kv: KeyValue) -> None:
        first = await kv.update("a", b"1", 0)
        await kv.put("other", b"")
        assert await kv.update("a", b"2", first) == 3
        with pytest.raises(WrongLastSequenceError, match="wrong last sequence: 3") as caught:
            await kv.update("a", b"3", first)
        assert caught.value.last_seq == 3
        assert (caught.value.code, caught.value.err_code) == (400, 10071)
        for conditional in (kv.delete("a", revision=1), kv.purge("a", revision=1)):
            with pytest.raises(WrongLastSequenceError):
                await conditional
        assert (await kv.get("a")).value == b"2"
        assert await kv.delete("a", revision=3) == 4
        assert await kv.purge("a", revision=4) == 5

    with_bucket(shared_server.url, work, KeyValueConfig("cas", history=3))


def test_create(shared_server: NatsServer) -> None:
    async def work(kv: KeyValue) -> None:
        assert await kv.create("a", b"1") == 1
        with pytest.raises(KeyExistsError, match="at revision 1") as caught:
            await kv.create("a", b"2")
        assert caught.value.last_seq == 1
        await kv.delete("a")
        assert await kv.create("a", b"3") == 3
        await kv.purge("a")
        assert await kv.create("a", b"4") == 5
        assert (await kv.get("a")).value == b"4"
        # The subject purged: 0 is right again.
        await kv.jetstream.call("STREAM.PURGE.KV_create", {"filter": "$KV.create.a"})
        assert await kv.create("a", b"5") == 6

    with_bucket(shared_server.url, work, KeyValueConfig("create", history=3))


@pytest.mark.parametrize("numbered", [True, False])
def test_create_with_and_without_the_sequence_in_the_refusal(
    nats_server: NatsServer, numbered: bool
) -> None:
    """ADR-53: ``wrong last sequence: 5`` and ``wrong last sequence``."""
    create_bucket(nats_server.url, "b", history=3)
    refusals = []

    def verdict(frame: bytes) -> bool | bytes:
        if b"wrong last sequence: " not in frame:
            return True
        refusals.append(frame)
        if numbered:
            return frame
        line, rest = frame.split(b"\r\n", 1)
        head, size = line.rsplit(b" ", 1)
        payload = rest[: int(size)].replace(b"wrong last sequence: 2", b"wrong last sequence")
        return head + b" %d\r\n" % len(payload) + payload + b"\r\n"

    with Proxy(nats_server.port, verdict) as proxy:

        async def whole() -> None:
            async with jetstream(proxy.url) as js:
                kv = await KeyValue.open(js, "b")
                await kv.put("a", b"1")
                await kv.delete("a")
                asked = len(proxy.seen)
                assert await kv.create("a", b"2") == 3
                # Where the refusal has the sequence, the look that follows waits for it.
                waited = any(b'"first_seq"' in frame for frame in proxy.seen[asked:])
                assert waited is numbered
                with pytest.raises(KeyExistsError, match="revision 3"):
                    await kv.create("a", b"3")

        asyncio.run(whole())
    assert len(refusals) == 2


def test_creators_that_race(shared_server: NatsServer) -> None:
    async def work(kv: KeyValue) -> None:
        await kv.put("a", b"old")
        await kv.delete("a")
        outcomes = await asyncio.gather(
            *(kv.create("a", b"%d" % i) for i in range(20)), return_exceptions=True
        )
        (revision,) = [outcome for outcome in outcomes if isinstance(outcome, int)]
        assert all(isinstance(o, KeyExistsError) for o in outcomes if not isinstance(o, int))
        assert (await kv.get("a", min_last_revision=revision)).revision == revision

    with_bucket(shared_server.url, work, KeyValueConfig("race"))


def test_a_repeated_put_with_a_message_id(shared_server: NatsServer) -> None:
    async def work(kv: KeyValue) -> None:
        assert await kv.put("a", b"1", msg_id="x") == 1
        assert await kv.put("a", b"1", msg_id="x") == 1
        assert (await kv.status()).values == 1

    with_bucket(shared_server.url, work, KeyValueConfig("dup", history=5))


def test_limits(shared_server: NatsServer) -> None:
    async def work(kv: KeyValue) -> None:
        with pytest.raises(MessageTooLargeError, match="10054"):
            await kv.put("a", b"x" * 5001)
        await kv.put("k0", b"x" * 4000)
        await kv.put("k1", b"x" * 4000)
        with pytest.raises(StreamFullError, match="10077"):
            await kv.put("k2", b"x" * 4000)
        assert sorted(await kv.keys()) == ["k0", "k1"], "nobody's key made room"

    config = KeyValueConfig("limits", max_value_size=5000, max_bytes=10_000, storage="memory")
    with_bucket(shared_server.url, work, config)


def test_gets_without_direct_get(shared_server: NatsServer) -> None:
    create_bucket(shared_server.url, "leader", history=3, allow_direct=False)

    async def whole() -> None:
        async with jetstream(shared_server.url) as js:
            kv = await KeyValue.open(js, "leader")
            await kv.put("a", b"1")
            revision = await kv.put("a", b"2")
            assert (await kv.get("a", min_last_revision=revision)).value == b"2"
            assert (await kv.get_revision("a", 1)).value == b"1"
            with pytest.raises(KeyNotFoundError):
                await kv.get("b")

    asyncio.run(whole())


# -- read-after-write (ADR-53) --------------------------------------------------------------------


def test_min_last_revision_that_is_too_high_and_then_reached(shared_server: NatsServer) -> None:
    """The document's own test: 412, then the write that reaches it, then the same read again."""

    async def whole() -> None:
        async with jetstream(shared_server.url, request_timeout=0.5) as js:
            kv = await KeyValue.create_bucket(js, KeyValueConfig("raw", history=5))
            last = await kv.put("a", b"1")
            reads: list[Callable[[int], Coroutine[Any, Any, Any]]] = [
                lambda least: kv.get("a", min_last_revision=least),
                lambda least: kv.get_revision("a", 1, min_last_revision=least),
                lambda least: kv.history("a", min_last_revision=least),
                lambda least: kv.keys(min_last_revision=least),
                lambda least: kv.watch(min_last_revision=least).initial(),
            ]
            for read in reads:
                with pytest.raises(MinLastSequenceError, match="412, 10180"):
                    await read(last + 1)
                last = await kv.put("a", b"2")
                assert await read(last)

    asyncio.run(whole())


def test_every_write_returns_a_revision_that_reads_accept(shared_server: NatsServer) -> None:
    async def work(kv: KeyValue) -> None:
        created = await kv.create("a", b"1")
        put_ = await kv.put("a", b"2")
        updated = await kv.update("a", b"3", put_)
        deleted = await kv.delete("a")
        purged = await kv.purge("a")
        assert [created, put_, updated, deleted, purged] == [1, 2, 3, 4, 5]
        assert await kv.keys(min_last_revision=purged) == []
        assert len(await kv.history("a", min_last_revision=purged)) == 1

    with_bucket(shared_server.url, work, KeyValueConfig("revisions", history=5))


# -- keys, history, purge_deletes -----------------------------------------------------------------


@pytest.mark.parametrize("history", [1, 3])
def test_keys(shared_server: NatsServer, history: int) -> None:
    async def work(kv: KeyValue) -> None:
        for key in ("a.x", "a.y", "b.x", "b.y.z", "c"):
            await kv.put(key, b"1")
            await kv.put(key, b"2")
        await kv.delete("a.y")
        await kv.purge("c")
        assert sorted(await kv.keys()) == ["a.x", "b.x", "b.y.z"]
        assert sorted(await kv.keys("a.>", "b.*")) == ["a.x", "b.x"]
        assert await kv.keys("nothing.*") == []
        assert await kv.keys("a.y") == []

    with_bucket(shared_server.url, work, KeyValueConfig(f"keys{history}", history=history))


@pytest.mark.parametrize("history", [1, 2])
def test_keys_are_complete_though_they_are_overwritten_meanwhile(
    nats_server: NatsServer, history: int
) -> None:
    """All keys get a new revision between the look at the stream's end and the read."""
    names = [f"k{i}" for i in range(300)]
    create_bucket(nats_server.url, "b", history=history)
    publish(nats_server.url, [(f"$KV.b.{name}", b"1", None) for name in names])
    overwritten = []

    class Overwriting(JetStream):
        async def stream_info(self, stream: str) -> Any:
            info = await super().stream_info(stream)
            if not overwritten:
                publisher = self.connection.companion(Publisher)
                for _ in range(history):
                    futures = [
                        await publisher.send(f"$KV.b.{name}", b"2", headers={"X": "y"})
                        for name in names
                    ]
                    overwritten.extend(await asyncio.gather(*futures))
                await publisher.publish("$KV.b.k0", b"", headers={"KV-Operation": "DEL"})
            return info

    async def whole() -> list[str]:
        async with jetstream(nats_server.url) as js:
            kv = await KeyValue.open(js, "b")
            kv.jetstream = Overwriting(js.connection)
            return await kv.keys()

    assert sorted(asyncio.run(whole())) == sorted(names[1:])
    assert len(overwritten) == 300 * history


def test_history_of_one_key_among_many(shared_server: NatsServer) -> None:
    async def work(kv: KeyValue) -> None:
        for i in range(70):
            await kv.put("a", b"%d" % i)
            await kv.put(f"other{i}", b"")
        entries = await kv.history("a")
        assert [entry.value for entry in entries] == [b"%d" % i for i in range(6, 70)]
        assert [entry.delta for entry in entries] == list(range(63, -1, -1))
        assert await api_consumers(kv) == []

    with_bucket(shared_server.url, work, KeyValueConfig("long", history=64))


def test_history_of_a_key_that_is_overwritten_while_it_is_read(shared_server: NatsServer) -> None:
    """What is read is gone by then, each time: the key is there nevertheless, with its latest."""
    overwritten: list[int] = []

    class Overwritten(KeyValue):
        async def _read(self, *args: Any, **how: Any) -> Any:
            overwritten.append(await self.put("a", b"new"))
            return await super()._read(*args, **how)

    async def work(kv: KeyValue) -> None:
        await kv.put("a", b"old")
        entries = await Overwritten(kv.jetstream, kv.bucket).history("a")
        assert len(overwritten) > 1
        assert [(one.revision, one.delta) for one in entries] == [(overwritten[-1], 0)]
        await kv.jetstream.call("STREAM.PURGE.KV_over")
        with pytest.raises(KeyNotFoundError):
            await kv.history("a")

    with_bucket(shared_server.url, work, KeyValueConfig("over"))


async def api_consumers(kv: KeyValue) -> list[str]:
    answer = await kv.jetstream.call(f"CONSUMER.NAMES.{kv.bucket.stream}")
    return list(answer.get("consumers") or [])


def test_purge_deletes(shared_server: NatsServer) -> None:
    async def work(kv: KeyValue) -> None:
        for key in ("gone", "back", "live"):
            await kv.put(key, b"1")
            await kv.put(key, b"2")
        await kv.delete("gone")
        await kv.delete("back")
        # Young markers stay, without the history before them.
        assert await kv.purge_deletes() == 2
        assert [entry.operation for entry in await kv.history("gone")] == ["DEL"]
        assert len(await kv.history("live")) == 2
        await kv.put("back", b"3")
        assert await kv.purge_deletes(0) == 1
        with pytest.raises(KeyNotFoundError, match="no entry"):
            await kv.get("gone")
        assert sorted(await kv.keys()) == ["back", "live"]
        assert [entry.value for entry in await kv.history("back")] == [b"", b"3"]

    with_bucket(shared_server.url, work, KeyValueConfig("tidy", history=5))


def test_purge_deletes_spares_a_key_that_is_written_meanwhile(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b", history=5)
    written = []

    class Writing(JetStream):
        async def call(self, subject: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
            if subject.startswith("STREAM.PURGE") and not written:
                written.append(await KeyValue(self, kv.bucket).put("a", b"new"))
            return await super().call(subject, request)

    kv: KeyValue

    async def whole() -> None:
        nonlocal kv
        async with jetstream(nats_server.url) as js:
            kv = await KeyValue.open(js, "b")
            await kv.put("a", b"old")
            await kv.delete("a")
            kv.jetstream = Writing(js.connection)
            assert await kv.purge_deletes(0) == 1
            assert [(e.value, e.revision) for e in await kv.history("a")] == [(b"new", 3)]

    asyncio.run(whole())
    assert written == [3]


def test_a_marker_on_a_wildcard_does_not_purge_the_bucket(shared_server: NatsServer) -> None:
    """Servers store what is published to a wildcard; in a request its name is a filter."""
    url = shared_server.url
    deleted = {"KV-Operation": "DEL"}

    async def work(kv: KeyValue) -> None:
        for key in ("a", "b.c"):
            await kv.put(key, b"1")
        messages = [(f"$KV.wild.{key}", b"", deleted) for key in (">", "*", "b.*")]
        await asyncio.to_thread(publish, url, messages)
        await kv.delete("a")
        if server_version(url) >= (2, 11):
            assert await kv.purge_deletes(0) == 1
            assert await kv.keys() == ["b.c"]
        else:  # it delivers the keys that a wildcard matches twice, out of order
            with pytest.raises(ProtocolError, match="backwards"):
                await kv.purge_deletes(0)
        assert (await kv.get("b.c")).value == b"1"

    with_bucket(url, work, KeyValueConfig("wild", history=3))


def test_what_fails_among_many_purges_stops_them(shared_server: NatsServer) -> None:
    purged = 0

    class Failing(JetStream):
        async def call(self, subject: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
            nonlocal purged
            if subject.startswith("STREAM.PURGE"):
                purged += 1
                if purged == 3:
                    raise ApiError("no", 400, 1)
            return await super().call(subject, request)

    async def work(kv: KeyValue) -> None:
        for i in range(600):
            await kv.delete(f"k{i}")
        kv.jetstream = Failing(kv.jetstream.connection)
        before = asyncio.all_tasks()
        with pytest.raises(ApiError, match="no"):
            await kv.purge_deletes(0)
        assert asyncio.all_tasks() == before
        assert 3 <= purged < 600

    with_bucket(shared_server.url, work, KeyValueConfig("purges"))


# -- TTLs and markers of the server ---------------------------------------------------------------


def test_ttl_of_the_bucket(shared_server: NatsServer) -> None:
    async def work(kv: KeyValue) -> None:
        await kv.put("a", b"1")
        assert await kv.keys() == ["a"]

        async def expired() -> bool:
            return await kv.keys() == []

        await until(expired)
        with pytest.raises(KeyNotFoundError):
            await kv.get("a")

    with_bucket(shared_server.url, work, KeyValueConfig("aging", ttl=0.5))


def test_ttl_of_an_entry_and_its_marker(shared_server: NatsServer) -> None:
    """A value that expires leaves a marker, which get, history, keys and watch read alike."""

    async def whole() -> None:
        async with jetstream(shared_server.url) as js:
            config = KeyValueConfig("ttl", history=3, limit_marker_ttl=2)
            try:
                kv = await KeyValue.create_bucket(js, config)
            except ServerTooOldError as error:
                assert "2.11" in str(error)  # noqa: PT017
                assert await js.api_level() == 0
                return
            brief = await KeyValue.create_bucket(js, KeyValueConfig("ttl1", limit_marker_ttl=1))
            await brief.put("purge", b"1")
            await brief.purge("purge", ttl=1)
            await kv.put("put", b"1", ttl=2)
            await kv.create("create", b"1", ttl=2)
            await kv.put("stays", b"1")
            assert sorted(await kv.keys()) == ["create", "put", "stays"]
            markers = {}
            async with kv.watch(updates_only=True) as watch:
                async for entry in watch:
                    if entry is not None:
                        markers[entry.key] = entry
                    if len(markers) == 2:
                        break
            assert {key: entry.operation for key, entry in markers.items()} == {
                "put": "PURGE",
                "create": "PURGE",
            }
            headers = markers["put"].headers
            assert headers is not None
            assert headers.get("Nats-Marker-Reason") == "MaxAge"
            assert await kv.keys() == ["stays"]
            with pytest.raises(KeyDeletedError, match="PURGE"):
                await kv.get("put")
            assert [entry.operation for entry in await kv.history("put")] == ["PURGE"]
            # Over a marker of the server's a key can be created again.
            assert await kv.create("put", b"2") > 0

            async def nothing_left() -> bool:
                return (await brief.status()).values == 0

            await until(nothing_left)

    asyncio.run(whole())


REASONS = [("MaxAge", "PURGE"), ("Purge", "PURGE"), ("Remove", "DEL"), ("Other", "PUT")]


def test_marker_reasons_and_unknown_operations(shared_server: NatsServer) -> None:
    messages = [
        (f"$KV.reasons.{reason}", b"x", {"Nats-Marker-Reason": reason}) for reason, _ in REASONS
    ]
    messages.append(("$KV.reasons.Unknown", b"x", {"KV-Operation": "MOVE"}))
    expected = {**dict(REASONS), "Unknown": "PUT"}

    async def work(kv: KeyValue) -> None:
        publish(shared_server.url, messages)
        async with kv.watch() as watch:
            assert {e.key: e.operation for e in await watch.initial()} == expected
        live = [key for key, operation in expected.items() if operation == "PUT"]
        assert sorted(await kv.keys()) == sorted(live)
        for key, operation in expected.items():
            assert [e.operation for e in await kv.history(key)] == [operation]
            if operation == "PUT":
                assert (await kv.get(key)).value == b"x"
            else:
                with pytest.raises(KeyDeletedError, match=operation):
                    await kv.get(key)

    with_bucket(shared_server.url, work, KeyValueConfig("reasons"))


def test_a_ttl_where_the_bucket_has_none(shared_server: NatsServer) -> None:
    async def work(kv: KeyValue) -> None:
        await kv.put("a", b"1")
        for call in (
            kv.put("a", b"", ttl=1),
            kv.create("b", b"", ttl=1),
            kv.update("a", b"", 1, ttl=1),
            kv.purge("a", ttl=1),
        ):
            with pytest.raises(TtlNotSupportedError, match=r"limit_marker_ttl, on a server from"):
                await call
        for wrong in (0, 0.5, 1.5, -1):
            with pytest.raises(ConfigurationError, match="1 second or more"):
                await kv.put("a", b"", ttl=wrong)
        assert (await kv.status()).last_revision == 1

    with_bucket(shared_server.url, work, KeyValueConfig("nottl"))


# -- republish, mirrors, sources, prefixes --------------------------------------------------------


def test_republish(shared_server: NatsServer) -> None:
    async def work(kv: KeyValue) -> None:
        heard = asyncio.get_running_loop().create_future()

        async def hear(message: Any) -> None:
            heard.set_result((message.subject, message.data, message.headers["Nats-Sequence"]))

        client = kv.jetstream.connection.client
        await client.subscribe("said.>", cb=hear)
        await flushed(client)
        revision = await kv.put("a.b", b"1")
        assert await asyncio.wait_for(heard, 60) == ("said.a.b", b"1", str(revision))

    config = KeyValueConfig("republish", republish=Republish("$KV.republish.>", "said.>"))
    with_bucket(shared_server.url, work, config)


def test_a_mirror_reads_and_writes_the_mirrored_bucket(shared_server: NatsServer) -> None:
    async def work(main: KeyValue) -> None:
        await main.put("a", b"1")
        mirror = await KeyValue.create_bucket(
            main.jetstream, KeyValueConfig("copy", history=3, mirror=Upstream("main"))
        )
        revision = await mirror.put("b", b"2")
        assert (await main.get("b", min_last_revision=revision)).value == b"2"
        entry = await mirror.get("b", min_last_revision=revision)
        assert (entry.bucket, entry.key, entry.revision) == ("copy", "b", revision)
        assert sorted(await mirror.keys(min_last_revision=revision)) == ["a", "b"]
        assert [e.value for e in await mirror.history("a")] == [b"1"]
        deleted = await mirror.delete("a")
        created = await mirror.create("a", b"3")
        assert created == deleted + 1
        async with mirror.watch(min_last_revision=created) as watch:
            assert {e.key: e.value for e in await watch.initial()} == {"a": b"3", "b": b"2"}
        with pytest.raises(ConfigurationError, match="mirrors 'main'"):
            await mirror.purge_deletes()
        read_only = mirror.read_only()
        assert type(read_only) is ReadOnlyKeyValue
        assert not hasattr(read_only, "put")
        assert (await read_only.get("a", min_last_revision=created)).value == b"3"

    with_bucket(shared_server.url, work, KeyValueConfig("main", history=3))


def test_sources(shared_server: NatsServer) -> None:
    async def whole() -> None:
        async with jetstream(shared_server.url) as js:
            for name in ("one", "two"):
                kv = await KeyValue.create_bucket(js, KeyValueConfig(name))
                await kv.put(f"from.{name}", name.encode())
                await kv.put("skipped", b"")
            both = await KeyValue.create_bucket(
                js,
                KeyValueConfig(
                    "both", sources=[Upstream("one", keys="from.>"), Upstream("two", keys="from.*")]
                ),
            )
            await both.put("own", b"3")

            async def all_there() -> bool:
                return sorted(await both.keys()) == ["from.one", "from.two", "own"]

            await until(all_there)
            assert (await both.get("from.two")).value == b"two"

    asyncio.run(whole())


def test_a_mirror_and_sources_in_another_domain() -> None:
    """The bucket is at the hub, its replicas at a leaf node."""

    async def whole(both: HubAndLeaf) -> None:
        async with jetstream(both.hub.url) as hub, jetstream(both.leaf.url) as leaf:
            main = await KeyValue.create_bucket(hub, KeyValueConfig("main", history=3))
            assert await main.put("a", b"1") == 1
            upstream = Upstream("main", domain="hub")
            mirror = await KeyValue.create_bucket(
                leaf, KeyValueConfig("copy", history=3, mirror=upstream)
            )
            revision = await mirror.put("b", b"2")
            assert (await main.get("b")).revision == revision == 2
            assert (await mirror.get("b", min_last_revision=revision)).value == b"2"
            await mirror.delete("a")
            created = await mirror.create("a", b"3")
            assert created == 4
            with pytest.raises(KeyExistsError):
                await mirror.create("a", b"4")
            assert sorted(await mirror.keys(min_last_revision=created)) == ["a", "b"]
            assert [e.revision for e in await mirror.history("a")] == [1, 3, 4]
            async with mirror.watch(min_last_revision=created) as watch:
                assert [(e.key, e.value) for e in await watch.initial()] == [
                    ("b", b"2"),
                    ("a", b"3"),
                ]
            for name, keys in (("main", None), ("other", "b")):
                upstream = Upstream("main", domain="hub", keys=keys)
                config = KeyValueConfig(name, sources=[upstream])
                sourced = await KeyValue.create_bucket(leaf, config)
                expected = [keys] if keys else ["a", "b"]

                async def there(kv: KeyValue = sourced, keys: list[str] = expected) -> bool:
                    return sorted(await kv.keys()) == keys

                await until(there)
                assert (await sourced.get("b")).value == b"2"
        async with jetstream(both.hub.url, api_prefix=api_prefix(domain="leaf")) as js:
            mirror = await KeyValue.open(js, "copy")
            revision = await mirror.put("c", b"1")
            assert (await mirror.get("c", min_last_revision=revision)).value == b"1"

    with hub_and_leaf() as both:
        asyncio.run(whole(both))


def test_through_an_api_prefix(tmp_path: Path) -> None:
    """ADR-19: writes go to ``fromA.$KV.…``, through the account's import; so does a mirror's."""
    config = tmp_path / "accounts.conf"
    config.write_text(
        """jetstream: enabled
        accounts: {
          A: { users: [{user: a, password: a}], jetstream: enabled, exports: [
            {service: "$JS.API.>", response_type: stream}, {service: "$KV.>"},
            {service: "$JS.FC.>"}, {stream: "forI.>"} ] }
          I: { users: [{user: i, password: i}], imports: [
            {service: {account: A, subject: "$JS.API.>"}, to: "fromA.>"}
            {service: {account: A, subject: "$KV.>"}, to: "fromA.$KV.>"}
            {service: {account: A, subject: "$JS.FC.>"}}
            {stream: {account: A, subject: "forI.>"}} ] }
        }"""
    )
    with NatsServer(config=config) as server:

        async def whole() -> None:
            url = server.url
            async with (
                jetstream(url, user="a", password="a") as inside,
                jetstream(
                    url, user="i", password="i", api_prefix="fromA", inbox_prefix="forI"
                ) as outside,
            ):
                there = await KeyValue.create_bucket(outside, KeyValueConfig("bin", history=3))
                here = await KeyValue.open(inside, "bin")
                assert (await here.status()).stream_info["config"]["subjects"] == ["$KV.bin.>"]
                revision = await there.put("key", b"1")
                assert (await here.get("key", min_last_revision=revision)).value == b"1"
                assert await there.update("key", b"2", revision) == 2
                assert (await there.get("key", min_last_revision=2)).value == b"2"
                assert await there.keys() == ["key"]
                assert len(await there.history("key")) == 2
                await there.delete("key")
                assert await there.create("key", b"4") == 4
                async with there.watch() as watch:
                    assert [e.value for e in await watch.initial()] == [b"4"]
                    await here.put("key", b"5")
                    entry = await watch.__anext__()
                    assert entry is not None
                    assert (entry.key, entry.value) == ("key", b"5")

        asyncio.run(whole())


# -- a model --------------------------------------------------------------------------------------

_KEYS = st.sampled_from(["a", "b", "c.d"])
_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "create", "update", "stale", "delete", "purge", "purge_deletes"]),
        _KEYS,
    ),
    max_size=25,
)


class Model:
    """A bucket as a dict: of each key the kept revisions, ``(revision, value, operation)``."""

    def __init__(self, history: int) -> None:
        self.history = history
        self.last = 0
        self.kept: dict[str, list[tuple[int, bytes, str]]] = {}

    def write(self, key: str, value: bytes, operation: str) -> int:
        self.last += 1
        before = [] if operation == "PURGE" else self.kept.get(key, [])
        self.kept[key] = [*before, (self.last, value, operation)][-self.history :]
        return self.last

    def revision(self, key: str) -> int:
        return self.kept[key][-1][0] if self.kept.get(key) else 0

    def has(self, key: str) -> bool:
        return bool(self.kept.get(key)) and self.kept[key][-1][2] == "PUT"

    def purge_deletes(self) -> None:
        for key in list(self.kept):
            if not self.has(key):
                del self.kept[key]

    @property
    def keys(self) -> list[str]:
        return sorted(key for key in self.kept if self.has(key))

    @property
    def latest(self) -> list[tuple[str, int, bytes, str]]:
        found = [(key, *kept[-1]) for key, kept in self.kept.items()]
        return sorted(found, key=lambda one: one[1])

    @property
    def everything(self) -> list[tuple[str, int, bytes, str]]:
        found = [(key, *one) for key, kept in self.kept.items() for one in kept]
        return sorted(found, key=lambda one: one[1])


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(history=st.sampled_from([1, 2, 5]), steps=_STEPS)
def test_a_bucket_is_what_the_model_says(
    shared_server: NatsServer, history: int, steps: list[tuple[str, str]]
) -> None:
    async def step(kv: KeyValue, model: Model, what: str, key: str, value: bytes) -> None:
        if what == "put":
            assert await kv.put(key, value) == model.write(key, value, "PUT")
        elif what == "create" and model.has(key):
            with pytest.raises(KeyExistsError):
                await kv.create(key, value)
        elif what == "create":
            assert await kv.create(key, value) == model.write(key, value, "PUT")
        elif what == "update":
            revision = model.revision(key)
            assert await kv.update(key, value, revision) == model.write(key, value, "PUT")
        elif what == "stale":
            with pytest.raises(WrongLastSequenceError):
                await kv.update(key, value, model.revision(key) + 1)
        elif what == "delete":
            assert await kv.delete(key) == model.write(key, b"", "DEL")
        elif what == "purge":
            assert await kv.purge(key) == model.write(key, b"", "PURGE")
        else:
            await kv.purge_deletes(0)
            model.purge_deletes()

    async def whole() -> None:
        async with jetstream(shared_server.url) as js:
            kv = await KeyValue.create_bucket(
                js, KeyValueConfig("model", history=history, storage="memory")
            )
            try:
                model = Model(history)
                for i, (what, key) in enumerate(steps):
                    await step(kv, model, what, key, b"%d" % i)
                last = model.last or None
                for key in ("a", "b", "c.d"):
                    if model.has(key):
                        entry = await kv.get(key, min_last_revision=last)
                        assert (entry.revision, entry.value, "PUT") == model.kept[key][-1]
                    else:
                        with pytest.raises(KeyNotFoundError):
                            await kv.get(key, min_last_revision=last)
                    if key in model.kept:
                        history_ = await kv.history(key)
                        found = [(e.revision, e.value, e.operation) for e in history_]
                        assert found == model.kept[key]
                assert sorted(await kv.keys()) == model.keys
                for include_history, expected in ((False, model.latest), (True, model.everything)):
                    async with kv.watch(include_history=include_history, heartbeat=0.1) as watch:
                        entries = await watch.initial()
                    assert [(e.key, e.revision, e.value, e.operation) for e in entries] == expected
            finally:
                await KeyValue.delete_bucket(js, "model")

    asyncio.run(whole())
