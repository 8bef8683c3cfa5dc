"""Header blocks to publish, as one column: from named columns and from maps of headers.

A block is ``NATS/1.0``, one line ``name: value`` for each value, and an empty line (ADR-4). Each
*field* of a block is a column of lines; a row in which a field is null lacks the field.

:func:`hash_column` and :func:`combine` make 64-bit checksums. Message ids contain one, so that a
row whose content differs when a task is repeated is not taken for the row that is stored. It is not
a cryptographic hash: CRC-32 and Adler-32, which zlib computes as fast as memory is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import quote
from zlib import adler32, crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nats_stream_source.errors import ConfigurationError
from nats_stream_source.wire.publish.frames import scalar
from nats_stream_source.wire.publish.unsendable import Unsendable

_BINARY = pa.binary()
_NAME = r"^[!-9;-~]+$"
_VALUE = r"^(?:[^\s][^\r\n]*)?$"
_NAME_CHARACTERS = "!\"#$&'()*+,-./;<=>?@[\\]^_`{|}~"
_INTERPRETED = r"(?i)^(?:nats-|kv-operation$)"

Hashes = NDArray[np.uint64]

_MIX, _SHIFT = np.uint64(0xBF58476D1CE4E5B9), np.uint64(29)


def field(name: str, values: pa.Array) -> pa.Array:
    """The lines of one header of strings or integers: ``pa.binary()``, null for null values."""
    return pc.binary_join_element_wise(
        scalar(f"{name}: ".encode()), values.cast(pa.string()).cast(_BINARY), scalar(b"\r\n"),
        scalar(b""),
    )  # fmt: skip


class HeaderError(ValueError):
    """A header of a row cannot be sent.

    Attributes:
        row: the number of the row, from 0.
        problem: what was observed and expected.
    """

    def __init__(self, row: int, problem: str) -> None:
        super().__init__(f"row {row}: {problem}")
        self.row = row
        self.problem = problem


def map_fields(maps: pa.Array, unsendable: Unsendable = Unsendable.FAIL) -> tuple[pa.Array, int]:
    """The lines of the headers in ``MAP<STRING, ARRAY<STRING>>``, and how many were changed.

    The lines are ``pa.binary()``, null where a row does not have a header. Headers that JetStream
    or a bucket interprets (``Nats-...`` and ``KV-Operation``) are left out: those of a message that
    was read describe that message, and would change what the stream does with the new one.

    Args:
        unsendable: ``ENCODE`` writes bytes of names and values that cannot be sent as ``%XX``, and
            a value that is null as an empty one.

    Raises:
        HeaderError: a name or a value cannot be sent, with ``FAIL``.
    """
    rows, names, values = _flatten(maps)
    kept = pc.invert(pc.match_substring_regex(names, _INTERPRETED))
    if not pc.all(kept).as_py():
        rows, names, values = rows[kept.to_numpy(False)], names.filter(kept), values.filter(kept)
    changed = 0
    if unsendable is not Unsendable.FAIL:
        good = pc.and_(_matches(names, _NAME), _matches(values, _VALUE)).to_numpy(False)
        if changed := int((~good).sum()):
            if unsendable is Unsendable.SKIP:
                kept = pa.array(good)
                rows, names, values = rows[good], names.filter(kept), values.filter(kept)
            else:
                names = _replaced(names, good, _encoded_name)
                values = _replaced(values, good, _encoded_value)
    _validate(names, _NAME, rows, "a header's name must be visible ASCII characters without ':'")
    _validate(
        values,
        _VALUE,
        rows,
        "a header's value must be a string without line breaks and without white space before it",
    )
    lines = pc.binary_join_element_wise(
        names.cast(_BINARY), scalar(b": "), values.cast(_BINARY), scalar(b"\r\n"), scalar(b"")
    )
    borders = np.searchsorted(rows, np.arange(len(maps) + 1)).astype(np.int32)
    blocks = pc.binary_join(pa.ListArray.from_arrays(pa.array(borders), lines), scalar(b""))
    present = pa.array(borders[1:] > borders[:-1])
    return pc.if_else(present, blocks, pa.scalar(None, _BINARY)), changed


def blocks(fields: Sequence[pa.Array]) -> pa.Array | None:
    """Header blocks of columns of lines: ``pa.binary()``, null where all fields are null.

    Returns None if that is every row.
    """
    fields = [one for one in fields if one.null_count < len(one)]
    if not fields:
        return None
    joined = pc.binary_join_element_wise(
        scalar(b"NATS/1.0\r\n"), *fields, scalar(b"\r\n"), scalar(b""), null_handling="skip"
    )
    if all(one.null_count for one in fields):
        present = fields[0].is_valid()
        for one in fields[1:]:
            present = pc.or_(present, one.is_valid())
        joined = pc.if_else(present, joined, pa.scalar(None, _BINARY))
    return joined


def header_block(headers: Mapping[str, str]) -> bytes:
    """The header block of a message (ADR-4); ConfigurationError for an invalid header."""
    lines = ["NATS/1.0\r\n"]
    for name, value in headers.items():
        if not re.fullmatch(_NAME, name):
            raise ConfigurationError(
                f"invalid header name {name!r}: expected visible ASCII characters without ':'"
            )
        if "\r" in value or "\n" in value or value != value.strip():
            raise ConfigurationError(
                f"invalid value of header {name!r}: expected a string without line breaks and "
                f"without surrounding whitespace"
            )
        lines.append(f"{name}: {value}\r\n")
    lines.append("\r\n")
    return "".join(lines).encode()


def replace_value(block: bytes, name: str, value: str) -> bytes:
    """A header block in which the field ``name``, which it has, has another value."""
    before, found, after = block.partition(f"\r\n{name}: ".encode())
    return before + found + value.encode() + after[after.index(b"\r\n") :]


def _flatten(maps: pa.Array) -> tuple[np.ndarray, pa.Array, pa.Array]:
    """Row, name and value of each header, in order; a null list or map has none."""
    # Offsets instead of flatten(): the rows of a null map or list may still have elements.
    lists = pa.ListArray.from_arrays(
        pa.array(_offsets(maps)), pa.array(np.arange(len(maps.items), dtype=np.int64))
    )
    valid = np.ones(len(maps), bool) if not maps.null_count else maps.is_valid().to_numpy(False)
    entry_rows = lists.value_parent_indices().to_numpy()
    entries = lists.flatten().to_numpy()
    keep = valid[entry_rows]
    entry_rows, entries = entry_rows[keep], entries[keep]
    items = maps.items.take(pa.array(entries))
    names = maps.keys.take(pa.array(entries))
    parents = items.value_parent_indices().to_numpy()
    return entry_rows[parents], names.take(pa.array(parents)), items.flatten()


def _offsets(maps: pa.Array) -> np.ndarray:
    return np.frombuffer(maps.buffers()[1], np.int32, len(maps) + 1, maps.offset * 4)


def _replaced(column: pa.Array, good: np.ndarray, encode: Callable[[str], str]) -> pa.Array:
    """The column with the rows encoded that are not ``good``; there are few of them."""
    values = column.to_pylist()
    for row in np.flatnonzero(~good):
        values[row] = encode(values[row] or "")
    return pa.array(values, column.type)


def _encoded_name(name: str) -> str:
    return quote(name, safe=_NAME_CHARACTERS) or "%"


def _encoded_value(value: str) -> str:
    if re.fullmatch(_VALUE, value):
        return value
    text = value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return quote(text[:1], safe="%") + text[1:]


def _matches(column: pa.Array, pattern: str) -> pa.Array:
    return pc.match_substring_regex(column, pattern).fill_null(False)


def _validate(column: pa.Array, pattern: str, rows: np.ndarray, expected: str) -> None:
    good = _matches(column, pattern)
    if pc.all(good).as_py() is not False:
        return
    first = pc.index(good, False).as_py()
    raise HeaderError(int(rows[first]), f"{column[first].as_py()!r} cannot be sent: {expected}")


def hash_column(column: pa.Array) -> Hashes:
    """One hash per element of a ``pa.binary()`` or ``pa.string()`` column; null hashes as empty.

    The values are hashed where they are, without a copy of each.
    """
    column = column.cast(_BINARY).fill_null(b"")
    if not len(column):
        return np.empty(0, np.uint64)
    _, offsets, content = column.buffers()
    borders = np.frombuffer(offsets, np.int32, len(column) + 1, column.offset * 4).tolist()
    data = memoryview(content or b"")
    values = map(data.__getitem__, map(slice, borders, borders[1:]))
    return np.fromiter((crc32(v) << 32 | adler32(v) for v in values), np.uint64, len(column))


def combine(first: Hashes, second: Hashes) -> Hashes:
    """The hashes of pairs of elements; the order of the two matters."""
    mixed: Hashes = first * _MIX + second
    mixed = (mixed ^ (mixed >> _SHIFT)) * _MIX
    mixed ^= mixed >> _SHIFT
    return mixed
