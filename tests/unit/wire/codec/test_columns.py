"""Columns are encoded and decoded as single keys and values are; a null row stays null."""

from __future__ import annotations

import base64

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


@pytest.mark.parametrize("chain", _CHAINS, ids=",".join)
def test_columns_of_keys(chain: Chain) -> None:
    column = pa.array(["left out", None, *_KEYS], pa.string())[1:]
    stored = encode_keys(chain, column)
    assert stored.to_pylist() == [None, *(encode_key(chain, key) for key in _KEYS)]
    for raw in (stored, column):
        decoded = decode_keys(chain, raw)
        decoded.validate(full=True)
        assert decoded.to_pylist() == [
            None if key is None else decode_key(chain, key) for key in raw.to_pylist()
        ]
    assert decode_keys(chain, column[:0]).equals(pa.array([], pa.string()))


@pytest.mark.parametrize("chain", _VALUE_CHAINS, ids=",".join)
def test_columns_of_values(chain: Chain) -> None:
    values = [base64.b64decode(given) for _, _, given, *_ in recorded("values")]
    column = pa.array([b"left out", None, *values], pa.binary())[1:]
    stored = encode_values(chain, column)
    assert stored.to_pylist() == [None, *(encode_value(chain, value) for value in values)]
    assert decode_values(chain, stored).to_pylist() == [None, *values]
    assert decode_values(chain, column).to_pylist() == [
        None,
        *(decode_value(chain, value) for value in values),
    ]
