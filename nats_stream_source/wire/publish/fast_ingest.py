"""Fast ingest (ADR-50, nats-server 2.14): the frames of a batch, and the server's responses.

A *batch* is a sequence of messages with an id, numbered from 1. The reply subject of a message has
all that the server needs::

    <inbox>.<batch id>.<flow>.fail.<number>.<operation>.$FI

*flow* is the number of messages after which the client wants an acknowledgement at the latest.
``fail`` ends the batch at the first message that the server did not receive or store, so that an
acknowledgement covers all messages before it. The *operation* starts the batch, appends to it,
commits it with its last message, or asks for the last acknowledgement again (ping). The responses
are JSON objects, on the reply subject of one of the messages:

- ``{"type":"ack","seq":500,"msgs":500}``: the first 500 messages are stored; the next
  acknowledgement follows after 500 more. The response to the first message has ``seq`` 0;
- ``{"type":"gap","last_seq":3,"seq":5}``: messages 3 and 4 were not received, and the batch ends;
- ``{"type":"err","seq":3,"error":{...}}``: message 3 was rejected, and the batch ends;
- ``{"stream":"S","seq":17,"batch":"id","count":9}``: the batch has ended with 9 messages, which are
  all stored;
- ``{"error":{...},"stream":"S","seq":0}``: the message was rejected.

The batch id has the serial of the batch's first message, so that a response leads to its message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pyarrow as pa

from nats_stream_source.wire.publish.frames import EncodedFrames, MessageColumns, encode

MAX_FLOW = 500
"""The most messages that servers acknowledge together."""

END, PING = 3, 4
"""Operations of :func:`control`. After an end, the server rejects messages of the batch that arrive
later; after a ping, it repeats its last acknowledgement."""

_START, _APPEND, _COMMIT = 0, 1, 2
_SUFFIX = b"$FI"
_TOKENS = 6  # of a reply subject, from the batch id on
_BINARY = pa.binary()


def encode_batch(
    messages: MessageColumns, inbox: str, first_serial: int, start: int, flow: int
) -> EncodedFrames:
    """Encode ``messages``; those from ``start`` on are one batch, which the last one commits.

    Args:
        inbox: the beginning of all reply subjects, up to the batch id; ends with a dot.
        first_serial: the serial of the first message.
        start: the index of the first message of the batch. The frames before it must not be sent.
        flow: the number of messages that are acknowledged together, at most :data:`MAX_FLOW`.

    Raises:
        OverflowError: as :func:`frames.encode`.
    """
    n = len(messages)
    operations = np.full(n, _APPEND, np.int8)
    operations[start : start + 1] = _START
    operations[n - 1 :] = _COMMIT
    suffixes = pa.DictionaryArray.from_arrays(
        pa.array(operations), pa.array([_suffix(n) for n in (_START, _APPEND, _COMMIT)], _BINARY)
    )
    return encode(
        messages,
        _prefix(inbox, first_serial + start, flow),
        first_serial,
        numbers=np.arange(1 - start, n + 1 - start),
        reply_suffixes=suffixes.cast(_BINARY),
    )


def control(operation: int, subject: str, inbox: str, batch: int, flow: int, number: int) -> bytes:
    """A frame that is not stored: :data:`PING` or :data:`END`.

    Args:
        subject: any subject of the stream.
        batch: the serial of the batch's first message.
        number: for a ping, the number of the last message that was sent; for an end, the next one.
    """
    reply = f"{_prefix(inbox, batch, flow)}{number}".encode() + _suffix(operation)
    return b"PUB %s %s 0\r\n\r\n" % (subject.encode(), reply)


def _prefix(inbox: str, batch: int, flow: int) -> str:
    # Servers know batches by the last token, so the token of the inbox is repeated.
    return f"{inbox}{inbox[:-1].rpartition('.')[2]}-{batch}.{flow}.fail."


def _suffix(operation: int) -> bytes:
    return b".%d.%s" % (operation, _SUFFIX)


class ResponseKind(Enum):
    """Kind of a response.

    ``ACK``: messages are stored. ``END``: messages are stored, and the batch has ended. ``GAP``:
    the server did not receive a message. ``ERROR``: a message was rejected.
    """

    ACK = "ack"
    END = "end"
    GAP = "gap"
    ERROR = "err"


@dataclass(frozen=True, slots=True)
class BatchResponse:
    """A response of the server.

    Attributes:
        stored: ``ACK``, ``END``: number of messages of the batch that are stored.
        flow: ``ACK``: the next acknowledgement follows after so many messages.
        missing: ``GAP``: the number of the first message that the server did not receive.
        stream: ``END``, and ``ERROR`` if the server names it: the stream.
        error: ``ERROR``: the server's ``error`` object.
    """

    kind: ResponseKind
    stored: int = 0
    flow: int = 0
    missing: int = 0
    stream: str | None = None
    error: Mapping[str, Any] | None = None


def parse_reply(subject: bytes, inbox: bytes) -> tuple[int, int] | None:
    """The batch (the serial of its first message) and the message's number, from a reply subject.

    Returns None for a subject that :func:`encode_batch` does not create.
    """
    tokens = subject[len(inbox) :].split(b".")
    if not subject.startswith(inbox) or len(tokens) != _TOKENS or tokens[-1] != _SUFFIX:
        return None
    batch, number = tokens[0].rpartition(b"-")[2], tokens[3]
    return (int(batch), int(number)) if batch.isdigit() and number.isdigit() else None


def parse_response(payload: bytes) -> BatchResponse:
    """Parse a response; ValueError if the payload is not a response of fast ingest."""
    try:
        response = json.loads(payload)
        kind, error = response.get("type"), response.get("error")
        if kind == ResponseKind.ACK.value:
            return BatchResponse(
                ResponseKind.ACK, stored=_natural(response, "seq"), flow=_natural(response, "msgs")
            )
        if kind == ResponseKind.GAP.value:
            return BatchResponse(ResponseKind.GAP, missing=_natural(response, "last_seq"))
        if isinstance(error, dict):
            return BatchResponse(ResponseKind.ERROR, stream=response.get("stream"), error=error)
        return BatchResponse(
            ResponseKind.END,
            stored=_natural(response, "count"),
            stream=response["stream"],
        )
    except (TypeError, KeyError, AttributeError):
        raise ValueError("expected a JSON object with 'type', 'error' or 'count'") from None


def _natural(response: Mapping[str, Any], name: str) -> int:
    if not isinstance(number := response[name], int) or number < 0:
        raise ValueError(f"{name!r} is {number!r}, expected a natural number")
    return number
