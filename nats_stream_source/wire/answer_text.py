"""One answer to a Direct Get (ADR-31, "Response Format"), read plainly: the definition.

A message comes with the publisher's own header fields, and after them the server's::

    NATS/1.0
    <the publisher's fields>
    Nats-Stream: ORDERS                      who answered: the stream, or a mirror of it
    Nats-Subject: orders.1
    Nats-Sequence: 17
    Nats-Time-Stamp: 2026-11-21T05:04:14.123456789Z
    Nats-Num-Pending: 3                      in a batch only, as the next one
    Nats-Last-Sequence: 12                   of the message before it in this batch; 0 for the first

Publishers write what they like, ``Nats-Sequence: 1`` and ``Status: 404`` and even a first line with
a status, so what counts is the *last* ``Nats-Stream`` and what follows it. A block without these
four fields is a :class:`Status`: the end of a batch (204), nothing found (404), a request that
cannot be (408), too many subjects (413), nobody there (503).

:func:`read_row` finds the numbers and where the texts stand; :func:`answer_of` makes an
:class:`Answer` of them. Many answers at once: ``wire/answer_columns.py``.
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
    """What stands in one message's header block: numbers, and positions in the block.

    ``pending`` and ``previous`` are -1 where they are absent. ``own_end`` is where the publisher's
    part ends and the server's begins, with ``\\r\\nNats-Stream: ``.
    """

    seq: int
    pending: int
    previous: int
    own_end: int
    stream_end: int
    subject_end: int
    time_begin: int
    time_end: int


class Answer(NamedTuple):
    """What the server says of one message.

    ``pending`` and ``previous`` (``Nats-Num-Pending``, ``Nats-Last-Sequence``) are None outside of
    batches, and in the answer of a server older than 2.11 to a request for one.
    ``own_end``: how many bytes of the header block are the publisher's; 0 where there are none.
    """

    stream: str
    subject: str
    seq: int
    time: str
    pending: int | None
    previous: int | None
    own_end: int


@dataclass(frozen=True, slots=True)
class Status:
    """An answer without a message; the numbers are those of the EOB, None where they are absent."""

    code: int
    description: str
    num_pending: int | None = None
    last_seq: int | None = None
    up_to_seq: int | None = None


def read_row(block: Block) -> Row | None:
    """What a header block says of its message; None where it is a status, or nothing."""
    at = block.rfind(STREAM)
    found = _FIELDS.fullmatch(block, at) if at >= 0 else None
    if found is None:
        return None
    seq, pending, previous = (-1 if text is None else int(text) for text in found.group(3, 5, 6))
    if max(seq, pending, previous) > _MAX_INT64:
        return None
    time_begin, time_end = found.span(4)
    return Row(seq, pending, previous, at, found.end(1), found.end(2), time_begin, time_end)


def answer_of(block: Block, row: Row) -> Answer:
    """The answer whose header block :func:`read_row` has read."""
    return Answer(
        _text(block[row.own_end + len(STREAM) : row.stream_end]),
        _text(block[row.stream_end + len(SUBJECT) : row.subject_end]),
        row.seq,
        _text(block[row.time_begin : row.time_end]),
        None if row.pending < 0 else row.pending,
        None if row.previous < 0 else row.previous,
        row.own_end if row.own_end > BARE else 0,
    )


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def read_status(block: Block) -> Status:
    """The status that a header block is.

    Args:
        block: empty for a frame without headers.

    Raises:
        ProtocolError: it is none.
    """
    if not block:
        raise ProtocolError("the answer to a Direct Get has no headers")
    headers = parse_headers(block)
    if headers.status is None:
        raise ProtocolError("the answer to a Direct Get is no status and names no message")

    def number(name: str) -> int | None:
        value = headers.get(name)
        # Not all that isdigit() is a number: "²".
        sound = value is not None and value.isascii() and value.isdigit() and len(value) < 20
        return int(value) if value is not None and sound else None

    return Status(
        headers.status,
        headers.description,
        number("Nats-Num-Pending"),
        number("Nats-Last-Sequence"),
        number("Nats-UpTo-Sequence"),
    )
