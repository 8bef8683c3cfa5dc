"""Header blocks as one column: for each message a map from names to values, in their order.

Theory of operation. The blocks of a batch lie end to end in one buffer. A line's name ends at its
first colon, its value at the CRLF: one look for colons and line feeds finds all of them, and the
names and values of all fields are Arrow arrays laid over that buffer (``wire/arrow.py``). Which
fields are a block's follows from where it begins. Names come again and again, so each different one
is kept once; only where one repeats within a block are fields moved, so that its values stand
together.

That holds for blocks that begin with the line ``NATS/1.0`` and end with an empty one. The few
others are rewritten before, one by one.

What a field is (ADR-4, and as NATS's Go client has it; but that gives up on all of a block where
here only a line is left out):

- names keep their case; one that repeats has all its values, in order;
- spaces and tabs before a value are not part of it, those after it are;
- a line without a colon, or without a name, is no field, nor is a status behind ``NATS/1.0``;
- bytes that do not begin with ``NATS/1.0`` hold no fields;
- what is not UTF-8 becomes U+FFFD, since Spark's strings cannot hold it.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nats_stream_source.wire.arrow import slices
from nats_stream_source.wire.layout import bytes_at

HEADERS = pa.map_(pa.string(), pa.list_(pa.field("element", pa.string())))
"""``MAP<STRING, ARRAY<STRING>>``, exactly as Spark has it in Arrow."""

_ENTRY = [pa.field("key", pa.string(), nullable=False), pa.field("value", HEADERS.item_type)]
_VERSION = b"NATS/1.0"
_CRLF = b"\r\n"
_FIRST = _VERSION + _CRLF
_LAST = _CRLF + _CRLF
_CR, _LF, _COLON, _SPACE, _TAB = b"\r\n: \t"
_BLANKS = 3  # blanks before a value that are looked at together; more are nobody's custom
_FEW = 12  # fields of a block; more are sorted, since comparing all with all would take longer

Positions = NDArray[np.int64]


def header_maps(blocks: pa.Array) -> pa.Array:
    """The fields of header blocks: :data:`HEADERS`, as many as there are blocks.

    Null where there is no block, an empty map where one has no fields. It never fails: a server
    stores whatever a publisher sends as headers.

    Args:
        blocks: ``pa.binary()``; null or empty where a message has none.
    """
    if blocks.null_count:
        blocks = blocks.fill_null(b"")
    data, border = _laid_out(blocks)
    present = border[1:] > border[:-1]
    if not present.any():
        return pa.nulls(len(blocks), HEADERS)
    odd = _odd(data, border, present)
    if odd.any():
        mended = [_mended(block) for block in blocks.filter(pa.array(odd)).to_pylist()]
        blocks = pc.replace_with_mask(blocks, pa.array(odd), pa.array(mended, pa.binary()))
        data, border = _laid_out(blocks)
    begin, colon, value, end = _fields(data)
    offsets = begin.searchsorted(border)
    encoded = slices(data.data, begin, colon, pa.binary()).dictionary_encode()
    # Once more, as text: two names may differ in bytes that are no text, and no key comes twice.
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


def _laid_out(blocks: pa.Array) -> tuple[NDArray[np.uint8], Positions]:
    """The blocks' bytes, end to end, and their borders in it."""
    _, offsets, values = blocks.buffers()
    border = np.frombuffer(offsets, np.int32)[blocks.offset : blocks.offset + len(blocks) + 1]
    data = np.frombuffer(values or b"", np.uint8)[border[0] : border[-1]]
    return data, (border - border[0]).astype(np.int64)


def _odd(
    data: NDArray[np.uint8], border: Positions, present: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Which blocks do not begin or end as they should."""
    begin, stop = border[:-1], border[1:]
    whole = stop - begin >= len(_VERSION + _LAST)
    odd = present & ~whole
    begin, stop = begin[whole], stop[whole]
    if begin.size:
        good = _are(data, begin, _FIRST) & _are(data, stop - len(_LAST), _LAST)
        odd[whole] = ~good
    return odd


def _are(data: NDArray[np.uint8], begin: Positions, wanted: bytes) -> NDArray[np.bool_]:
    found = bytes_at(data.data, begin, len(wanted)).view(np.uint8).reshape(begin.size, -1)
    same: NDArray[np.bool_] = (found == np.frombuffer(wanted, np.uint8)).all(axis=1)
    return same


def _mended(block: bytes) -> bytes:
    """The fields of any bytes, between a proper first line and a proper end."""
    first, *lines = block.split(_CRLF)
    if not first.startswith(_VERSION):
        lines = []
    return _FIRST + b"".join(line + _CRLF for line in lines if line) + _CRLF


def _fields(data: NDArray[np.uint8]) -> tuple[Positions, Positions, Positions, Positions]:
    """Where each field's name begins and ends, and where its value does."""
    mark = np.flatnonzero((data == _LF) | (data == _COLON))
    ends = data[mark] == _LF
    alone = ends & (data[mark - 1] != _CR)
    if alone.any():  # such a line feed is part of what it stands in
        mark, ends = mark[~alone], ends[~alone]
    line = np.flatnonzero(ends)
    begin, end = mark[line[:-1]] + 1, mark[line[1:]] - 1
    # The next mark after a line's begin: its first colon, or its own end if it has none. So have
    # the empty line and the first line of the next block, which make one pair of ends.
    colon = mark[line[:-1] + 1]
    named = (line[1:] > line[:-1] + 1) & (colon > begin)
    begin, colon, end = begin[named], colon[named], end[named]
    value = colon + 1
    for _ in range(_BLANKS):
        blank = _blank(data[value])
        if not blank.any():
            break
        value += blank
    for one in np.flatnonzero(_blank(data[value])).tolist():
        text = data[value[one] : end[one]].tobytes()
        value[one] += len(text) - len(text.lstrip(b" \t"))
    return begin, colon, value, end


def _blank(letters: NDArray[np.uint8]) -> NDArray[np.bool_]:
    blank: NDArray[np.bool_] = (letters == _SPACE) | (letters == _TAB)
    return blank


def _text(raw: pa.Array) -> pa.Array:
    try:
        return raw.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([one.decode(errors="replace") for one in raw.to_pylist()], pa.string())


def _first_of_name(code: NDArray[np.int32], offsets: Positions) -> Positions | None:
    """For each field, the first one of its block that has its name; None if none repeats."""
    widths = np.diff(offsets)
    most = int(widths.max())
    if most < 2:
        return None
    # One number for a block and a name.
    both = np.repeat(np.arange(widths.size), widths) * (int(code.max()) + 1) + code
    if most <= _FEW and not any((both[k:] == both[:-k]).any() for k in range(1, most)):
        return None
    _, index, inverse = np.unique(both, return_index=True, return_inverse=True)
    first: Positions = index[inverse]
    return first
