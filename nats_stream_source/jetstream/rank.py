"""How many messages match from a sequence on: the rank query (DESIGN 3.4).

A Direct Get for a batch of one ends with an EOB whose ``Nats-Num-Pending`` counts the messages that
still match after the one that was sent (ADR-31, "Batched requests"). It is cheap, but a mirror that
holds only a part of the stream may answer. So an answer counts only if the message in it names the
stream itself in ``Nats-Stream``, and a 404 only if the leader confirms it. Everything else (a
mirror, Direct Get off, no EOB through an account import, a server before 2.11) falls back to the
``num_pending`` of a consumer that is created for the question and deleted at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Sequence

from nats_stream_source.errors import PermissionDeniedError, RequestTimeoutError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.range_request import filter_config
from nats_stream_source.wire.frames import Frames
from nats_stream_source.wire.headers import Headers, parse_headers

_EOB_DEADLINE = 1.0  # seconds; an import that lets one message through never sends the EOB


async def count_from(jetstream: JetStream, stream: str, seq: int, filters: Sequence[str]) -> int:
    """The number of messages at ``seq`` or later that match one of ``filters`` (none: all).

    Filters do not overlap, so their counts add up; they are asked for in parallel.

    Raises:
        RequestTimeoutError and the other errors of :class:`JetStream`, from the fall-back.
    """
    counts = await asyncio.gather(
        *(_by_direct_get(jetstream, stream, seq, one) for one in filters or (None,))
    )
    total = 0
    for count in counts:
        if count is None:
            return await _by_consumer(jetstream, stream, seq, filters)
        total += count
    return total


async def _by_direct_get(
    jetstream: JetStream, stream: str, seq: int, filter_subject: str | None
) -> int | None:
    connection = jetstream.connection
    request: dict[str, object] = {"seq": seq, "batch": 1}
    if filter_subject is not None:
        request["next_by_subj"] = filter_subject
    subject = f"{connection.settings.api_prefix}.DIRECT.GET.{stream}"
    reply = connection.client.new_inbox()
    inbox = await connection.inbox(reply)

    async def ask() -> list[Frames]:
        await connection.client.publish(subject, json.dumps(request).encode(), reply=reply)
        answer: list[Frames] = []
        deadline = asyncio.get_running_loop().time() + _EOB_DEADLINE
        while not (answer and _ends(answer[-1])):
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0 or not await inbox.wait(left):
                break
            answer += inbox.take()
        return answer

    try:
        answer = await connection.until_denied(subject, ask)
    except PermissionDeniedError:
        return None  # the consumer API may be allowed where Direct Get is not
    finally:
        await connection.release(inbox)
    headers = [one for frames in answer for one in _headers(frames)]
    if len(headers) == 1 and headers[0].status == 404:
        found = await jetstream.message(stream, seq=seq, next_by_subj=filter_subject or ">")
        return 0 if found is None else None
    return _counted(headers, stream)


def _headers(frames: Frames) -> list[Headers]:
    return [parse_headers(frames.header(i)) for i in range(len(frames))]


def _ends(frames: Frames) -> bool:
    return _headers(frames)[-1].status is not None


def _counted(headers: Sequence[Headers], stream: str) -> int | None:
    if len(headers) != 2 or headers[0].status is not None or headers[1].status != 204:
        return None
    # The server appends its own fields after the publisher's: the last one is true.
    named = headers[0].get_all("Nats-Stream")
    pending = headers[1].get("Nats-Num-Pending")
    if not named or named[-1] != stream or pending is None:
        return None
    return 1 + int(pending)


async def _by_consumer(jetstream: JetStream, stream: str, seq: int, filters: Sequence[str]) -> int:
    name = f"{jetstream.connection.settings.consumer_prefix}-rank-{uuid.uuid4().hex[:12]}"
    config: dict[str, object] = {
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": seq,
        "ack_policy": "none",
        "mem_storage": True,
        "num_replicas": 1,
        "headers_only": True,
        "inactive_threshold": 5_000_000_000,
        **filter_config(filters),
    }
    pending = await jetstream.create_consumer(stream, name, config)
    # Where the deletion fails, the inactive threshold removes it; the count is known.
    with contextlib.suppress(RequestTimeoutError):
        await jetstream.delete_consumer(stream, name)
    return pending
