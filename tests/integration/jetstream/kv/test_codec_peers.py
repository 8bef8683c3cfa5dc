"""Buckets that orbit.go's or natsio's codecs read and write too: each sees the other's entries."""

from __future__ import annotations

import asyncio

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.kv.config import KeyValueConfig
from nats_stream_source.jetstream.kv.store import KeyValue
from tests.support.codec_peers import CODECS, Peer, chain_of, codec_peer, written_keys
from tests.support.nats.buckets import create_bucket
from tests.support.query_driver.batch import read_batch


@pytest.fixture(scope="module", params=["orbit", pytest.param("natsio", marks=pytest.mark.faults)])
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Peer:
    return codec_peer(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(("key_codec", "value_codec"), CODECS)
async def test_entries_of_peer_are_read(
    shared_server: NatsServer, peer: Peer, key_codec: str, value_codec: str
) -> None:
    url, bucket = shared_server.url, bucket_name("theirs", key_codec, value_codec)
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
    async with connect(url) as js:
        kv = await KeyValue.open(
            js, bucket, key_codec=key_codec or None, value_codec=value_codec or None
        )
        assert sorted(await kv.keys()) == sorted(expected)
        for key, value in expected.items():
            assert (await kv.get(key)).value == value


@pytest.mark.parametrize(("key_codec", "value_codec"), CODECS)
async def test_peer_reads_entries(
    shared_server: NatsServer, peer: Peer, key_codec: str, value_codec: str
) -> None:
    url, bucket = shared_server.url, bucket_name("ours", key_codec, value_codec)
    expected = written_keys(chain_of(key_codec))
    async with connect(url) as js:
        kv = await KeyValue.create_bucket(
            js,
            KeyValueConfig(bucket, history=3),
            key_codec=key_codec or None,
            value_codec=value_codec or None,
        )
        for key, value in expected.items():
            await kv.put(key, value)
        await kv.delete(sorted(expected)[0])
    del expected[sorted(expected)[0]]
    assert peer(url, bucket, key_codec, value_codec, "list", {}) == expected


def bucket_name(*parts: str) -> str:
    return "-".join(parts).replace(",", "_")
