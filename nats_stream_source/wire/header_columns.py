"""Header blocks as one column: for each message a map from names to values, in their order.

Theory of operation. Arrow splits the blocks at their CRLFs into one array of lines, and finds the
first colon of each. The names and values of all fields are slices of that array's bytes
(``wire/arrow_slices.py``). Fields are moved only where a name repeats within a block, so that its
values are adjacent.

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

from nats_stream_source.wire.arrow_slices import slices

HEADERS = pa.map_(pa.string(), pa.list_(pa.field("element", pa.string())))
"""``MAP<STRING, ARRAY<STRING>>``, exactly the Arrow type that Spark uses."""

_ENTRY = [pa.field("key", pa.string(), nullable=False), pa.field("value", HEADERS.item_type)]
_VERSION = "NATS/1.0"
_ORIGIN = (
    r"(?s)^NATS/1\.0.*\r\nNats-Stream-Source:[ \t]*"
    r"(?P<stream>[^ \t\r\n]+) (?P<sequence>[0-9]{1,18})[ \r]"
)


def header_maps(blocks: pa.Array) -> pa.Array:
    """Return the fields of header blocks: :data:`HEADERS`, one map per block.

    The map is null for a missing block and empty for a block without fields. The function accepts
    any bytes: a server stores whatever a publisher sends as headers.

    Args:
        blocks: ``pa.binary()``; null or empty for a message without headers.
    """
    blocks = blocks.fill_null(b"")
    present = pc.binary_length(blocks).to_numpy() > 0
    if not present.any():
        return pa.nulls(len(blocks), HEADERS)
    split = pc.split_pattern(blocks, "\r\n")
    block, lines = split.value_parent_indices().to_numpy(), split.flatten()
    colon = pc.find_substring(lines, ":").to_numpy()
    is_field = pc.starts_with(blocks, _VERSION).to_numpy(zero_copy_only=False)[block] & (colon > 0)
    is_field[np.diff(block, prepend=-1) > 0] = False  # the first line of a block
    data = np.frombuffer(lines.buffers()[2], np.uint8).data
    border = np.frombuffer(lines.buffers()[1], np.int32, len(lines) + 1, 4 * lines.offset)
    border = border.astype(np.int64)
    begin, end = border[:-1][is_field], border[1:][is_field]
    block, colon = block[is_field], begin + colon[is_field]
    # A name that repeats is stored once. Encoded again as strings: two names may differ only in
    # bytes that are not UTF-8, and the keys of a map must be distinct.
    encoded = slices(data, begin, colon, pa.binary()).dictionary_encode()
    names = _text(encoded.dictionary).dictionary_encode()
    code = names.indices.to_numpy()[encoded.indices.to_numpy()]
    values = pc.ascii_ltrim(_text(slices(data, colon + 1, end, pa.binary())), " \t")
    stops = np.arange(code.size + 1)
    # One number identifies a block and a name.
    field = block * (len(names.dictionary) + 1) + code
    if (np.diff(np.sort(field)) == 0).any():
        _, index, inverse = np.unique(field, return_index=True, return_inverse=True)
        first = index[inverse]  # for each field, the first one of its block with its name
        order = first.argsort(kind="stable")
        values = values.take(pa.array(order))
        new = first == np.arange(first.size)
        stops = np.flatnonzero(np.append(new[order], True))
        block, code = block[new], code[new]
    lists = pa.ListArray.from_arrays(pa.array(stops, pa.int32()), values, type=HEADERS.item_type)
    keys = names.dictionary.take(pa.array(code))
    entries = pa.StructArray.from_arrays([keys, lists], fields=_ENTRY)
    place = block.searchsorted(np.arange(len(blocks) + 1)).astype(np.int32)
    valid = None if present.all() else pa.array(present).buffers()[1]
    return pa.Array.from_buffers(
        HEADERS, len(blocks), [valid, pa.py_buffer(place)], children=[entries]
    )


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


def _text(raw: pa.Array) -> pa.Array:
    try:
        return raw.cast(pa.string())
    except pa.ArrowInvalid:
        values = (
            None if value is None else value.decode(errors="replace") for value in raw.to_pylist()
        )
        return pa.array(values, pa.string(), size=len(raw))
