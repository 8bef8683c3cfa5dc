"""The list of keys and the history of a key, under writes too (ADR-8)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import KeyNotFoundError
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.kv import requests
from nats_stream_source.jetstream.kv.config import KeyValueConfig
from nats_stream_source.jetstream.kv.store import KeyValue
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.publish.publisher import Publisher
from tests.integration.jetstream.kv.stores import new_bucket
from tests.support.nats.buckets import api, bucket_config, create_bucket, publish
from tests.support.nats.limits import CONSUMER_LIMITS
from tests.support.proxy.fault_proxy import Proxy

pytestmark = pytest.mark.servers


@pytest.mark.parametrize("history", [1, 3])
async def test_keys(shared_server: NatsServer, history: int) -> None:
    async with new_bucket(
        shared_server.url, KeyValueConfig(f"keys{history}", history=history)
    ) as kv:
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
            assert await api_consumers(kv) == []


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
            assert await api_consumers(kv) == []


async def test_history_of_one_key_among_many(shared_server: NatsServer) -> None:
    async with new_bucket(shared_server.url, KeyValueConfig("long", history=64)) as kv:
        for i in range(70):
            await kv.put("a", b"%d" % i)
            await kv.put(f"other{i}", b"")
        entries = await kv.history("a")
        assert [entry.value for entry in entries] == [b"%d" % i for i in range(6, 70)]
        assert [entry.delta for entry in entries] == list(range(63, -1, -1))
        assert await api_consumers(kv) == []


async def test_history_of_key_that_is_overwritten_while_it_is_read(
    shared_server: NatsServer,
) -> None:
    """The revision is removed before the read: the key is returned with its latest revision."""
    overwritten: list[int] = []

    class Overwritten(KeyValue):
        async def _entries(self, reader: OrderedReader) -> Any:
            overwritten.append(await self.put("a", b"new"))
            return await super()._entries(reader)

    async with new_bucket(shared_server.url, KeyValueConfig("over")) as kv:
        await kv.put("a", b"old")
        entries = await Overwritten(kv.jetstream, kv.bucket).history("a")
        assert len(overwritten) == 1
        assert [(one.revision, one.delta) for one in entries] == [(overwritten[-1], 0)]
        await kv.jetstream.call("STREAM.PURGE.KV_over")
        with pytest.raises(KeyNotFoundError):
            await kv.history("a")


async def api_consumers(kv: KeyValue) -> list[str]:
    answer = await kv.jetstream.call(f"CONSUMER.NAMES.{kv.bucket.stream}")
    return list(answer.get("consumers") or [])


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
