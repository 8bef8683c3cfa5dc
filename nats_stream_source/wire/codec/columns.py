"""Columns of keys and values, encoded and decoded as :mod:`.definition` has it.

Where it is selected (``framing/scanner.py``), ``compiled_base64`` decodes a column of Base64, and
Arrow one of paths, without a Python object for each row. Both stop at a row that is not exactly an
encoding. Then the definition decodes all rows of the column, one by one; it also encodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.wire.codec.definition import (
    BASE64,
    ROOT,
    Chain,
    decode_key,
    decode_value,
    encode_key,
    encode_value,
)
from nats_stream_source.wire.framing import scanner

if TYPE_CHECKING:
    from nats_stream_source.wire.codec import compiled_base64 as compiled_base64
else:
    try:
        from nats_stream_source.wire.codec import compiled_base64
    except ImportError:
        compiled_base64 = None

_NOT_ASCII = 0x80  # the lowest such byte
_SLASHES = bytes.maketrans(b".", b"/")


def encode_keys(chain: Chain, keys: pa.Array) -> pa.Array:
    """Return keys as they are stored: ``pa.string()``; null for null."""
    return _mapped(lambda key: encode_key(chain, key), keys, pa.string())


def decode_keys(chain: Chain, raw: pa.Array) -> pa.Array:
    """Return the keys of stored ones: ``pa.string()``; null where a key is not decodable."""
    if not raw.null_count and _is_compiled():
        keys = raw
        for codec in reversed(chain):
            decoded = _decoded_tokens(keys) if codec == BASE64 else _decoded_paths(keys)
            if decoded is None:
                break
            keys = decoded
        else:
            return keys
    return _mapped(lambda key: decode_key(chain, key), raw, pa.string())


def encode_values(chain: Chain, values: pa.Array) -> pa.Array:
    """Return values as they are stored: ``pa.binary()``; null for null."""
    return _mapped(lambda value: encode_value(chain, value), values, pa.binary())


def decode_values(chain: Chain, raw: pa.Array) -> pa.Array:
    """Return the values of stored ones: ``pa.binary()``; null for null or not decodable."""
    if _is_compiled():
        values = raw
        for _ in chain:
            decoded = _decoded_base64(values, tokens=False)
            if decoded is None:
                break
            values = decoded
        else:
            return pc.if_else(raw.is_valid(), values, None) if raw.null_count else values
    return _mapped(lambda value: decode_value(chain, value), raw, pa.binary())


def _is_compiled() -> bool:
    """Return whether columns are decoded without a Python object for each row."""
    return compiled_base64 is not None and scanner.selected() == "compiled"


def _decoded_base64(column: pa.Array, *, tokens: bool) -> pa.Array | None:
    """Decode each row as one token, or as tokens with dots between them.

    Returns:
        ``pa.binary()``; None if a row is not exactly an encoding.
    """
    count = len(column)
    if not count:
        return pa.array([], pa.binary())
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset :][: count + 1]
    data = np.frombuffer(column.buffers()[2] or b"", np.uint8)
    decoded_offsets = np.empty(count + 1, np.int32)
    # Arrow keeps freed memory, see arrow_slices.
    memory = pa.allocate_buffer(int(offsets[-1] - offsets[0]))
    decoded = np.frombuffer(memory, np.uint8)
    if compiled_base64.decode(data, offsets, tokens, decoded_offsets, decoded) < count:
        return None
    buffers = [None, pa.py_buffer(decoded_offsets), memory]
    return pa.Array.from_buffers(pa.binary(), count, buffers, null_count=0)


def _decoded_tokens(keys: pa.Array) -> pa.Array | None:
    decoded = _decoded_base64(keys, tokens=True)
    if decoded is None:
        return None
    data = np.frombuffer(decoded.buffers()[2], np.uint8) if len(decoded) else np.empty(0, np.uint8)
    used = int(np.frombuffer(decoded.buffers()[1], np.int32)[-1]) if len(decoded) else 0
    if data[:used].max(initial=0) < _NOT_ASCII:
        return decoded.view(pa.string())
    try:
        return decoded.cast(pa.string())
    except pa.ArrowInvalid:
        return None


def _decoded_paths(keys: pa.Array) -> pa.Array | None:
    """Decode paths; None if a row is not exactly an encoding."""
    count = len(keys)
    if not count:
        return keys
    offsets = np.frombuffer(keys.buffers()[1], np.int32)[keys.offset :][: count + 1]
    data = bytes(keys.buffers()[2] or b"")[offsets[0] : offsets[-1]]
    if b"/" in data:
        return None
    slashed = pa.py_buffer(data.translate(_SLASHES))
    moved = pa.py_buffer(offsets - offsets[0])
    paths = pa.Array.from_buffers(pa.string(), count, [None, moved, slashed], null_count=0)
    if pc.any(pc.or_(pc.starts_with(paths, "/"), pc.ends_with(paths, "/"))).as_py():
        return None  # an empty first or last token
    rooted = pc.starts_with(paths, f"{ROOT}/")
    whole = pc.equal(paths, ROOT)
    if pc.any(rooted).as_py():
        paths = pc.if_else(rooted, pc.utf8_slice_codeunits(paths, len(ROOT)), paths)
    return pc.if_else(whole, "/", paths) if pc.any(whole).as_py() else paths


def _mapped(function: Callable[[Any], Any], column: pa.Array, kind: pa.DataType) -> pa.Array:
    values = (None if value is None else function(value) for value in column.to_pylist())
    return pa.array(values, kind, size=len(column))
