"""Header blocks: the status that a server writes, and the fields that publishers write.

A block (ADR-4) is ``NATS/1.0[ <status>[ <description>]]`` CRLF, then ``Name: value`` CRLF for each
field, then CRLF. Names are case-sensitive and may repeat.

Status is only what stands in the first line. A field is the publisher's data, whatever it is
called: ``Status: 404`` is no status. The two kinds of field that do mean something here make an
entry of a KV bucket a *marker* (:func:`operations`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire.layout import bytes_at

KV_OPERATION = "KV-Operation"
MARKER_REASON = "Nats-Marker-Reason"

_OPERATIONS = {"DEL": "DEL", "PURGE": "PURGE"}
_REASONS = {"MaxAge": "PURGE", "Purge": "PURGE", "Remove": "DEL"}
_FIRST_LINE = re.compile(rb"NATS/1\.0(?:[ \t]+(\d{3})(?:[ \t]+([^\r\n]*?))?)?[ \t]*")


@dataclass(frozen=True, slots=True)
class Headers:
    """A parsed header block.

    ``status`` and ``description`` are those of the first line (None and "" for a message that is
    no status message). ``fields`` are names and values as they stand in the block, in order.

    Text is UTF-8 with ``surrogateescape``: what is valid reads as what the publisher wrote, and
    any other bytes survive too, since ``value.encode("utf-8", "surrogateescape")`` gives back the
    very bytes. Latin-1 would keep the bytes as well, but garble every name and value in UTF-8.
    """

    status: int | None
    description: str
    fields: tuple[tuple[str, str], ...]

    def get(self, name: str) -> str | None:
        """The first value of ``name`` (exact case), or None."""
        for field, value in self.fields:
            if field == name:
                return value
        return None

    def get_all(self, name: str) -> list[str]:
        """All values of ``name`` (exact case), in order."""
        return [value for field, value in self.fields if field == name]


def parse_headers(block: bytes) -> Headers:
    """Parse one header block (ADR-4).

    As NATS's Go client does it: spaces and tabs before a value are not part of it, those after it
    are.

    Raises:
        ProtocolError: no ``NATS/1.0`` line, a status that is no number of three digits, a field
            without a name or a colon, or the block is cut short.
    """
    if not block.endswith(b"\r\n\r\n"):
        raise ProtocolError(f"a header block without its end: {_shown(block)}")
    first, *lines = block[:-4].split(b"\r\n")
    matched = _FIRST_LINE.fullmatch(first)
    if matched is None:
        raise ProtocolError(f"a header block must begin with NATS/1.0: {_shown(block)}")
    status, description = matched.groups()
    fields = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name:
            raise ProtocolError(f"a header field without a name: {_shown(block)}")
        fields.append((_text(name), _text(value.lstrip(b" \t"))))
    return Headers(
        None if status is None else int(status), _text(description or b""), tuple(fields)
    )


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _shown(block: bytes) -> str:
    # Fields are the publisher's data and may be secret: the first line has to do.
    return repr(block[:60].partition(b"\r\n")[0])


def operations(blocks: pa.Array) -> pa.Array:
    """What each entry of a KV bucket does, from its header block (ADR-8, ADR-43).

    Only ``KV-Operation: DEL`` or ``PURGE``, or ``Nats-Marker-Reason: MaxAge`` or ``Purge`` (PURGE)
    or ``Remove`` (DEL), make a marker. All else is a PUT: an unknown operation or reason, no
    headers, and also bytes that are no header block at all, since a server stores whatever a
    publisher sends as headers and one such message must not make a bucket unreadable.

    Args:
        blocks: ``pa.binary()``; null or empty where there are no headers.

    Returns:
        ``pa.string()`` of the same length: 'PUT', 'DEL' or 'PURGE', never null.
    """
    rows = _named(blocks)
    codes = np.zeros(len(blocks), np.int32)
    if rows.size:
        # Markers mostly have one of a few blocks: each different one is parsed once.
        different = blocks.take(pa.array(rows)).dictionary_encode()
        parsed = [_NAMES.index(_operation(block)) for block in different.dictionary.to_pylist()]
        codes[rows] = np.array(parsed, np.int32)[different.indices.to_numpy()]
    return pa.array(_NAMES).take(pa.array(codes))


_NAMES = ["PUT", "DEL", "PURGE"]
_BEGINNINGS = [
    np.frombuffer(name[:8].encode(), np.int64)[0] for name in (KV_OPERATION, MARKER_REASON)
]


def _named(blocks: pa.Array) -> NDArray[np.intp]:
    """The blocks in which a line begins like one of the two names, and perhaps a few others."""
    if blocks.null_count:
        blocks = blocks.fill_null(b"")
    _, offsets, values = blocks.buffers()
    if values is None or values.size < 8:
        return np.empty(0, np.intp)
    border = np.frombuffer(offsets, np.int32)[blocks.offset : blocks.offset + len(blocks) + 1]
    data = np.frombuffer(values, np.uint8)
    # Not pc.match_substring: where every message has headers, that is a fifth of the whole work.
    line = np.flatnonzero(data[border[0] : border[-1]] == ord("\n")) + (border[0] + 1)
    line = line[: int(line.searchsorted(data.size - 8, side="right"))]
    letter = data[line]
    line = line[(letter == ord("K")) | (letter == ord("N"))]
    beginning = bytes_at(data.data, line, 8).view(np.int64)
    line = line[(beginning == _BEGINNINGS[0]) | (beginning == _BEGINNINGS[1])]
    return np.unique(border.searchsorted(line, side="right") - 1)


def _operation(block: bytes) -> str:
    try:
        headers = parse_headers(block)
    except ProtocolError:
        return "PUT"
    operation = _OPERATIONS.get(headers.get(KV_OPERATION) or "")
    reason = _REASONS.get(headers.get(MARKER_REASON) or "")
    return operation or reason or "PUT"
