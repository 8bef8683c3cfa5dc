"""Header blocks: the status line of the server and the header fields of publishers.

A block (ADR-4) is ``NATS/1.0[ <status>[ <description>]]`` CRLF, then ``Name: value`` CRLF for each
field, then CRLF. Names are case-sensitive and may repeat.

Only the first line contains a status. A field is the publisher's data, whatever its name:
``Status: 404`` is not a status. Two kinds of fields have a meaning here: they make an entry of a KV
bucket a *marker* (:func:`operations`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pyarrow as pa

from nats_stream_source.err_codes import UNAVAILABLE
from nats_stream_source.errors import ProtocolError

KV_OPERATION = "KV-Operation"
MARKER_REASON = "Nats-Marker-Reason"
OPERATIONS = ("PUT", "DEL", "PURGE")
"""The operations of entries; a message without a header of a marker is a PUT."""

_NO_RESPONDERS = b"NATS/1.0 %d" % UNAVAILABLE
_REASONS = {"MaxAge": "PURGE", "Purge": "PURGE", "Remove": "DEL"}
_FIRST_LINE = re.compile(rb"NATS/1\.0(?:[ \t]+(\d{3})(?:[ \t]+([^\r\n]*?))?)?[ \t]*")


def is_no_responders(block: bytes) -> bool:
    """Whether a header block has the status of a subject without responders."""
    return block.startswith(_NO_RESPONDERS)


@dataclass(frozen=True, slots=True)
class Headers:
    """A parsed header block.

    ``status`` and ``description`` are those of the first line (None and "" for a message that is
    not a status message). ``fields`` are the names and values of the block, in order.

    Strings are decoded as UTF-8 with ``surrogateescape``: valid UTF-8 becomes the publisher's
    string, and ``value.encode("utf-8", "surrogateescape")`` returns the original bytes of any other
    value. Latin-1 would preserve the bytes too, but garble every name and value in UTF-8.
    """

    status: int | None
    description: str
    fields: tuple[tuple[str, str], ...]

    def get(self, name: str) -> str | None:
        """Return the first value of ``name`` (exact case), or None."""
        for field, value in self.fields:
            if field == name:
                return value
        return None

    def get_all(self, name: str) -> list[str]:
        """Return all values of ``name`` (exact case), in order."""
        return [value for field, value in self.fields if field == name]


def parse_headers(block: bytes) -> Headers:
    """Parse one header block (ADR-4).

    As in NATS's Go client, spaces and tabs before a value are not part of it; those after it are.

    Raises:
        ProtocolError: the first line is not ``NATS/1.0``, the status does not have three digits, a
            field lacks a name or a colon, or the block is incomplete.
    """
    if not block.endswith(b"\r\n\r\n"):
        raise ProtocolError(f"invalid header block: {_excerpt(block)} lacks the final empty line")
    first, *lines = block[:-4].split(b"\r\n")
    matched = _FIRST_LINE.fullmatch(first)
    if matched is None:
        raise ProtocolError(
            f"invalid header block: first line is {_excerpt(block)}, expected NATS/1.0"
        )
    status, description = matched.groups()
    fields = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name:
            raise ProtocolError(
                f"invalid header block: {_excerpt(block)} has a field without a name"
            )
        fields.append((_text(name), _text(value.lstrip(b" \t"))))
    return Headers(
        None if status is None else int(status), _text(description or b""), tuple(fields)
    )


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _excerpt(block: bytes) -> str:
    # Fields are the publisher's data and may be secret: only the first line is shown.
    return repr(block[:60].partition(b"\r\n")[0])


def operations(blocks: pa.Array) -> pa.Array:
    """Return the operation of each entry of a KV bucket, from its header block (ADR-8, ADR-43).

    Markers have ``KV-Operation: DEL`` or ``PURGE``, or ``Nats-Marker-Reason: MaxAge`` or ``Purge``
    (PURGE) or ``Remove`` (DEL). All other entries are PUT: unknown operations and reasons, entries
    without headers, and bytes that are not a header block. A server stores any bytes that a
    publisher sends as headers, and one such message must not make a bucket unreadable.

    Args:
        blocks: ``pa.binary()``; null or empty for entries without headers.

    Returns:
        ``pa.string()`` of the same length: 'PUT', 'DEL' or 'PURGE', never null.
    """
    # Deferred import: it takes 20 ms at the start of a query, and planners do not need it.
    import pyarrow.compute as pc

    starts = (pc.match_substring(blocks, b"\n" + start) for start in MARKER_STARTS)
    rows = pc.or_(*starts).fill_null(False)
    # Markers mostly share a few different blocks: each of them is parsed once.
    distinct = blocks.filter(rows).dictionary_encode()
    parsed = pa.array(map(_operation, distinct.dictionary.to_pylist()), pa.string())
    marked = parsed.take(distinct.indices)
    return pc.replace_with_mask(pa.repeat("PUT", len(blocks)), rows, marked)


MARKER_STARTS = (KV_OPERATION[:8].encode(), MARKER_REASON[:8].encode())
"""In the header block of a marker, one of these follows a line feed; of one length."""


def _operation(block: bytes) -> str:
    try:
        headers = parse_headers(block)
    except ProtocolError:
        return "PUT"
    operation = headers.get(KV_OPERATION)
    if operation in ("DEL", "PURGE"):
        return operation
    return _REASONS.get(headers.get(MARKER_REASON) or "", "PUT")
