"""One reply to a Direct Get (ADR-31, "Response Format"), parsed one by one: the definition.

A message has the publisher's header fields first and the server's fields after them::

    NATS/1.0
    <the publisher's fields>
    Nats-Stream: ORDERS                      the stream, or the mirror, that sent the reply
    Nats-Subject: orders.1
    Nats-Sequence: 17
    Nats-Time-Stamp: 2026-11-21T05:04:14.123456789Z
    Nats-Num-Pending: 3                      in a batch only, like the next field
    Nats-Last-Sequence: 12                   of the previous message of this batch; 0 for the first

Publishers may send any fields, also ``Nats-Sequence: 1``, ``Status: 404`` and a first line with a
status. So only the *last* ``Nats-Stream`` and the lines after it count. A block without these four
fields is a :class:`DirectGetStatus`: the end of a batch (204), no message found (404), an invalid
request (408), too many subjects (413), no responders (503). Many replies at once: ``replies.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire.headers import parse_headers

STREAM, SUBJECT, SEQUENCE = b"\r\nNats-Stream: ", b"\r\nNats-Subject: ", b"\r\nNats-Sequence: "
TIME, PENDING = b"\r\nNats-Time-Stamp: ", b"\r\nNats-Num-Pending: "
PREVIOUS = b"\r\nNats-Last-Sequence: "
BARE = len(b"NATS/1.0")

_FIELDS = re.compile(
    STREAM
    + rb"([^\r\n]*)"
    + SUBJECT
    + rb"([^\r\n]*)"
    + SEQUENCE
    + rb"(\d{1,19})"
    + TIME
    + rb"([^\r\n]*)(?:"
    + PENDING
    + rb"(\d{1,19})"
    + PREVIOUS
    + rb"(\d{1,19}))?"
    rb"(?:\r\n[^\r\n]+)*\r\n\r\n"
)
_MAX_INT64 = (1 << 63) - 1


Block: TypeAlias = bytes
"""A header block, from ``NATS/1.0`` to the empty line."""


class Row(NamedTuple):
    """The server's fields of one message: numbers, and positions in its header block.

    ``pending`` and ``previous`` (``Nats-Num-Pending``, ``Nats-Last-Sequence``) are -1 where they
    are absent: outside of batches, and in the reply of a server before 2.11 to a batch request.
    ``own_end`` is the end of the publisher's fields and the start of the server's, at
    ``\\r\\nNats-Stream: ``.
    """

    seq: int
    pending: int
    previous: int
    own_end: int
    stream_end: int
    subject_end: int
    time_begin: int
    time_end: int


@dataclass(frozen=True, slots=True)
class DirectGetStatus:
    """A reply without a message; the numbers are those of the EOB, None where they are absent."""

    code: int
    description: str
    num_pending: int | None = None
    last_seq: int | None = None
    up_to_seq: int | None = None


def read_row(block: Block) -> Row | None:
    """Parse the server's fields of a header block; None for a status and for other blocks."""
    own_end = block.rfind(STREAM)
    match = _FIELDS.fullmatch(block, own_end) if own_end >= 0 else None
    if match is None:
        return None
    seq, pending, previous = (
        -1 if digits is None else int(digits) for digits in match.group(3, 5, 6)
    )
    if max(seq, pending, previous) > _MAX_INT64:
        return None
    time_begin, time_end = match.span(4)
    return Row(seq, pending, previous, own_end, match.end(1), match.end(2), time_begin, time_end)


def read_status(block: Block) -> DirectGetStatus:
    """Parse the status of a header block.

    Args:
        block: empty for a frame without headers.

    Raises:
        ProtocolError: the block is not a status.
    """
    if not block:
        raise ProtocolError(
            "invalid Direct Get reply: it has no headers, expected a message or a status"
        )
    headers = parse_headers(block)
    if headers.status is None:
        raise ProtocolError(
            "invalid Direct Get reply: its headers are neither of a message nor a status"
        )

    def number(name: str) -> int | None:
        value = headers.get(name)
        # isdigit() alone accepts "²".
        valid = value is not None and value.isascii() and value.isdigit() and len(value) < 20
        return int(value) if value is not None and valid else None

    return DirectGetStatus(
        headers.status,
        headers.description,
        number("Nats-Num-Pending"),
        number("Nats-Last-Sequence"),
        number("Nats-UpTo-Sequence"),
    )
