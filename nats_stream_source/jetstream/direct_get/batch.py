"""Many messages of one subject by Direct Get, page by page (ADR-31, "Batched requests").

A page ends with an EOB whose ``Nats-Num-Pending`` is the number of messages that still match. The
next page starts after the last message of the page before. How the reader handles a failed page:

======================================  ==========================================================
the EOB or a message is missing         the messages before the gap are used, and the next page
                                        starts after them; after the fourth such page in a row an
                                        ordered consumer reads the rest
one message arrives and nothing more    an account import passes only the first reply
                                        (docs/internals/measurements.md, Servers 15): an ordered
                                        consumer reads the rest, and later batches too
the connection is lost                  as for a missing EOB, after the reconnect
a mirror responds                       it may hold only a part of the stream: the page is not
                                        used; an ordered consumer reads the rest
the responding server lags behind the   detected by requesting the next message from the leader;
leader                                  an ordered consumer reads the rest, and waits for its
                                        replica
no server responds (``allow_direct``    an ordered consumer reads
is off)
the first message lacks                 a server before 2.11, which sends one message and no EOB:
``Nats-Num-Pending``                    ServerTooOldError
======================================  ==========================================================

A replica holds the messages in the stream's own order up to its last sequence, so a page of a
replica has no gaps. That is why its messages are used without verification, and only its *end* is
verified.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from nats_stream_source.err_codes import UNAVAILABLE
from nats_stream_source.errors import (
    BadRequestError,
    DataLossError,
    ServerTooOldError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.direct_get.arguments import (
    validate_integer,
    validate_optional_integer,
    validate_read_after_write,
    validate_subject,
)
from nats_stream_source.jetstream.direct_get.page import ConsumerPage, MessagePage
from nats_stream_source.jetstream.direct_get.request import (
    ATTEMPTS,
    DirectGetReply,
    raise_for_status,
    send_batch_request,
)
from nats_stream_source.jetstream.leader import stream_info_after
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import RangeRequest
from nats_stream_source.jetstream.reusable_connection import SharedConnection
from nats_stream_source.jetstream.stream_identity import KnownStream, compare
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.logs import field_logger
from nats_stream_source.wire.direct_get.reply import EOB, NOT_FOUND

log = field_logger(__name__)

_HEARTBEAT = 0.2  # seconds; a range that ends without a match is complete one heartbeat later


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The arguments of :meth:`DirectGet.batch`."""

    stream: str
    subject: str
    seq: int | None
    start_time: str | None
    batch: int
    max_bytes: int
    limit: int | None
    complete: bool
    min_last_seq: int | None
    timeout: float | None

    def validate(self) -> None:
        """Raise BadRequestError for invalid arguments."""
        validate_subject(self.subject)
        if self.seq is not None and self.start_time is not None:
            raise BadRequestError(
                "invalid batch request: 'seq' and 'start_time' exclude each other"
            )
        validate_optional_integer("seq", self.seq)
        validate_integer("batch", self.batch)
        validate_integer("max_bytes", self.max_bytes)
        validate_optional_integer("limit", self.limit, 0)
        validate_read_after_write(self.min_last_seq, self.timeout)


async def read_pages(
    jetstream: JetStream, request: BatchRequest
) -> AsyncGenerator[MessagePage, None]:
    """The pages that :meth:`DirectGet.pages` yields; no page is empty."""
    limit = request.limit
    if limit is not None and limit < 1:
        return
    async with contextlib.aclosing(_BatchReader(jetstream, request).pages()) as pages:
        async for page in pages:
            if not page:
                continue
            limited = page if limit is None or limit >= len(page) else page.slice(0, limit)
            yield limited
            if limit is not None:
                limit -= len(limited)
                if not limit:
                    return


class _BatchReader:
    """Reads one batch. ``_position`` is the sequence after which the next page starts."""

    def __init__(self, jetstream: JetStream, request: BatchRequest) -> None:
        self._jetstream = jetstream
        self._request = request
        self._position = (request.seq or 1) - 1
        self._start_time = request.start_time

    async def pages(self) -> AsyncGenerator[MessagePage, None]:
        request = self._request
        info = await self._stream_info() if request.complete else None
        end = None if info is None else info.last_seq
        incomplete_pages = messages_read = requests_sent = 0
        while end is None or self._position < end:
            reply = await self._request_page(messages_read)
            requests_sent += 1
            if reply is None or reply.code == UNAVAILABLE or not self._is_usable(reply):
                break
            page = reply.page
            if page:
                self._position, self._start_time = page.last_seq, None
                messages_read += len(page)
                yield page if end is None else page.up_to(end)
                if request.limit is not None and messages_read >= request.limit:
                    return
            if reply.code not in (EOB, NOT_FOUND):
                incomplete_pages += not (reply.connection_lost and page)
                log.warning(
                    "a Direct Get ended early", stream=request.stream, position=self._position
                )
                if incomplete_pages >= ATTEMPTS or reply.stopped_after_first:
                    break
                continue
            incomplete_pages = 0
            num_pending = reply.status.num_pending if reply.status and reply.code == EOB else 0
            if num_pending and page:
                continue
            if end is None and reply.code == EOB:
                return
            if end is not None and self._position >= end:
                continue
            if await self._leader_has_more(end):
                break
            end = self._position
        else:
            if info is not None and requests_sent > 1:
                await verify_stream_unchanged(self._jetstream, info)
            return
        async for consumer_page in self._read_with_consumer(info):
            yield consumer_page

    async def _stream_info(self) -> StreamInfo:
        request = self._request
        return await stream_info_after(
            self._jetstream, request.stream, request.min_last_seq, request.timeout
        )

    async def _request_page(self, messages_read: int) -> DirectGetReply | None:
        """The next page; None where batches are not permitted or do not arrive."""
        request = self._request
        batch = request.batch
        if request.limit is not None:
            batch = min(batch, request.limit - messages_read)
        body: dict[str, Any] = {"batch": batch, "max_bytes": request.max_bytes}
        if self._start_time is not None:
            body["start_time"] = self._start_time
        else:
            body["seq"] = self._position + 1
        if request.subject != ">":  # the filter ``>`` is slower than no filter
            body["next_by_subj"] = request.subject
        reply = await send_batch_request(self._jetstream.connection, request.stream, body)
        if reply is None:
            return None
        raise_for_status(request.stream, reply, min_version="2.11")
        if reply.is_of_old_server:
            raise ServerTooOldError(
                f"could not read a batch of stream {request.stream!r}: the server ignored 'batch' "
                f"and sent one message; batches require nats-server 2.11"
            )
        return reply

    def _is_usable(self, reply: DirectGetReply) -> bool:
        return not self._request.complete or reply.is_from_stream(self._request.stream)

    async def _leader_has_more(self, end: int | None) -> bool:
        """Whether the leader has an unread message at a sequence up to ``end``."""
        message = await self._jetstream.message(
            self._request.stream,
            seq=None if self._start_time else self._position + 1,
            start_time=self._start_time,
            next_by_subj=self._request.subject,
        )
        if message is None or (end is not None and message.seq > end):
            return False
        if self._start_time is not None:
            if nanoseconds(message.time) < nanoseconds(self._start_time):
                raise ServerTooOldError(
                    f"could not read a batch of stream {self._request.stream!r}: the server "
                    f"ignored 'start_time'; Direct Get with a start time requires nats-server 2.11"
                )
            self._position, self._start_time = message.seq - 1, None
        return True

    async def _read_with_consumer(
        self, info: StreamInfo | None
    ) -> AsyncGenerator[MessagePage, None]:
        request = self._request
        if info is None:
            info = await self._stream_info()
        if self._start_time is not None and not await self._leader_has_more(info.last_seq):
            return
        async for page in consumer_pages(
            self._jetstream,
            info,
            self._position,
            info.last_seq,
            () if request.subject == ">" else (request.subject,),
            batch=request.batch,
            max_bytes=request.max_bytes,
            timeout=request.timeout,
        ):
            yield page


async def verify_stream_unchanged(jetstream: JetStream, info: StreamInfo) -> None:
    """Raise DataLossError if the stream was re-created or rolled back since ``info``.

    The pages of several requests are consistent only if all were read from one stream.
    """
    current = await jetstream.stream_info(info.name)
    if compare(KnownStream.of(info), current).lost:
        raise DataLossError(
            f"could not read stream {info.name!r}: it was re-created or rolled back during the "
            f"read (created {current.created}, last sequence {current.last_seq}; expected created "
            f"{info.created}, last sequence {info.last_seq} or later); read it again from the start"
        )


async def consumer_pages(
    jetstream: JetStream,
    info: StreamInfo,
    start: int,
    end: int,
    filters: tuple[str, ...],
    *,
    batch: int,
    max_bytes: int,
    timeout: float | None,
) -> AsyncGenerator[MessagePage, None]:
    """The messages in ``(start, end]`` by an ordered consumer, which waits for lagging replicas."""
    if start >= end:
        return
    connection = jetstream.connection
    request = RangeRequest(
        stream=info.name,
        known=KnownStream.of(info),
        start=start,
        end=end,
        filters=filters,
        batch_rows=batch,
        batch_bytes=max_bytes,
        heartbeat=_HEARTBEAT,
        catch_up_timeout=connection.settings.request_timeout if timeout is None else timeout,
    )
    log.debug("an ordered consumer reads", stream=info.name, start=start, end=end)
    reader = OrderedReader(SharedConnection(connection), request)
    async with contextlib.aclosing(reader.batches()) as batches:
        async for frames in batches:
            yield ConsumerPage(frames)
