"""Messages asked of the leader one by one: their subjects, how many at once, and as deliveries."""

from __future__ import annotations

from collections.abc import Sequence

from nats_stream_source.jetstream.api import JetStream, StoredMessage
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.jetstream.together import MOST
from nats_stream_source.wire.deliveries import Delivered, with_size

_MOST_BYTES = 64 << 20  # of answers that may be under way at once, were each of the largest size


async def listed_subjects(jetstream: JetStream, stream: str, filters: Sequence[str]) -> set[str]:
    """The subjects that match one of ``filters`` (none: all), as the leader has them."""
    found: set[str] = set()
    for one in filters or (">",):
        found |= await jetstream.subjects(stream, one)
    return found


def most_at_once(jetstream: JetStream) -> int:
    """How many messages may be asked for at once, whatever their size."""
    return max(1, min(MOST, _MOST_BYTES // max(jetstream.connection.client.max_payload, 1)))


def as_delivered(message: StoredMessage, *, headers_only: bool) -> Delivered:
    """A message as a consumer would deliver it."""
    headers, payload = message.headers, message.data
    if headers_only:
        headers, payload = with_size(headers, len(payload)), b""
    return Delivered(message.subject, message.seq, nanoseconds(message.time), headers, payload)
