"""Stored messages as the frames in which a consumer would have delivered them.

Few messages are cheaper to ask for one by one than to have a consumer for (``source/small_range``).
Their answers are put into the bytes that a server would have sent, and cut again by a ``Framer``:
what comes after, down to the rows, is one path for both, and there is nothing to keep equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nats_stream_source.wire.frames import Framer, Frames

_CONSUMER = "-"  # a name that no consumer has: the messages were not delivered by one


@dataclass(frozen=True, slots=True)
class Delivered:
    """One message.

    ``timestamp_ns`` is when the stream stored it, in nanoseconds since 1970; ``headers`` its header
    block, empty where it has none.
    """

    subject: str
    stream_seq: int
    timestamp_ns: int
    headers: bytes
    payload: bytes


def deliveries(stream: str, messages: Sequence[Delivered]) -> Frames:
    """Frames of ``messages`` in their order, with the reply subjects of ADR-15 ("JSAck", v1).

    Consumer sequences count from 1; pending is how many follow.
    """
    return Framer().feed(
        b"".join(
            frame_of(stream, message, consumer_seq, len(messages) - consumer_seq)
            for consumer_seq, message in enumerate(messages, 1)
        )
    )


def with_size(block: bytes, size: int) -> bytes:
    """A header block as a consumer with ``headers_only`` delivers it: the payload's size is in it.

    The server cuts the last two bytes off without a look at them, whatever the publisher sent.
    """
    fields = block[:-2] if block else b"NATS/1.0\r\n"
    return b"%sNats-Msg-Size: %d\r\n\r\n" % (fields, size)


def frame_of(stream: str, message: Delivered, consumer_seq: int = 0, pending: int = 0) -> bytes:
    """The bytes in which ``message`` would have been delivered."""
    subject = (
        f"{message.subject} 1 $JS.ACK.{stream}.{_CONSUMER}.1.{message.stream_seq}.{consumer_seq}."
        f"{message.timestamp_ns}.{pending}"
    ).encode()
    block, payload = message.headers, message.payload
    if not block:
        return b"MSG %s %d\r\n%s\r\n" % (subject, len(payload), payload)
    sizes = b"%d %d" % (len(block), len(block) + len(payload))
    return b"HMSG %s %s\r\n%s%s\r\n" % (subject, sizes, block, payload)
