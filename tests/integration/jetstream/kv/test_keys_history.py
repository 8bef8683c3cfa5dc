"""The keys of a bucket, the history of a key, purged markers and TTLs (ADR-8)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    ApiError,
    ConfigurationError,
    KeyDeletedError,
    KeyNotFoundError,
    ProtocolError,
    ServerTooOldError,
    TtlNotSupportedError,
)
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.kv import requests
from nats_stream_source.jetstream.kv.config import KeyValueConfig
from nats_stream_source.jetstream.kv.store import KeyValue
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.publish.publisher import Publisher
from tests.integration.jetstream.kv.stores import new_bucket
from tests.support.nats.buckets import api, bucket_config, consumers, create_bucket, publish
from tests.support.nats.topology import CONSUMER_LIMITS
from tests.support.proxy.fault_proxy import Proxy
from tests.support.wait import wait_until_async

pytestmark = pytest.mark.servers


@pytest.mark.parametrize("history", [1, 3])
async def test_keys(url: str, history: int) -> None:
    async with new_bucket(url, KeyValueConfig(f"keys{history}", history=history)) as kv:
        for key in ("a.x", "a.y", "b.x", "b.y.z", "c"):
            await kv.put(key, b"1")
            await kv.put(key, b"2")
        await kv.delete("a.y")
        await kv.purge("c")
        assert sorted(await kv.keys()) == ["a.x", "b.x", "b.y.z"]
        assert sorted(await kv.keys("a.>", "b.*")) == ["a.x", "b.x"]
        assert await kv.keys("nothing.*") == []
        assert await kv.keys("a.y") == []


@pytest.mark.parametrize("history", [1, 2])
async def test_keys_are_complete_though_they_are_overwritten_meanwhile(
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
                publisher = self.connection.service(Publisher)
                for _ in range(history):
                    futures = [
                        await publisher.send(f"$KV.b.{name}", b"2", headers={"X": "y"})
                        for name in names
                    ]
                    overwritten.extend(await asyncio.gather(*futures))
                await publisher.publish("$KV.b.k0", b"", headers={"KV-Operation": "DEL"})
            return info

    async with connect(nats_server.url) as js:
        kv = await KeyValue.open(js, "b")
        kv.jetstream = Overwriting(js.connection)
        assert sorted(await kv.keys()) == sorted(names[1:])
    assert len(overwritten) == 300 * history


async def test_reads_without_values_transfer_few_values(
    shared_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above a limit, the end is the stream's last sequence: its request transfers no value."""
    monkeypatch.setattr(requests, "_MAX_VALUE_BYTES", 100_000)
    names = [f"k{i}" for i in range(4)]
    values = [(f"$KV.large.{name}", bytes(200_000), None) for name in names]
    create_bucket(shared_server.url, "large", history=2)
    publish(shared_server.url, [*values, ("$KV.large.other", b"", None)])

    with Proxy(shared_server.port) as proxy:
        async with connect(proxy.url) as js:
            kv = await KeyValue.open(js, "large")
            assert sorted(await kv.keys(*names)) == names
            assert await kv.keys("k1", "none") == ["k1"]
            assert await kv.keys("none") == []
            for keys in (names, ["*"]):
                async with kv.watch(*keys, meta_only=True) as watch:
                    assert [entry.key for entry in await watch.initial()][:4] == names
            assert sum(map(len, proxy.seen)) < 50_000
            assert consumers(shared_server.url, "large") == []


async def test_consumers_of_history_keys_and_watches(shared_server: NatsServer) -> None:
    """ADR-8, "History", "Watch" and "List of known keys": ephemeral, without acknowledgements."""
    create_bucket(shared_server.url, "consumed", history=3)
    publish(shared_server.url, [(f"$KV.consumed.{key}", b"1", None) for key in "aab"])
    lasts = {"deliver_policy": "last_per_subject"}
    first = {"deliver_policy": "by_start_sequence", "opt_start_seq": 1}

    with Proxy(shared_server.port) as proxy:

        def created() -> dict[str, Any]:
            """The configuration of the consumer that delivered, without names and heartbeats."""
            frames = [f for f in proxy.sent if f.startswith(b"PUB $JS.API.CONSUMER.CREATE.")]
            configs = [json.loads(frame.split(b"\r\n")[1])["config"] for frame in frames]
            (config,) = [config for config in configs if "deliver_subject" in config]
            assert (config["ack_policy"], config["flow_control"]) == ("none", True)
            assert "durable_name" not in config
            assert config["inactive_threshold"] > 0
            proxy.sent.clear()
            told = ("deliver_policy", "opt_start_seq", "filter_subject", "headers_only")
            return {name: config[name] for name in told if config.get(name)}

        async with connect(proxy.url) as js:
            kv = await KeyValue.open(js, "consumed")
            assert len(await kv.history("a")) == 2
            history = created()
            assert history.pop("filter_subject") == "$KV.consumed.a"
            assert history == first
            assert sorted(await kv.keys()) == ["a", "b"]
            keys = created()
            assert keys == {**lasts, "filter_subject": "$KV.consumed.>", "headers_only": True}
            for asked, subject in (((), ">"), (("a",), "a")):
                async with kv.watch(*asked) as watch:
                    await watch.initial()
                assert created() == {**lasts, "filter_subject": f"$KV.consumed.{subject}"}
            async with kv.watch(meta_only=True) as watch:
                await watch.initial()
            assert created()["headers_only"] is True
            async with kv.watch(include_history=True) as watch:
                await watch.initial()
            assert created() == first  # the stream has the bucket's subjects only
            assert consumers(shared_server.url, "consumed") == []


async def test_history_of_key_that_is_overwritten_while_it_is_read(
    url: str,
) -> None:
    """The revision is removed before the read: the key is returned with its latest revision."""
    overwritten: list[int] = []

    class Overwritten(KeyValue):
        async def _entries(self, reader: OrderedReader) -> Any:
            overwritten.append(await self.put("a", b"new"))
            return await super()._entries(reader)

    async with new_bucket(url, KeyValueConfig("over")) as kv:
        await kv.put("a", b"old")
        entries = await Overwritten(kv.jetstream, kv.bucket).history("a")
        assert len(overwritten) == 1
        assert [(one.revision, one.delta) for one in entries] == [(overwritten[-1], 0)]
        await kv.jetstream.call("STREAM.PURGE.KV_over")
        with pytest.raises(KeyNotFoundError):
            await kv.history("a")


@pytest.mark.parametrize("limits", CONSUMER_LIMITS, ids=str)
@pytest.mark.parametrize("history", [1, 5])
async def test_bucket_with_consumer_limits_is_read(
    nats_server: NatsServer, limits: dict[str, int], history: int
) -> None:
    create_bucket(nats_server.url, "b", history, consumer_limits=limits)
    async with connect(nats_server.url) as js:
        kv = await KeyValue.open(js, "b")
        revisions = [await kv.put("a", b"1"), await kv.put("b", b"2")]
        assert sorted(await kv.keys()) == ["a", "b"]
        assert [entry.revision for entry in await kv.history("a")] == revisions[:1]
        async with kv.watch("a", "b", meta_only=True) as watch:
            assert [entry.revision for entry in await watch.initial()] == revisions
        await kv.delete("b")
        assert await kv.purge_deletes(0) == 1


@pytest.mark.parametrize("last", ["entry", "other"])
@pytest.mark.parametrize("history", [1, 5])
async def test_messages_of_removed_subject_are_left_out(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture, history: int, last: str
) -> None:
    url, config = nats_server.url, bucket_config("b", history)
    api(url, "STREAM.CREATE.KV_b", {**config, "subjects": [*config["subjects"], "o.>"]})
    messages = [("o.1", b"x", None), ("$KV.b.a", b"1", None), ("$KV.b.b", b"2", None)]
    publish(url, messages if last == "entry" else [*messages, ("o.2", b"x", None)])
    api(url, "STREAM.UPDATE.KV_b", config)
    async with connect(url) as js:
        kv = await KeyValue.open(js, "b")
        assert sorted(await kv.keys()) == ["a", "b"]
        for include_history in (False, True):
            async with kv.watch_all(include_history=include_history) as watch:
                initial = await asyncio.wait_for(watch.initial(), 20)
                assert [entry.key for entry in initial] == ["a", "b"]
                await kv.put("c", b"3")
                entry = await asyncio.wait_for(anext(watch), 20)
                assert entry is not None
                assert entry.key == "c"
            await kv.purge("c")
            await kv.purge_deletes(0)
    assert "messages of other subjects are left out" in caplog.text


async def test_purge_deletes(url: str) -> None:
    async with new_bucket(url, KeyValueConfig("tidy", history=5)) as kv:
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
        with pytest.raises(KeyNotFoundError, match="entry not found"):
            await kv.get("gone")
        assert sorted(await kv.keys()) == ["back", "live"]
        assert [entry.value for entry in await kv.history("back")] == [b"", b"3"]


async def test_purge_deletes_spares_key_that_is_written_meanwhile(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b", history=5)
    written = []

    class Writing(JetStream):
        async def call(self, subject: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
            if subject.startswith("STREAM.PURGE") and not written:
                written.append(await KeyValue(self, kv.bucket).put("a", b"new"))
            return await super().call(subject, request)

    kv: KeyValue

    async with connect(nats_server.url) as js:
        kv = await KeyValue.open(js, "b")
        await kv.put("a", b"old")
        await kv.delete("a")
        kv.jetstream = Writing(js.connection)
        assert await kv.purge_deletes(0) == 1
        assert [(e.value, e.revision) for e in await kv.history("a")] == [(b"new", 3)]
    assert written == [3]


async def test_marker_on_wildcard_does_not_purge_bucket(url: str) -> None:
    """Servers store what is published to a wildcard; in a request its name is a filter."""
    deleted = {"KV-Operation": "DEL"}

    async with new_bucket(url, KeyValueConfig("wild", history=3)) as kv:
        for key in ("a", "b.c"):
            await kv.put(key, b"1")
        messages = [(f"$KV.wild.{key}", b"", deleted) for key in (">", "*", "b.*")]
        await asyncio.to_thread(publish, url, messages)
        await kv.delete("a")
        # 2.10 delivers "a" for each wildcard again, after the reader's end.
        assert await kv.purge_deletes(0) == 1
        assert await kv.keys() == ["b.c"]
        assert (await kv.get("b.c")).value == b"1"


async def test_purge_failure_stops_remaining_purges(url: str) -> None:
    purged = 0

    class Failing(JetStream):
        async def call(self, subject: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
            nonlocal purged
            if subject.startswith("STREAM.PURGE"):
                purged += 1
                if purged == 3:
                    raise ApiError("no", 400, 1)
            return await super().call(subject, request)

    async with new_bucket(url, KeyValueConfig("purges")) as kv:
        for i in range(600):
            await kv.delete(f"k{i}")
        kv.jetstream = Failing(kv.jetstream.connection)
        before = asyncio.all_tasks()
        with pytest.raises(ApiError, match="no"):
            await kv.purge_deletes(0)
        assert asyncio.all_tasks() == before
        assert 3 <= purged < 600


async def test_ttl_of_bucket(url: str) -> None:
    async with new_bucket(url, KeyValueConfig("aging", ttl=0.5)) as kv:
        server = (await kv.status()).stream_info["config"]
        assert (server["max_age"], server["duplicate_window"]) == (500_000_000, 500_000_000)
        await kv.put("a", b"1")
        assert await kv.keys() == ["a"]

        async def expired() -> bool:
            return await kv.keys() == []

        await wait_until_async(expired, "expired")
        with pytest.raises(KeyNotFoundError):
            await kv.get("a")


async def test_ttl_of_entry_and_its_marker(jetstream: JetStream) -> None:
    """A value that expires leaves a marker, which get, history, keys and watch read alike."""
    config = KeyValueConfig("ttl", history=3, limit_marker_ttl=2)
    try:
        kv = await KeyValue.create_bucket(jetstream, config)
    except ServerTooOldError as error:
        assert "2.11" in str(error)  # noqa: PT017
        assert await jetstream.api_level() == 0
        return
    brief = await KeyValue.create_bucket(jetstream, KeyValueConfig("ttl1", limit_marker_ttl=1))
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

    await wait_until_async(nothing_left, "nothing left")


async def test_entry_that_expires_makes_older_revision_current_again(
    jetstream: JetStream,
) -> None:
    """A marker is only written for a key without an older revision; the TTL is lengthened."""
    if await jetstream.api_level() == 0:
        return
    kv = await KeyValue.create_bucket(
        jetstream, KeyValueConfig("older", history=2, limit_marker_ttl=2)
    )
    old = await kv.put("both", b"old")
    await kv.put("both", b"short", ttl=1)
    single = await kv.put("single", b"short", ttl=1)
    message = await jetstream.message("KV_older", seq=single)
    assert message is not None
    assert b"Nats-TTL: 2\r\n" in message.headers, "lengthened to that of markers"

    async def expired() -> bool:
        entries = await kv.history("both") + await kv.history("single")
        return [e.operation for e in entries] == ["PUT", "PURGE"]

    await wait_until_async(expired, "the older revision, and the marker of the other key")
    assert (await kv.get("both")).revision == old


REASONS = [("MaxAge", "PURGE"), ("Purge", "PURGE"), ("Remove", "DEL"), ("Other", "PUT")]


async def test_marker_reasons_and_unknown_operations(url: str) -> None:
    messages = [
        (f"$KV.reasons.{reason}", b"x", {"Nats-Marker-Reason": reason}) for reason, _ in REASONS
    ]
    messages.append(("$KV.reasons.Unknown", b"x", {"KV-Operation": "MOVE"}))
    expected = {**dict(REASONS), "Unknown": "PUT"}

    async with new_bucket(url, KeyValueConfig("reasons")) as kv:
        publish(url, messages)
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


async def test_ttl_in_bucket_without_ttls(url: str) -> None:
    async with new_bucket(url, KeyValueConfig("nottl")) as kv:
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


async def test_marker_with_ttl_removes_key_that_is_not_utf8(jetstream: JetStream) -> None:
    """As docs/troubleshooting.md describes it: requests, which are JSON, cannot name the key."""
    if await jetstream.api_level() == 0:
        return
    kv = await KeyValue.create_bucket(jetstream, KeyValueConfig("raw", limit_marker_ttl=1))
    await kv.put("a", b"1")
    write = jetstream.connection.writer.write

    async def has_messages(count: int) -> bool:
        return (await jetstream.stream_info("KV_raw")).messages == count

    await write(memoryview(b"PUB $KV.raw.\xff 1\r\nx\r\n"))
    await wait_until_async(lambda: has_messages(2), "stored")
    with pytest.raises(ProtocolError, match=r"b'\$KV\.raw\.\\xff' is not UTF-8; .*'Nats-TTL: 1s'"):
        await kv.keys()
    headers = b"NATS/1.0\r\nKV-Operation: PURGE\r\nNats-Rollup: sub\r\nNats-TTL: 1s\r\n\r\n"
    line = b"HPUB $KV.raw.\xff %d %d\r\n" % (len(headers), len(headers))
    await write(memoryview(line + headers + b"\r\n"))
    await wait_until_async(lambda: has_messages(1), "removed")
    assert await kv.keys() == ["a"]
