"""Buckets that orbit.go's ``kvcodec`` reads and writes too: each sees what the other one did.

The program is ``tests/support/orbit``. It is built once; Go downloads its modules then.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.kv.config import KeyValueConfig
from nats_stream_source.jetstream.kv.store import KeyValue
from nats_stream_source.wire.codec.definition import Chain, decode_key, encode_key
from tests.integration.jetstream.kv.stores import jetstream
from tests.support.nats.buckets import create_bucket
from tests.support.paths import ROOT
from tests.support.query_driver.batch import read_batch

Entries = dict[str, bytes]
Orbit = Callable[[str, str, str, str, str, Entries], Entries]

_STORED_KEY = re.compile(r"[-/_=.a-zA-Z0-9]+")  # as nats.go validates it
_SOURCES = ROOT / "tests/support/orbit"
CODECS = [
    ("base64", "base64"),
    ("path", ""),
    ("path,base64", "base64"),
    ("base64,path", ""),
    ("base64,base64", "base64,base64"),
    ("", "base64"),
]
KEYS = [
    "a",
    "a.b",
    "/",
    "/a/b",
    "/a b/Ω.x",
    "a/b",
    "user:1",
    "user@example.com",
    "k?~k>",
    "*",
    "_r",
]
KEYS += ["_root_", "/_root_/a", "tab\there", "nl\nhere", "\U0001f600.é", "x" * 300, "%2F+a=b"]


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program's path."""
    if shutil.which("go") is None:
        pytest.skip("Go is not installed; install it to compare with orbit.go's kvcodec")
    download = subprocess.run(
        ["go", "mod", "download"], cwd=_SOURCES, capture_output=True, text=True, check=False
    )
    if download.returncode:
        pytest.skip(f"Go's modules could not be downloaded: {download.stderr.strip()}")
    path = tmp_path_factory.mktemp("orbit") / "kvcodec"
    subprocess.run(["go", "build", "-o", path, "."], cwd=_SOURCES, check=True)
    return path


@pytest.fixture(scope="module")
def orbit(program: Path) -> Orbit:
    """Call the program with entries; the entries that it lists."""

    def run(
        url: str, bucket: str, key_codec: str, value_codec: str, action: str, entries: Entries
    ) -> Entries:
        lines = [
            json.dumps({"key": key, "value": base64.b64encode(value).decode()}) + "\n"
            for key, value in entries.items()
        ]
        done = subprocess.run(
            [program, url, bucket, key_codec, value_codec, action],
            input="".join(lines),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        listed = [json.loads(line) for line in done.stdout.splitlines()]
        return {one["key"]: base64.b64decode(one["value"] or "") for one in listed}

    return run


def written_keys(chain: Chain) -> Entries:
    """The keys that the codec returns and the server accepts, with values of any bytes."""
    found: Entries = {}
    for key in KEYS:
        raw = encode_key(chain, key)
        if _STORED_KEY.fullmatch(raw) and decode_key(chain, raw) == key:
            found[key] = b"" if key == "a" else bytes(range(256)) + key.encode()
    return found


def chain_of(names: str) -> Chain:
    return tuple(names.split(",")) if names else ()


@pytest.mark.parametrize(("key_codec", "value_codec"), CODECS)
async def test_entries_of_orbit_are_read(
    shared_server: NatsServer, orbit: Orbit, key_codec: str, value_codec: str
) -> None:
    url, bucket = shared_server.url, bucket_name("orbit", key_codec, value_codec)
    expected = written_keys(chain_of(key_codec))
    assert len(expected) > 4
    create_bucket(url, bucket, 3)
    orbit(url, bucket, key_codec, value_codec, "put", expected)
    deleted = sorted(expected)[0]
    orbit(url, bucket, key_codec, value_codec, "delete", {deleted: b""})
    options = {"keyCodec": key_codec, "valueCodec": value_codec}
    given = {name: text for name, text in options.items() if text}
    rows = await asyncio.to_thread(lambda: read_batch(url, bucket=bucket, **given))
    assert {row["key"]: row["value"] for row in rows} == {**expected, deleted: None}
    del expected[deleted]
    async with jetstream(url) as js:
        kv = await KeyValue.open(
            js, bucket, key_codec=key_codec or None, value_codec=value_codec or None
        )
        assert sorted(await kv.keys()) == sorted(expected)
        for key, value in expected.items():
            assert (await kv.get(key)).value == value


@pytest.mark.parametrize(("key_codec", "value_codec"), CODECS)
async def test_orbit_reads_entries(
    shared_server: NatsServer, orbit: Orbit, key_codec: str, value_codec: str
) -> None:
    url, bucket = shared_server.url, bucket_name("ours", key_codec, value_codec)
    expected = written_keys(chain_of(key_codec))
    async with jetstream(url) as js:
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
    assert orbit(url, bucket, key_codec, value_codec, "list", {}) == expected


def bucket_name(*parts: str) -> str:
    return "-".join(parts).replace(",", "_")
