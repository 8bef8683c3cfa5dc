"""Buckets that orbit.go's or natsio's codecs read and write too: each sees what the other one did.

The programs are ``tests/support/orbit``, which is built once (Go downloads its modules then), and
``tests/support/natsio_kvcodec.py``, for which an environment of Python 3.13 or newer is made.
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
Peer = Callable[[str, str, str, str, str, Entries], Entries]

_STORED_KEY = re.compile(r"[-/_=.a-zA-Z0-9]+")  # as nats.go validates it
_SOURCES = ROOT / "tests/support"
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


def _orbit(scratch: Path) -> list[str]:
    if shutil.which("go") is None:
        pytest.skip("Go is not installed; install it to compare with orbit.go's kvcodec")
    download = subprocess.run(
        ["go", "mod", "download"], cwd=_SOURCES / "orbit", capture_output=True, text=True
    )
    if download.returncode:
        pytest.skip(f"Go's modules could not be downloaded: {download.stderr.strip()}")
    path = scratch / "kvcodec"
    subprocess.run(["go", "build", "-o", path, "."], cwd=_SOURCES / "orbit", check=True)
    return [str(path)]


def _natsio(scratch: Path) -> list[str]:
    pythons = [f"python3.{minor}" for minor in range(13, 16)]
    pythons += map(str, Path.home().glob(".pyenv/versions/3.1[3-9]*/bin/python"))
    # pyenv puts names on the PATH for versions that are not selected: each candidate is run.
    new = "import sys; sys.exit(sys.version_info < (3, 13))"
    found = [one for one in pythons if shutil.which(one) and not _run(one, "-c", new).returncode]
    if not found:
        pytest.skip("Python 3.13 is not installed, which natsio requires")
    assert not _run(found[0], "-m", "venv", str(scratch)).returncode
    python = str(scratch / "bin/python")
    installed = _run(python, "-m", "pip", "install", "--quiet", "natsio-kvcodec==0.1.1")
    if installed.returncode:
        pytest.skip(f"natsio could not be installed: {installed.stderr.strip()}")
    return [python, str(_SOURCES / "natsio_kvcodec.py")]


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module", params=["orbit", pytest.param("natsio", marks=pytest.mark.faults)])
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Peer:
    """Call the program of another implementation with entries; the entries that it lists."""
    make = {"orbit": _orbit, "natsio": _natsio}[request.param]
    program = make(tmp_path_factory.mktemp(request.param))

    def run(
        url: str, bucket: str, key_codec: str, value_codec: str, action: str, entries: Entries
    ) -> Entries:
        lines = [
            json.dumps({"key": key, "value": base64.b64encode(value).decode()}) + "\n"
            for key, value in entries.items()
        ]
        done = subprocess.run(
            [*program, url, bucket, key_codec, value_codec, action],
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
    async with jetstream(url) as js:
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
    assert peer(url, bucket, key_codec, value_codec, "list", {}) == expected


def bucket_name(*parts: str) -> str:
    return "-".join(parts).replace(",", "_")
