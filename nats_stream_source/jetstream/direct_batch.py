"""Many messages of one subject by Direct Get, page by page (ADR-31, "Batched requests").

A page ends with an EOB that says how many messages still match (``Nats-Num-Pending``); the next one
begins after the last message of the page before. What can go wrong with a page:

=====================================  ===========================================================
no EOB, or a message is missing        what came before is kept, the next page begins after it; the
                                       fourth time in a row an ordered consumer reads on
one message and nothing more           an account import that lets one through (DESIGN 3.15): an
                                       ordered consumer reads on, and the next batch at once
the connection was lost                the same, once it is there again
a mirror answered                      it may hold a part only: not used; an ordered consumer reads
who answered has less than the leader  found by asking the leader for the next message; an ordered
                                       consumer reads on, and waits for its replica
nobody answers (``allow_direct`` off)  an ordered consumer reads
the first message has no               a server before 2.11, which sends one message and no EOB:
``Nats-Num-Pending``                   ServerTooOldError
=====================================  ===========================================================

A replica of the stream holds the messages in the stream's own order up to where it is, so a page of
it has no holes. That is why its messages count as they are, and only its *end* is doubted.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from nats_stream_source.errors import (
    BadRequestError,
    DataLossError,
    PermissionDeniedError,
    ServerTooOldError,
)
from nats_stream_source.jetstream.api import JetStream, StreamInfo
from nats_stream_source.jetstream.direct_request import (
    Reply,
    ask,
    check,
    check_positive,
    one_answer_only,
)
from nats_stream_source.jetstream.link import SharedLink
from nats_stream_source.jetstream.ordered import OrderedReader
from nats_stream_source.jetstream.page import DeliveredPage, Page
from nats_stream_source.jetstream.range_request import RangeRequest
from nats_stream_source.jetstream.read_after_write import info_with
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.logs import field_logger
from nats_stream_source.wire.answers import EOB, NOBODY, NOT_FOUND

log = field_logger(__name__)

_PATIENCE = 4  # pages in a row without an end; one of three replicas may be paused
_HEARTBEAT = 0.2  # seconds; a range that ends without a match is over one heartbeat later


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What :meth:`DirectGet.batch` was asked for; see there."""

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

    def check(self) -> None:
        """Raise BadRequestError for what no server would take."""
        if self.seq is not None and self.start_time is not None:
            raise BadRequestError("a batch begins at a sequence or at a time, not at both")
        check_positive(seq=self.seq, batch=self.batch, max_bytes=self.max_bytes)


async def pages(jetstream: JetStream, request: BatchRequest) -> AsyncGenerator[Page, None]:
    """The pages that :meth:`DirectGet.pages` yields; none of them is empty."""
    request.check()
    left = request.limit
    if left is not None and left < 1:
        return
    async with contextlib.aclosing(_Reading(jetstream, request).pages()) as found:
        async for page in found:
            if not page:
                continue
            part = page if left is None or left >= len(page) else page.part(0, left)
            yield part
            if left is not None:
                left -= len(part)
                if not left:
                    return


class _Reading:
    """One batch being read; ``position`` is the sequence of the last message, or before it."""

    def __init__(self, jetstream: JetStream, request: BatchRequest) -> None:
        self._jetstream = jetstream
        self._request = request
        self._position = (request.seq or 1) - 1
        self._start_time = request.start_time

    async def pages(self) -> AsyncGenerator[Page, None]:
        request = self._request
        info = await self._info() if request.complete else None
        end = None if info is None else info.last_seq
        unfinished = taken = asked = 0
        while end is None or self._position < end:
            reply = await self._ask(taken)
            asked += 1
            if reply is None or reply.code == NOBODY or not self._counts(reply):
                break
            page = reply.page
            if page:
                self._position, self._start_time = page.last_seq, None
                taken += len(page)
                yield page if end is None else page.through(end)
                if request.limit is not None and taken >= request.limit:
                    return
            if reply.code not in (EOB, NOT_FOUND):
                unfinished += not (reply.lost and page)
                log.warning(
                    "a Direct Get ended early", stream=request.stream, position=self._position
                )
                if unfinished >= _PATIENCE or reply.cut_to_one:
                    break
                continue
            unfinished = 0
            pending = reply.status.num_pending if reply.status and reply.code == EOB else 0
            if pending and page:
                continue
            if end is None and reply.code == EOB:
                return
            if end is not None and self._position >= end:
                continue
            if await self._more_at_leader(end):
                break
            end = self._position
        else:
            if info is not None and asked > 1:
                await check_same(self._jetstream, info)
            return
        async for delivered in self._by_consumer(info):
            yield delivered

    async def _info(self) -> StreamInfo:
        request = self._request
        least, timeout = request.min_last_seq, request.timeout
        return await info_with(self._jetstream, request.stream, least, timeout)

    async def _ask(self, taken: int) -> Reply | None:
        """The next page; None where it may not be asked for."""
        request = self._request
        most = request.batch
        if request.limit is not None:
            most = min(most, request.limit - taken)
        body: dict[str, Any] = {"batch": most, "max_bytes": request.max_bytes}
        if self._start_time is not None:
            body["start_time"] = self._start_time
        else:
            body["seq"] = self._position + 1
        if request.subject != ">":  # which would be slower than no filter
            body["next_by_subj"] = request.subject
        if self._jetstream.connection in one_answer_only:
            return None
        subject = f"DIRECT.GET.{request.stream}"
        try:
            reply = await ask(self._jetstream.connection, subject, body)
        except PermissionDeniedError:
            return None  # a consumer may be allowed
        check(request.stream, reply, needs="2.11")
        if reply.page and reply.page.answers[0].pending is None:
            raise ServerTooOldError(
                f"{request.stream}: the server sent one message where a batch was asked for: "
                f"batches need nats-server 2.11 or later"
            )
        return reply

    def _counts(self, reply: Reply) -> bool:
        return not self._request.complete or reply.speaks_for(self._request.stream)

    async def _more_at_leader(self, end: int | None) -> bool:
        """Whether the leader has a message up to ``end`` that is to be read still."""
        found = await self._jetstream.message(
            self._request.stream,
            seq=None if self._start_time else self._position + 1,
            start_time=self._start_time,
            next_by_subj=self._request.subject,
        )
        if found is None or (end is not None and found.seq > end):
            return False
        if self._start_time is not None:
            if nanoseconds(found.time) < nanoseconds(self._start_time):
                raise ServerTooOldError(
                    f"{self._request.stream}: the server has overlooked the start time: Direct Get "
                    f"from a time needs nats-server 2.11 or later"
                )
            self._position, self._start_time = found.seq - 1, None
        return True

    async def _by_consumer(self, info: StreamInfo | None) -> AsyncGenerator[Page, None]:
        request = self._request
        if info is None:
            info = await self._info()
        if self._start_time is not None and not await self._more_at_leader(info.last_seq):
            return
        async for page in ordered_pages(
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


async def check_same(jetstream: JetStream, info: StreamInfo) -> None:
    """Raise DataLossError unless the stream that was read in several requests was the same one."""
    now = await jetstream.stream_info(info.name)
    if now.created != info.created or now.last_seq < info.last_seq:
        raise DataLossError(
            f"stream {info.name} was deleted and made again, or set back, while it was read: it "
            f"was created {info.created} and had {info.last_seq}, now {now.created} and "
            f"{now.last_seq}. Read it again from its beginning"
        )


async def ordered_pages(
    jetstream: JetStream,
    info: StreamInfo,
    start: int,
    end: int,
    filters: tuple[str, ...],
    *,
    batch: int,
    max_bytes: int,
    timeout: float | None,
) -> AsyncGenerator[Page, None]:
    """The messages in ``(start, end]`` by an ordered consumer, which a lag makes wait."""
    if start >= end:
        return
    connection = jetstream.connection
    request = RangeRequest(
        stream=info.name,
        created=info.created,
        start=start,
        end=end,
        filters=filters,
        batch_rows=batch,
        batch_bytes=max_bytes,
        heartbeat=_HEARTBEAT,
        catch_up=connection.settings.request_timeout if timeout is None else timeout,
    )
    log.debug("an ordered consumer reads", stream=info.name, start=start, end=end)
    reader = OrderedReader(SharedLink(connection), request)
    async with contextlib.aclosing(reader.batches()) as batches:
        async for frames in batches:
            yield DeliveredPage(frames)
