"""Buckets whose keys and values are encoded, also by orbit.go's and natsio's codecs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from nats_stream_source.errors import (
    ConfigurationError,
    InvalidNameError,
    KeyDeletedError,
    KeyExistsError,
    KeyNotEncodableError,
    KeyNotFoundError,
    UndecodableError,
    WrongLastSequenceError,
)
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.kv.codec import Codecs
from nats_stream_source.jetstream.kv.config import KeyValueConfig
from nats_stream_source.jetstream.kv.entry import Entry
from nats_stream_source.jetstream.kv.store import KeyValue
from tests.support.codec_peers import CODECS, Peer, chain_of, codec_peer, written_keys
from tests.support.nats.buckets import create_bucket, put
from tests.support.query_driver.batch import read_batch

BASE64: Codecs = {"key_codec": "base64", "value_codec": "base64"}
PATH: Codecs = {"key_codec": "path,base64"}


async def test_calls_take_and_return_decoded_entries(jetstream: JetStream) -> None:
    config = KeyValueConfig("decoded", history=5)
    kv = await KeyValue.create_bucket(jetstream, config, **BASE64)
    raw = await KeyValue.open(jetstream, "decoded")
    assert await kv.put("user:1.name", b"Ann") == 1
    stored = await raw.get("dXNlcjox.bmFtZQ")
    assert stored.value == b"QW5u"
    assert await kv.update("user:1.name", b"Eve", 1) == 2
    entry = await kv.get("user:1.name", min_last_revision=2)
    assert (entry.key, entry.value) == ("user:1.name", b"Eve")
    assert (await kv.get_revision("user:1.name", 1)).value == b"Ann"
    with pytest.raises(KeyExistsError, match=r"could not create key 'user:1\.name' in buc"):
        await kv.create("user:1.name", b"")
    with pytest.raises(WrongLastSequenceError):
        await kv.update("user:1.name", b"", 1)
    assert await kv.create("Ω b", b"") == 3
    assert (await kv.get("Ω b")).value == b""
    assert await kv.delete("user:1.name") == 4
    with pytest.raises(KeyDeletedError, match=r"could not read key 'user:1\.name' of buck"):
        await kv.get("user:1.name")
    with pytest.raises(KeyNotFoundError, match="could not read key 'user:2' of bucket"):
        await kv.get("user:2")
    history = [(one.key, one.value, one.operation) for one in await kv.history("user:1.name")]
    assert history == [
        ("user:1.name", b"Ann", "PUT"),
        ("user:1.name", b"Eve", "PUT"),
        ("user:1.name", b"", "DEL"),
    ]
    assert await kv.create("user:1.name", b"new") == 5
    assert sorted(await kv.keys()) == ["user:1.name", "Ω b"]
    assert await kv.keys("*.name") == await kv.read_only().keys("user:1.>") == ["user:1.name"]
    await kv.purge("Ω b")
    assert await kv.purge_deletes(0) == 1
    assert await raw.keys() == ["dXNlcjox.bmFtZQ"]
    assert await kv.keys("Ω b") == []
    updated = await KeyValue.update_bucket(jetstream, config, **BASE64)
    assert (await updated.get("user:1.name")).value == b"new"


async def test_keys_of_paths(jetstream: JetStream) -> None:
    kv = await KeyValue.create_bucket(jetstream, KeyValueConfig("paths"), **PATH)
    for key in ("/", "/etc/host name", "/etc/hosts/a", "etc/b"):
        await kv.put(key, key.encode())
    assert sorted(await kv.keys()) == ["/", "/etc/host name", "/etc/hosts/a", "etc/b"]
    assert sorted(await kv.keys("/etc/>")) == ["/etc/host name", "/etc/hosts/a"]
    assert await kv.keys("/etc/*/a", "etc/b") == ["/etc/hosts/a", "etc/b"]
    for call in (kv.put("etc.b", b""), kv.create("etc.b", b""), kv.get("etc.b")):
        with pytest.raises(KeyNotEncodableError, match="it would be stored as"):
            await call
    with pytest.raises(InvalidNameError, match="could not encode key filter '/etc/a"):
        kv.watch("/etc/a*")
    assert (await kv.status()).values == 4
    kv = await KeyValue.open(jetstream, "paths", key_codec="path")
    with pytest.raises(InvalidNameError, match=r"'_kv\.a': keys that start with '_kv' are res"):
        await kv.put("_kv/a", b"")


async def test_watch_of_decoded_entries(jetstream: JetStream) -> None:
    kv = await KeyValue.create_bucket(jetstream, KeyValueConfig("watched", history=3), **BASE64)
    for value in (b"1", b"2"):
        await kv.put("a b.c", value)
    await kv.put("d", b"3")
    async with kv.watch("a b.*") as watch, kv.watch("a b.*", include_history=True) as history:
        assert shown(await watch.initial()) == [("a b.c", b"2")]
        assert shown(await history.initial()) == [("a b.c", b"1"), ("a b.c", b"2")]
        await kv.delete("a b.c")
        await kv.put("a b.é", b"4")
        following = [await anext(watch), await anext(watch)]
        assert shown(following) == [("a b.c", b""), ("a b.é", b"4")]
    async with kv.watch_all(meta_only=True) as watch:
        assert ("d", b"") in shown(await watch.initial())


async def test_undecodable_entries_fail_or_are_skipped(
    url: str, jetstream: JetStream, caplog: pytest.LogCaptureFixture
) -> None:
    create_bucket(url, "mixed", 3)
    for key, value in (("YQ", b"MQ"), ("plain", b"Mg"), ("Yg", b"?"), ("Yg", b"Mw")):
        put(url, "mixed", key, value)
    kv = await KeyValue.open(jetstream, "mixed", **BASE64)
    with pytest.raises(UndecodableError, match="the key of entry 'plain' of bucket 'mixed', r"):
        await kv.keys()
    with pytest.raises(UndecodableError, match="the value of entry 'Yg' of bucket 'mixed', re"):
        await kv.history("b")
    assert await kv.keys("a", "b") == ["a", "b"]
    async with kv.watch_all() as watch:
        assert shown([await anext(watch)]) == [("a", b"1")]
        with pytest.raises(UndecodableError, match="change key_codec, or on_undecodable to sk"):
            await anext(watch)
        # The watch continues after the entry.
        assert shown(await watch.initial()) == [("b", b"3")]
    assert caplog.records == []
    kv = await KeyValue.open(jetstream, "mixed", **{**BASE64, "on_undecodable": "skip"})
    assert sorted(await kv.keys()) == ["a", "b"]
    assert shown(await kv.history("b")) == [("b", b"3")]
    with pytest.raises(UndecodableError):
        await kv.get_revision("b", 3)
    async with kv.watch_all(include_history=True) as watch:
        assert shown(await watch.initial()) == [("a", b"1"), ("b", b"3")]
    skipped = "undecodable entries were skipped bucket=mixed count="
    assert [record.message for record in caplog.records] == [
        f"{skipped}1 raw_key=plain revision=2",
        f"{skipped}1 raw_key=Yg revision=3",
        f"{skipped}2 raw_key=plain revision=2",
    ]
    with pytest.raises(ConfigurationError, match="key_codec is 'rot13', which is not a codec"):
        await KeyValue.open(jetstream, "mixed", key_codec="rot13")


def shown(entries: Sequence[Entry | None]) -> list[tuple[str, bytes]]:
    return [(entry.key, entry.value) for entry in entries if entry is not None]


@pytest.fixture(scope="module", params=["orbit", pytest.param("natsio", marks=pytest.mark.faults)])
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Peer:
    return codec_peer(request.param, tmp_path_factory.mktemp(request.param))


with_codecs = pytest.mark.parametrize(("key_codec", "value_codec"), CODECS)


def chosen(key_codec: str, value_codec: str) -> Codecs:
    return {"key_codec": key_codec or None, "value_codec": value_codec or None}


@with_codecs
async def test_entries_of_peer_are_read(
    url: str, jetstream: JetStream, peer: Peer, key_codec: str, value_codec: str
) -> None:
    bucket = bucket_name("theirs", key_codec, value_codec)
    expected = written_keys(chain_of(key_codec))
    assert len(expected) > 4
    create_bucket(url, bucket, 3)
    peer(url, bucket, key_codec, value_codec, "put", expected)
    deleted = sorted(expected)[0]
    peer(url, bucket, key_codec, value_codec, "delete", {deleted: b""})
    options = {"keyCodec": key_codec, "valueCodec": value_codec}
    given = {name: text for name, text in options.items() if text}
    rows = await asyncio.to_thread(lambda: read_batch(url, bucket=bucket, **given))
    assert {row["key"]: row["value"] for row in rows} == {**expected, deleted: None}
    del expected[deleted]
    kv = await KeyValue.open(jetstream, bucket, **chosen(key_codec, value_codec))
    assert sorted(await kv.keys()) == sorted(expected)
    for key, value in expected.items():
        assert (await kv.get(key)).value == value


@with_codecs
async def test_peer_reads_entries(url: str, peer: Peer, key_codec: str, value_codec: str) -> None:
    bucket = bucket_name("ours", key_codec, value_codec)
    expected = written_keys(chain_of(key_codec))
    async with connect(url) as js:
        config = KeyValueConfig(bucket, history=3)
        kv = await KeyValue.create_bucket(js, config, **chosen(key_codec, value_codec))
        for key, value in expected.items():
            await kv.put(key, value)
        await kv.delete(sorted(expected)[0])
    del expected[sorted(expected)[0]]
    assert peer(url, bucket, key_codec, value_codec, "list", {}) == expected


def bucket_name(*parts: str) -> str:
    return "-".join(parts).replace(",", "_")
