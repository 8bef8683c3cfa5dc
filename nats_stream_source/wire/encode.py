"""Encode stored messages as the frames in which a consumer would have delivered them.

A few messages are cheaper to read one by one than by a consumer (``jetstream/ordered/reader.py``).
The messages are encoded as the bytes that a server would have sent, and a ``Framer`` parses these
bytes. So both ways share all further code, down to the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nats_stream_source.wire.consumer.deliveries import Deliveries
from nats_stream_source.wire.framing.frames import Framer

_CONSUMER = "-"  # not a valid consumer name: no consumer delivered the messages


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message to encode.

    Attributes:
        subject, stream_seq: its subject and its sequence in the stream.
        timestamp_ns: the time at which the stream stored it, in nanoseconds since 1970, UTC.
        headers: its header block, empty for a message without headers.
        payload: its payload.
    """

    subject: str
    stream_seq: int
    timestamp_ns: int
    headers: bytes
    payload: bytes


def encode_deliveries(stream: str, messages: Sequence[Delivery]) -> Deliveries:
    """Encode ``messages``, in order, with reply subjects as in ADR-15 ("JSAck", v1).

    Consumer sequences start at 1; pending is the number of messages that follow.
    """
    block = b"".join(
        encode_delivery(stream, message, consumer_seq, len(messages) - consumer_seq)
        for consumer_seq, message in enumerate(messages, 1)
    )
    return Deliveries.of(Framer().feed(block))


def add_size_header(block: bytes, size: int) -> bytes:
    """Add ``Nats-Msg-Size`` to a header block, as a consumer with ``headers_only`` delivers it.

    Like the server, remove the last two bytes of the block without checking them.
    """
    fields = block[:-2] if block else b"NATS/1.0\r\n"
    return b"%sNats-Msg-Size: %d\r\n\r\n" % (fields, size)


def encode_delivery(
    stream: str, message: Delivery, consumer_seq: int = 0, pending: int = 0
) -> bytes:
    """Return the frame, as bytes, in which a consumer would have delivered ``message``."""
    subject = (
        f"{message.subject} 1 $JS.ACK.{stream}.{_CONSUMER}.1.{message.stream_seq}.{consumer_seq}."
        f"{message.timestamp_ns}.{pending}"
    ).encode()
    block, payload = message.headers, message.payload
    if not block:
        return b"MSG %s %d\r\n%s\r\n" % (subject, len(payload), payload)
    sizes = b"%d %d" % (len(block), len(block) + len(payload))
    return b"HMSG %s %s\r\n%s%s\r\n" % (subject, sizes, block, payload)
