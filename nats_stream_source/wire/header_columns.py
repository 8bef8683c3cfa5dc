"""Header blocks as one column: for each message a map from names to values, in their order.

Theory of operation. The blocks of a batch are contiguous in one buffer. A line's name ends at its
first colon, its value at the CRLF. One search for colons and line feeds finds all of them, and the
names and values of all fields are Arrow arrays over that buffer (``wire/arrow_slices.py``). The
position of a field determines its block. Names repeat, so each distinct name is stored once. Fields
are moved only where a name repeats within a block, so that its values are adjacent.

This holds for blocks that start with the line ``NATS/1.0`` and end with an empty line. The few
other blocks are normalized first, one by one.

Definition of a field (ADR-4, and NATS's Go client; the client rejects a whole block where this
module leaves out a line):

- names keep their case; a name that repeats has all its values, in order;
- spaces and tabs before a value are not part of it, those after it are;
- a line without a colon or without a name is not a field, nor is a status after ``NATS/1.0``;
- bytes that do not start with ``NATS/1.0`` contain no fields;
- bytes that are not UTF-8 become U+FFFD, since Spark's strings cannot contain them.

:func:`origins` reads one field, ``Nats-Stream-Source``, without the others.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nats_stream_source.wire.arrow_slices import slices
from nats_stream_source.wire.ascii_integers import bytes_at

HEADERS = pa.map_(pa.string(), pa.list_(pa.field("element", pa.string())))
"""``MAP<STRING, ARRAY<STRING>>``, exactly the Arrow type that Spark uses."""

_ENTRY = [pa.field("key", pa.string(), nullable=False), pa.field("value", HEADERS.item_type)]
_VERSION = b"NATS/1.0"
_CRLF = b"\r\n"
_FIRST = _VERSION + _CRLF
_LAST = _CRLF + _CRLF
_CR, _LF, _COLON, _SPACE, _TAB = b"\r\n: \t"
_BLANKS = 3  # blanks before a value that are skipped for all fields at once; more are unusual
_ORIGIN = (
    r"(?s)^NATS/1\.0.*\r\nNats-Stream-Source:[ \t]*"
    r"(?P<stream>[^ \t\r\n]+) (?P<sequence>[0-9]{1,18})[ \r]"
)
_COMPARE_LIMIT = 12  # fields of a block; more are sorted, which is faster than comparing pairs

Positions = NDArray[np.int64]


def header_maps(blocks: pa.Array) -> pa.Array:
    """Return the fields of header blocks: :data:`HEADERS`, one map per block.

    The map is null for a missing block and empty for a block without fields. The function accepts
    any bytes: a server stores whatever a publisher sends as headers.

    Args:
        blocks: ``pa.binary()``; null or empty for a message without headers.
    """
    if blocks.null_count:
        blocks = blocks.fill_null(b"")
    data, border = _contiguous(blocks)
    present = border[1:] > border[:-1]
    if not present.any():
        return pa.nulls(len(blocks), HEADERS)
    irregular = _irregular(data, border, present)
    if irregular.any():
        normalized = [
            _normalized(block) for block in blocks.filter(pa.array(irregular)).to_pylist()
        ]
        blocks = pc.replace_with_mask(
            blocks, pa.array(irregular), pa.array(normalized, pa.binary())
        )
        data, border = _contiguous(blocks)
    begin, colon, value, end = _fields(data)
    offsets = begin.searchsorted(border)
    encoded = slices(data.data, begin, colon, pa.binary()).dictionary_encode()
    # Encoded again as strings: two names may differ only in bytes that are not UTF-8, and the keys
    # of a map must be distinct.
    names = _text(encoded.dictionary).dictionary_encode()
    code = names.indices.to_numpy()[encoded.indices.to_numpy()]
    values = _text(slices(data.data, value, end, pa.binary()))
    first = _first_of_name(code, offsets)
    if first is None:
        stops = np.arange(code.size + 1)
    else:
        order = first.argsort(kind="stable")
        values = values.take(pa.array(order))
        new = first == np.arange(first.size)
        stops = np.flatnonzero(np.append(new[order], True))
        offsets = np.append(0, new.cumsum())[offsets]
        code = code[new]
    lists = pa.ListArray.from_arrays(pa.array(stops, pa.int32()), values, type=HEADERS.item_type)
    entries = pa.StructArray.from_arrays(
        [names.dictionary.take(pa.array(code)), lists], fields=_ENTRY
    )
    valid = None if present.all() else pa.array(present).buffers()[1]
    place = pa.py_buffer(offsets.astype(np.int32))
    return pa.Array.from_buffers(HEADERS, len(blocks), [valid, place], children=[entries])


def origins(blocks: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return where a stream with sources has its messages from: streams and sequences.

    A server writes ``Nats-Stream-Source: <stream> <sequence> <filter> <transform>`` behind the
    publisher's fields, and later versions further words (docs/internals/measurements.md, "Sources
    of a stream"). So the last field of that name counts.

    Args:
        blocks: ``pa.binary()``; null or empty for a message without headers.

    Returns:
        ``pa.string()`` and ``pa.int64()``; null for a message without the field, or with another
        value.
    """
    # The regular expression is greedy: it matches the last such field.
    found = pc.extract_regex(blocks, _ORIGIN)
    if found.null_count == len(found):
        return pa.nulls(len(blocks), pa.string()), pa.nulls(len(blocks), pa.int64())
    streams, sequences = pc.struct_field(found, "stream"), pc.struct_field(found, "sequence")
    return _text(streams), sequences.cast(pa.string()).cast(pa.int64())


def _contiguous(blocks: pa.Array) -> tuple[NDArray[np.uint8], Positions]:
    """Return the contiguous bytes of the blocks, and the borders of the blocks in them."""
    _, offsets, values = blocks.buffers()
    border = np.frombuffer(offsets, np.int32)[blocks.offset : blocks.offset + len(blocks) + 1]
    data = np.frombuffer(values or b"", np.uint8)[border[0] : border[-1]]
    return data, (border - border[0]).astype(np.int64)


def _irregular(
    data: NDArray[np.uint8], border: Positions, present: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Return which blocks lack the regular first line or end."""
    begin, stop = border[:-1], border[1:]
    whole = stop - begin >= len(_VERSION + _LAST)
    irregular = present & ~whole
    begin, stop = begin[whole], stop[whole]
    if begin.size:
        good = _equal(data, begin, _FIRST) & _equal(data, stop - len(_LAST), _LAST)
        irregular[whole] = ~good
    return irregular


def _equal(data: NDArray[np.uint8], begin: Positions, expected: bytes) -> NDArray[np.bool_]:
    actual = bytes_at(data.data, begin, len(expected)).view(np.uint8).reshape(begin.size, -1)
    same: NDArray[np.bool_] = (actual == np.frombuffer(expected, np.uint8)).all(axis=1)
    return same


def _normalized(block: bytes) -> bytes:
    """Return a regular header block with the fields of any bytes."""
    first, *lines = block.split(_CRLF)
    if not first.startswith(_VERSION):
        lines = []
    return _FIRST + b"".join(line + _CRLF for line in lines if line) + _CRLF


def _fields(data: NDArray[np.uint8]) -> tuple[Positions, Positions, Positions, Positions]:
    """Return, for each field, where its name starts and ends and its value starts and ends."""
    mark = np.flatnonzero((data == _LF) | (data == _COLON))
    ends = data[mark] == _LF
    alone = ends & (data[mark - 1] != _CR)
    if alone.any():  # such a line feed is part of a name or value
        mark, ends = mark[~alone], ends[~alone]
    line = np.flatnonzero(ends)
    begin, end = mark[line[:-1]] + 1, mark[line[1:]] - 1
    # The next mark after the start of a line: its first colon, or its end if it lacks a colon. The
    # empty line and the first line of the next block lack one too.
    colon = mark[line[:-1] + 1]
    named = (line[1:] > line[:-1] + 1) & (colon > begin)
    begin, colon, end = begin[named], colon[named], end[named]
    value = colon + 1
    for _ in range(_BLANKS):
        blank = _blank(data[value])
        if not blank.any():
            break
        value += blank
    for i in np.flatnonzero(_blank(data[value])).tolist():
        text = data[value[i] : end[i]].tobytes()
        value[i] += len(text) - len(text.lstrip(b" \t"))
    return begin, colon, value, end


def _blank(letters: NDArray[np.uint8]) -> NDArray[np.bool_]:
    blank: NDArray[np.bool_] = (letters == _SPACE) | (letters == _TAB)
    return blank


def _text(raw: pa.Array) -> pa.Array:
    try:
        return raw.cast(pa.string())
    except pa.ArrowInvalid:
        values = (
            None if value is None else value.decode(errors="replace") for value in raw.to_pylist()
        )
        return pa.array(values, pa.string(), size=len(raw))


def _first_of_name(code: NDArray[np.int32], offsets: Positions) -> Positions | None:
    """Return, for each field, the first field of its block with its name; None without repeats."""
    widths = np.diff(offsets)
    longest = int(widths.max())
    if longest < 2:
        return None
    # One number identifies a block and a name.
    block_and_name = np.repeat(np.arange(widths.size), widths) * (int(code.max()) + 1) + code
    if longest <= _COMPARE_LIMIT and not any(
        (block_and_name[k:] == block_and_name[:-k]).any() for k in range(1, longest)
    ):
        return None
    _, index, inverse = np.unique(block_and_name, return_index=True, return_inverse=True)
    first: Positions = index[inverse]
    return first
