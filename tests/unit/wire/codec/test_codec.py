"""Codecs against the vectors of orbit.go's ``kvcodec``, one by one and as columns.

The vectors were recorded from its program and a server (``kvcodec.json``).
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

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from nats_stream_source.wire.codec import (
    KEY_CODECS,
    VALUE_CODECS,
    Chain,
    decode_key,
    decode_value,
    each,
    encode_filter,
    encode_key,
    encode_value,
    parse_chain,
)

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("kvcodec.json").read_text())

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


_FILTERS = [vector for vector in recorded("filters") if "not-filterable" not in vector[0]]


def has_partial_wildcard(pattern: str) -> bool:
    return any(set(token) & {"*", ">"} and len(token) > 1 for token in pattern.split("."))


@pytest.mark.parametrize(("codec", "key", "stored", "again", "same"), recorded("keys"))
def test_keys(codec: str, key: Any, stored: str, again: Any, same: bool) -> None:
    """A key that kvcodec does not return unchanged, or that is not UTF-8, is not written."""
    chain = CHAINS[codec]
    if isinstance(key, dict):
        key = base64.b64decode(key["b64"])
        assert chain != ("base64",) or decode_key(chain, stored) is None
        with pytest.raises(UnicodeDecodeError):
            key.decode()
        return
    assert encode_key(chain, key) == stored
    assert (decode_key(chain, stored) == key) == same
    assert same or again != key


@pytest.mark.parametrize(("codec", "stored", "key", "error"), recorded("stored_keys"))
def test_stored_keys(codec: str, stored: str, key: Any, error: str | None) -> None:
    """kvcodec's key, if the stored key is exactly its encoding."""
    chain = CHAINS[codec]
    exact = isinstance(key, str) and encode_key(chain, key) == stored
    assert decode_key(chain, stored) == (key if exact else None)
    assert not (exact and error)


def test_stored_keys_of_vectors_have_one_key_each() -> None:
    for name, chain in CHAINS.items():
        decoded = [
            key
            for codec, stored, *_ in recorded("stored_keys")
            if codec == name and (key := decode_key(chain, stored)) is not None
        ]
        assert len(decoded) == len(set(decoded)) > 0 or name == "base64+base64"


@pytest.mark.parametrize(("codec", "pattern", "stored", "error"), _FILTERS)
def test_filters(codec: str, pattern: str, stored: str, error: str | None) -> None:
    """As kvcodec's, which encodes a wildcard within a token like any letter; here it is refused."""
    chain = CHAINS[codec]
    seen = encode_key(("path",), pattern) if chain[:1] == ("path",) else pattern
    if "base64" in chain and has_partial_wildcard(seen):
        with pytest.raises(ValueError, match="a wildcard is not a whole token"):
            encode_filter(chain, pattern)
    else:
        assert (encode_filter(chain, pattern), error) == (stored, None)


@pytest.mark.parametrize(("codec", "operation", "given", "result", "error"), recorded("values"))
def test_values(
    codec: str, operation: str, given: str, result: str | None, error: str | None
) -> None:
    function = encode_value if operation == "encode" else decode_value
    expected = None if result is None else base64.b64decode(result)
    if codec.startswith("path"):
        # kvcodec's path codec returns values unchanged: it is not offered for values.
        assert (expected, "path" in VALUE_CODECS) == (base64.b64decode(given), False)
        return
    assert function(CHAINS[codec], base64.b64decode(given)) == expected
    assert (expected is None) == (error is not None)


@pytest.mark.parametrize(("key_codec", "value_codec", "rows"), recorded("buckets"))
def test_buckets(key_codec: str, value_codec: str, rows: list[list[Any]]) -> None:
    """What kvcodec stored in a bucket, from the keys and values of its program."""
    stored = 0
    for key, operation, error, raw_key, raw_value in rows:
        if operation != "put" or error or isinstance(key, dict):
            continue
        stored += 1
        assert encode_key(CHAINS[key_codec], key) == raw_key
        value = encode_value(CHAINS[value_codec], f"v:{key}".encode())
        assert value == base64.b64decode(raw_value)
        assert decode_value(CHAINS[value_codec], value) == f"v:{key}".encode()
    assert stored > 10


@pytest.mark.parametrize(
    ("text", "chain"), [("base64", ("base64",)), (" Path , base64", ("path", "base64"))]
)
def test_chain_parsed(text: str, chain: tuple[str, ...]) -> None:
    assert parse_chain(text, KEY_CODECS) == chain


@pytest.mark.parametrize("text", ["", ",", "base64,", "base64-js", "noop", "path,base32"])
def test_chain_unknown(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"^is not a codec, or several in their order, of base64, "
    ):
        parse_chain(text, KEY_CODECS)


def test_chain_with_path_twice() -> None:
    with pytest.raises(ValueError, match=r"^has path twice"):
        parse_chain("path,base64,path", KEY_CODECS)
    with pytest.raises(ValueError, match=r"of base64$"):
        parse_chain("path", VALUE_CODECS)


@pytest.mark.parametrize("stored", ["é", "YQ.é", "YQ.\ud800"])
def test_stored_key_not_ascii(stored: str) -> None:
    assert decode_key(("base64",), stored) is None


@pytest.mark.parametrize("chain", sorted({chain for chain in CHAINS.values() if chain}))
def test_columns(chain: Chain) -> None:
    keys = [key for _, *some, _, _ in recorded("keys") for key in some if isinstance(key, str)]
    column = pa.array(["left out", None, *keys], pa.string())[1:]
    stored = each(encode_key, chain, column)
    assert stored.to_pylist() == [None, *(encode_key(chain, key) for key in keys)]
    decoded = each(decode_key, chain, column)
    decoded.validate(full=True)
    assert decoded.to_pylist() == [None, *(decode_key(chain, key) for key in keys)]
    assert each(decode_key, chain, column[:0]).equals(pa.array([], pa.string()))
    values = pa.array([None, b"", b"YQ", b"?"], pa.binary())
    found = each(decode_value, ("base64",), values)
    assert found.equals(pa.array([None, b"", b"a", None], pa.binary()))
