"""One Direct Get request and its replies (ADR-31).

Each request has its own inbox, so a late reply to an abandoned request is never taken for a reply
to another one. The replies are received as frames, which ``wire/direct_get/replies.py`` parses: the
message class of nats-py would present a publisher's ``Status`` field as the server's.

The server sends all messages of a batch at once, without flow control. ``batch`` and ``max_bytes``
in the request bound the memory that the replies take.

:func:`count_messages` counts the messages that match from a sequence on
(docs/internals/measurements.md, Servers 4). A Direct Get for a batch of one message ends with an
EOB whose ``Nats-Num-Pending`` counts the messages that still match. A mirror that holds only a part
of the stream may respond, so a reply is used only if its message names the stream itself in
``Nats-Stream``, and a 404 only if the stream leader confirms it. Otherwise (also where Direct Get
is off, the EOB did not pass an account import, or the server is older than 2.11) a temporary
consumer has the number in its ``num_pending``.
"""

from __future__ import annotations

import asyncio
import json
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa

from nats_stream_source.connection.connection import Connection
from nats_stream_source.err_codes import UNAVAILABLE
from nats_stream_source.errors import (
    ApiError,
    BadRequestError,
    MinLastSequenceError,
    PermissionDeniedError,
    ServerTooOldError,
    TooManySubjectsError,
)
from nats_stream_source.jetstream.api import JetStream, StoredMessage
from nats_stream_source.jetstream.consumers import temporary_consumer
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.wire.arrow_slices import Positions
from nats_stream_source.wire.consumer.deliveries import Deliveries
from nats_stream_source.wire.direct_get.replies import (
    BAD_REQUEST,
    EOB,
    MIN_LAST_SEQUENCE,
    NOT_FOUND,
    TOO_MANY,
    DirectGetResponse,
    Replies,
)
from nats_stream_source.wire.framing.frames import Frames

IDLE_TIMEOUT = 1.0
"""Seconds without another reply after which a request ends: the responding server is paused, a
reply was lost, or an account import passes only one message of a batch
(docs/internals/measurements.md, Servers 15)."""

MAX_SUBJECTS = 1024
"""Subjects of which a server returns the last messages in one request (ADR-31)."""

ATTEMPTS = 4
"""Direct Gets before the leader or a consumer is used: each may be handled by another server, and
one of three replicas may be paused."""

_HEADER_END = b"\r\n\r\n"
# The slot descriptors of the frozen dataclass: they set a field without ``__init__``.
_SET_FIELDS = [getattr(StoredMessage, field.name).__set__ for field in fields(StoredMessage)]
_MAX_DIRECT_GETS = 4  # parallel requests that count, one for each filter

_single_reply_connections: weakref.WeakSet[Connection] = weakref.WeakSet()
"""Connections over which only one message of a batch arrives: no more batches are requested."""


def stored_messages(page: Deliveries) -> list[StoredMessage]:
    """The messages of a page as objects."""
    if not len(page):
        return []
    # One copy in one piece: its slices are cheaper than copies out of the buffer.
    first = int(page.begin[0])
    data = bytes(page.buffer[first : int(page.stop[-1])])

    def pieces(begin: Positions, end: Positions) -> list[bytes]:
        borders = zip((begin - first).tolist(), (end - first).tolist(), strict=True)
        return [data[a:b] for a, b in borders]

    subjects = pieces(page.subject_begin, page.subject_end)
    if isinstance(page, Replies):
        own = pieces(page.header_begin, page.header_begin + page.own_end)
        headers = [block and block + _HEADER_END for block in own]
    else:
        headers = pieces(page.header_begin, page.payload_begin)
    columns: tuple[list[Any], ...] = (
        [subject.decode("utf-8", "surrogateescape") for subject in subjects],
        page.stream_seq.tolist(),
        _timestamps(page),
        pieces(page.payload_begin, page.payload_end),
        headers,
    )
    # Set column by column: the ``__init__`` of a frozen dataclass takes nearly twice as long, and
    # these objects are the largest part of the time of a batch.
    messages = [StoredMessage.__new__(StoredMessage) for _ in subjects]
    for set_field, column in zip(_SET_FIELDS, columns, strict=True):
        deque(map(set_field, messages, column), maxlen=0)
    return messages


def _timestamps(page: Deliveries) -> list[str]:
    """The times as ``times.rfc3339``, which takes ten times as long for each."""
    texts = pa.array(page.time).cast(pa.timestamp("ns")).cast(pa.string()).to_pylist()
    return [text.rstrip("0").rstrip(".").replace(" ", "T") + "Z" for text in texts]


async def send_request(
    connection: Connection,
    subject: str,
    request: dict[str, Any] | None,
    *,
    idle_timeout: float | None = None,
) -> DirectGetResponse:
    """Send one Direct Get request and receive its replies until they end.

    Args:
        subject: below the API prefix: ``DIRECT.GET.<stream>`` or, without a request,
            ``DIRECT.GET.<stream>.<subject>``.
        request: the body (ADR-31, "Request"), None for the subject-appended form. With ``batch``
            or ``multi_last`` the replies end with the EOB, otherwise with the first one.
        idle_timeout: seconds without another reply; :data:`IDLE_TIMEOUT` when None.

    Raises:
        PermissionDeniedError: the user may not publish to the subject.
        ConnectError: not connected, or the connection was closed.
        NameTooLongError: a subject is longer than the server accepts.
        ProtocolError: a reply is neither a message nor a status.
    """
    names = [] if request is None else [request.get("last_by_subj"), request.get("next_by_subj")]
    for name in (*names, *(request or {}).get("multi_last", ())):
        if name is not None:
            connection.control_line.validate_name(name)
    await connection.wait_connected(connection.settings.connect_timeout)
    wait_seconds = IDLE_TIMEOUT if idle_timeout is None else idle_timeout
    is_batch = request is not None and bool(request.get("batch") or request.get("multi_last"))
    # Not as ``\u`` escapes: a subject that is not ASCII would be up to three times as long.
    payload = b"" if request is None else json.dumps(request, ensure_ascii=False).encode()
    full_subject = f"{connection.settings.api_prefix}.{subject}"
    reply_to = connection.client.new_inbox()
    reconnects = connection.reconnects
    inbox = await connection.open_inbox(reply_to)
    response = DirectGetResponse()

    async def receive() -> bool:
        """Receive the replies; return whether the connection was lost."""
        await connection.publish(full_subject, payload, reply=reply_to)
        while True:
            if received := inbox.take():
                response.feed(Frames.chain(received))
            # A server before 2.11 replies to a batch request with one unnumbered message only.
            if response.ended or (len(response) and not (is_batch and response.is_batch)):
                return False
            if connection.reconnects != reconnects or not connection.client.is_connected:
                return True
            if not await inbox.wait(wait_seconds):
                return False

    try:
        response.connection_lost = await connection.run_until_denied(full_subject, receive)
    finally:
        await connection.close_inbox(inbox)
    if is_batch and response.stopped_after_first:
        _single_reply_connections.add(connection)
    return response


async def send_batch_request(
    connection: Connection, stream: str, request: dict[str, Any]
) -> DirectGetResponse | None:
    """Request several messages; None where this is not permitted, or batches do not arrive.

    The user may still be allowed to create a consumer, or to send requests to the leader.
    """
    if connection in _single_reply_connections:
        return None
    try:
        return await send_request(connection, f"DIRECT.GET.{stream}", request)
    except PermissionDeniedError:
        return None


async def first_message_at(
    jetstream: JetStream, stream: str, start_time: str, subject: str = ">"
) -> StoredMessage | None:
    """The leader's first message of a subject from a time on; ServerTooOldError before 2.11."""
    message = await jetstream.message(stream, start_time=start_time, next_by_subj=subject)
    return None if message is None else verify_start_time(stream, message, start_time)


def verify_start_time(stream: str, message: StoredMessage, start_time: str) -> StoredMessage:
    """Return ``message``; ServerTooOldError if it is older: the server ignored the time."""
    if nanoseconds(message.time) < nanoseconds(start_time):
        raise ServerTooOldError(
            f"could not read from stream {stream!r}: the server ignored the time {start_time}; "
            f"reads from or up to a time require nats-server 2.11"
        )
    return message


def raise_for_status(
    stream: str, reply: DirectGetResponse, *, subjects: Sequence[str] = ()
) -> None:
    """Raise the error for the status of ``reply``; 204, 404 and 503 raise nothing.

    ``subjects`` are those of a multi-subject request.
    """
    status = reply.status
    if status is None or status.code in (EOB, NOT_FOUND, UNAVAILABLE):
        return
    message = (
        f"could not read from stream {stream!r} with Direct Get: server responded "
        f"{status.code} {status.description or 'without a description'}"
    )
    if status.code == BAD_REQUEST:
        raise BadRequestError(message, status.code)
    if status.code == MIN_LAST_SEQUENCE and "min last sequence" in status.description.lower():
        raise MinLastSequenceError(message)
    if status.code == TOO_MANY:
        raise too_many_subjects_error(stream, subjects)
    raise ApiError(message, status.code)


def too_many_subjects_error(stream: str, subjects: Sequence[str]) -> TooManySubjectsError:
    """The error for a multi-subject request that matches more than 1,024 subjects."""
    shown = ", ".join(map(repr, subjects[:3])) + (", …" if len(subjects) > 3 else "")
    return TooManySubjectsError(
        f"could not read the last messages of stream {stream!r}: more than 1,024 subjects match "
        f"{shown}; request narrower subjects in several calls, or read the stream with a watch or "
        f"an ordered consumer (last_per_subject)",
        TooManySubjectsError.code,
    )


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
