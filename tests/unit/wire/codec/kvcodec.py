"""Facts of orbit.go's ``kvcodec``, recorded from its program and a server (``kvcodec.json``).

A vector names its codec as the recording did. The lists have

- ``keys``: codec, key, stored key, the key that this decodes to, whether that is the key;
- ``stored_keys``: codec, stored key, its key, the error;
- ``filters``: codec, filter, filter of stored keys, the error;
- ``values``: codec, ``encode`` or ``decode``, input, output (both Base64), the error;
- ``buckets``: key codec, value codec, and a row for each call: key, ``put`` or ``delete``, the
  error, stored key, stored value (Base64). The value of ``a/b`` is ``v:a/b``.

A key that is not UTF-8 is ``{"b64": …}``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nats_stream_source.jetstream.kv.codec import Chain

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())

CHAINS: dict[str, Chain] = {
    "noop": (),
    "base64": ("base64",),
    "path": ("path",),
    "path+base64": ("path", "base64"),
    "base64+path": ("base64", "path"),
    "base64+base64": ("base64", "base64"),
    # A codec of the recording's program, without filters: a chain with it has none either.
    "base64-not-filterable": ("base64",),
    "chain(path, base64-not-filterable)": ("path", "base64"),
}


def recorded(name: str) -> list[list[Any]]:
    """The vectors of a list."""
    vectors: list[list[Any]] = RECORDED[name]
    return vectors
