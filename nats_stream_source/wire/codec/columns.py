"""Columns of keys and values, encoded and decoded row by row as :mod:`.definition` has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from nats_stream_source.wire.codec.definition import (
    Chain,
    decode_key,
    decode_value,
    encode_key,
    encode_value,
)


def encode_keys(chain: Chain, keys: pa.Array) -> pa.Array:
    """Return keys as they are stored: ``pa.string()``; null for null."""
    return _mapped(encode_key, chain, keys, pa.string())


def decode_keys(chain: Chain, raw: pa.Array) -> pa.Array:
    """Return the keys of stored ones: ``pa.string()``; null where a key is not decodable."""
    return _mapped(decode_key, chain, raw, pa.string())


def encode_values(chain: Chain, values: pa.Array) -> pa.Array:
    """Return values as they are stored: ``pa.binary()``; null for null."""
    return _mapped(encode_value, chain, values, pa.binary())


def decode_values(chain: Chain, raw: pa.Array) -> pa.Array:
    """Return the values of stored ones: ``pa.binary()``; null for null or not decodable."""
    return _mapped(decode_value, chain, raw, pa.binary())


def _mapped(
    function: Callable[[Chain, Any], Any], chain: Chain, column: pa.Array, kind: pa.DataType
) -> pa.Array:
    values = (None if value is None else function(chain, value) for value in column.to_pylist())
    return pa.array(values, kind, size=len(column))
