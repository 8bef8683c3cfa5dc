"""Columns are encoded and decoded as single keys and values are."""

from __future__ import annotations

import base64
import random

import pyarrow as pa
import pytest

from nats_stream_source.wire.codec.columns import (
    decode_keys,
    decode_values,
    encode_keys,
    encode_values,
)
from nats_stream_source.wire.codec.definition import (
    Chain,
    decode_key,
    decode_value,
    encode_key,
    encode_value,
)
from tests.unit.wire.codec.kvcodec import CHAINS, recorded

_CHAINS = sorted({chain for chain in CHAINS.values() if chain})
_VALUE_CHAINS: list[Chain] = [("base64",), ("base64", "base64")]
_KEYS = [key for _, *keys, _, _ in recorded("keys") for key in keys if isinstance(key, str)] + [
    stored for _, stored, *_ in recorded("stored_keys")
]
_PARTS = [
    "a",
    "YQ",
    "YR",
    "_root_",
    "X3Jvb3Rf",
    "w6k",
    "/",
    ".",
    "*",
    "-_",
    "+",
    "=",
    "é",
    "\n",
    "",
]


def texts(seed: int, count: int) -> list[str]:
    """Keys of the vectors, or of their parts: decodable ones, and others of any kind."""
    random.seed(seed)
    made = ["".join(random.choices(_PARTS, k=random.randrange(1, 7))) for _ in range(count // 2)]
    return made + random.choices(_KEYS, k=count - len(made))


def encoded(chain: Chain, keys: list[str]) -> list[str]:
    return [encode_key(chain, key) for key in keys]


@pytest.mark.parametrize("chain", _CHAINS, ids=",".join)
@pytest.mark.parametrize("seed", range(20))
def test_keys(chain: Chain, seed: int) -> None:
    keys = texts(seed, 200)
    for some in (keys, encoded(chain, keys), keys[:1], [key for key in keys if key.isascii()], []):
        column = pa.array(some, pa.string())
        assert encode_keys(chain, column).to_pylist() == encoded(chain, some)
        decoded = decode_keys(chain, column)
        decoded.validate(full=True)
        assert decoded.to_pylist() == [decode_key(chain, key) for key in some]


@pytest.mark.parametrize("chain", _CHAINS, ids=",".join)
def test_keys_that_all_decode(chain: Chain) -> None:
    """The usual case: each stored key is decodable; also of a part of a longer column."""
    keys = [key for key in encoded(chain, texts(1, 400)) if decode_key(chain, key) is not None]
    assert len(keys) > 50
    expected = [decode_key(chain, key) for key in keys]
    column = pa.array(["?", *keys, "?"], pa.string())
    assert decode_keys(chain, column.slice(1, len(keys))).to_pylist() == expected
    ends = decode_key(chain, "?")
    assert decode_keys(chain, column).to_pylist() == [ends, *expected, ends]


@pytest.mark.parametrize("chain", _VALUE_CHAINS, ids=",".join)
@pytest.mark.parametrize("seed", range(20))
def test_values(chain: Chain, seed: int) -> None:
    random.seed(seed)
    values = [random.randbytes(random.randrange(0, 300)) for _ in range(100)]
    stored = [encode_value(chain, value) for value in values]
    odd = [base64.b64decode(given) for _, _, given, *_ in recorded("values")]
    odd += [text.encode() for text in texts(seed, 100)]
    for some in ([*stored, None], [*stored, *odd, None], [], [None]):
        column = pa.array(some, pa.binary())
        decoded = decode_values(chain, column)
        decoded.validate(full=True)
        assert decoded.to_pylist() == [v if v is None else decode_value(chain, v) for v in some]
    assert encode_values(chain, pa.array([*values, None])).to_pylist() == [*stored, None]
    assert decode_values(chain, pa.array(["?", *stored], pa.binary())[1:]).to_pylist() == values
