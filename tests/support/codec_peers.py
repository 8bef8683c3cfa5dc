"""Other implementations of ADR-54's codecs, as programs that read and write a bucket.

orbit.go's is ``tests/support/orbit``, which is built (Go downloads its modules then); natsio's is
``tests/support/natsio_kvcodec.py``, for which an environment of Python 3.13 or newer is made. Tests
are skipped, with the reason, where Go, that Python or the packages are missing.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from nats_stream_source.wire.codec import Chain, decode_key, encode_key
from tests.support.paths import ROOT

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


def codec_peer(name: str, scratch: Path) -> Peer:
    """Call the program of ``orbit`` or ``natsio`` with entries; the entries that it lists."""
    program = {"orbit": _orbit, "natsio": _natsio}[name](scratch)

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
    found: Entries = {}
    for key in KEYS:
        raw = encode_key(chain, key)
        if _STORED_KEY.fullmatch(raw) and decode_key(chain, raw) == key:
            found[key] = b"" if key == "a" else bytes(range(256)) + key.encode()
    return found


def chain_of(names: str) -> Chain:
    return tuple(names.split(",")) if names else ()


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
