"""Count the messages that match from a sequence on (docs/internals/measurements.md, Servers 4).

A Direct Get for a batch of one message ends with an EOB whose ``Nats-Num-Pending`` counts the
messages that still match. A mirror that holds only a part of the stream may respond, so a reply is
used only if its message names the stream itself in ``Nats-Stream``, and a 404 only if the stream
leader confirms it. Otherwise (also where Direct Get is off, the EOB did not pass an account import,
or the server is older than 2.11) a temporary consumer has the number in its ``num_pending``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.consumers import temporary_consumer
from nats_stream_source.jetstream.direct_get.request import send_batch_request
from nats_stream_source.wire.direct_get.replies import EOB, NOT_FOUND

_MAX_DIRECT_GETS = 4  # parallel requests, one for each filter


@dataclass(frozen=True, slots=True)
class MessageCount:
    """A number of messages, and the sequence of the first one: None if unknown."""

    messages: int
    first_seq: int | None = None

    def gap_end(self, start: int, end: int) -> int:
        """The last sequence of ``[start, end]`` before the first message after ``start``."""
        if not self.messages:
            return end
        return start if self.first_seq is None else min(max(start, self.first_seq - 1), end)


async def count_messages(
    jetstream: JetStream, stream: str, seq: int, filters: Sequence[str]
) -> MessageCount:
    """Count the messages at ``seq`` or later that match one of ``filters`` (none: all).

    Filters do not overlap, so their counts add up. Up to four are requested in parallel; for more
    one consumer is cheaper: 50 filters on 1,000,000 keys take 5 to 12 ms instead of 35 to 95.
    """
    if len(filters) <= _MAX_DIRECT_GETS:
        requests = (
            _count_with_direct_get(jetstream, stream, seq, one) for one in filters or (None,)
        )
        counts = await asyncio.gather(*requests)
        known = [count for count in counts if count is not None]
        if len(known) == len(counts):
            firsts = (count.first_seq for count in known if count.first_seq is not None)
            return MessageCount(sum(count.messages for count in known), min(firsts, default=None))
    position = {"deliver_policy": "by_start_sequence", "opt_start_seq": seq}
    async with temporary_consumer(
        jetstream, stream, "rank", filters, headers_only=True, **position
    ) as consumer:
        return MessageCount(consumer.num_pending)


async def _count_with_direct_get(
    jetstream: JetStream, stream: str, seq: int, filter_subject: str | None
) -> MessageCount | None:
    """The count, or None where a Direct Get does not give a reliable one."""
    request: dict[str, Any] = {"seq": seq, "batch": 1}
    if filter_subject is not None:
        request["next_by_subj"] = filter_subject
    reply = await send_batch_request(jetstream.connection, stream, request)
    if reply is None:
        return None
    if reply.code == NOT_FOUND:
        message = await jetstream.message(stream, seq=seq, next_by_subj=filter_subject or ">")
        return MessageCount(0) if message is None else None
    if reply.code != EOB or not reply.page or not reply.page.all_from(stream):
        return None
    assert reply.status is not None
    num_pending = reply.status.num_pending
    if num_pending is None:
        return None
    return MessageCount(len(reply.page) + num_pending, int(reply.page.stream_seq[0]))
