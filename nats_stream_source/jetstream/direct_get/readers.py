"""Single messages by Direct Get (ADR-31), and many page by page ("Batched requests").

*Single messages.* A reply is not sufficient if it is a 404, if it is of a mirror that may hold only
a part of the stream, or if its message is older than ``min_last_seq``. Then the leader is queried,
and also where no reply arrives, because the server that received the request is paused or lost.
That server may be the leader. So until the leader responds, the Direct Get is repeated: each one
may be handled by another replica or mirror. The first sufficient response is used.

*Pages.* One loop reads the messages of a subject (:class:`BatchReader`) and the last message of
each subject (``last_messages``). It requests a page, uses it if it counts, and requests the next
one after its last message. Where Direct Get does not serve the pages, an ordered consumer or the
leader does:

==================================  ==============================================================
the EOB or a message is missing     a batch uses the messages before the gap; the page after them
                                    is requested
a mirror responds                   it may hold only a part of the stream: the page is requested
                                    again
the connection is lost              as for a missing EOB, after the reconnect
four such pages in a row            the rest is read otherwise
one message arrives and no more     an account import passes only the first reply
                                    (docs/internals/measurements.md, Servers 15): the rest is read
                                    otherwise, and later batches of this connection too
Direct Get is off, not permitted,   all is read otherwise
or not served in batches (servers
before 2.11)
==================================  ==============================================================

A batch reads what the leader had when the read began. A replica holds the messages in the stream's
own order up to its last sequence, so its page lacks nothing in between. The end is verified by
requesting the next message from the leader. An ordered consumer reads the rest, and waits for a
lagging replica.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import numpy as np

from nats_stream_source.err_codes import UNAVAILABLE
from nats_stream_source.errors import (
    MessageNotFoundError,
    NatsSourceError,
    PermissionDeniedError,
    RequestTimeoutError,
)
from nats_stream_source.jetstream.api import JetStream, StoredMessage
from nats_stream_source.jetstream.direct_get.request import (
    ATTEMPTS,
    first_message_at,
    raise_for_status,
    send_batch_request,
    send_request,
    stored_messages,
    verify_start_time,
)
from nats_stream_source.jetstream.leader import leader_message, wait_for_last_seq
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import RangeRequest
from nats_stream_source.jetstream.retry import is_transient
from nats_stream_source.jetstream.reusable_connection import SharedConnection
from nats_stream_source.jetstream.stream_identity import KnownStream, verify_unchanged
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.logs import field_logger
from nats_stream_source.wire.consumer.deliveries import Deliveries
from nats_stream_source.wire.direct_get.replies import EOB, NOT_FOUND, DirectGetResponse

log = field_logger(__name__)

MAX_BYTES = 8 << 20
"""Bytes of a page, if the caller does not limit them."""

_RETRY_PAUSE = 1.0  # seconds after an insufficient reply in which only the leader is queried
_LAG_PAUSE = 0.1  # seconds between Direct Gets where the leader fails; replicas catch up meanwhile
_HEARTBEAT = 0.2  # seconds; a range that ends without a match is complete one heartbeat later
_BATCH = 8192  # messages of a page, if the caller does not limit them


@dataclass(frozen=True, slots=True)
class SingleRequest:
    """Which message to read.

    Attributes:
        body: the request (ADR-31, "Request").
        appended_subject: the subject for the subject-appended form; ``body`` is then only sent to
            the leader.
        accept_mirrors: whether the reply of a mirror is sufficient.
        min_last_seq, timeout: as for :func:`leader_message`.
    """

    body: dict[str, Any]
    appended_subject: str | None
    accept_mirrors: bool
    min_last_seq: int | None
    timeout: float | None


class SingleMessageReader:
    """Reads single messages of one stream."""

    def __init__(self, jetstream: JetStream, stream: str) -> None:
        self._disabled = False  # ``allow_direct`` of the stream is off
        self._jetstream = jetstream
        self._stream = stream

    async def read(self, request: SingleRequest) -> StoredMessage:
        """Read one message by Direct Get, or from the leader where the reply is not sufficient.

        Raises:
            MessageNotFoundError: the leader has no such message; where the user may not send
                requests to the leader, the replica or mirror that replied has none.
            ServerTooOldError: ``start_time`` requires nats-server 2.11.
        """
        try:
            reply = await self._direct_get(request)
        except PermissionDeniedError as denied:
            message = await self._leader_message_if_permitted(request, denied)
        else:
            message = self._sufficient_message(request, reply)
            if message is None:
                message = await self._first_response(request, reply)
        if message is None:
            raise self._not_found(f"no message matches {request.body} (code 404, err_code 10037)")
        if (start_time := request.body.get("start_time")) is not None:
            verify_start_time(self._stream, message, start_time)
        return message

    def _not_found(self, reason: str) -> MessageNotFoundError:
        return MessageNotFoundError(
            f"could not read a message of stream {self._stream!r}: {reason}",
            MessageNotFoundError.code,
            MessageNotFoundError.err_code,
        )

    def _sufficient_message(
        self, request: SingleRequest, reply: DirectGetResponse | None
    ) -> StoredMessage | None:
        if reply is None or not reply.page:
            return None
        if not request.accept_mirrors and not reply.page.all_from(self._stream):
            return None
        (message,) = stored_messages(reply.page.select(slice(0, 1)))
        is_old = request.min_last_seq is not None and message.seq < request.min_last_seq
        return None if is_old else message

    async def _leader_message(self, request: SingleRequest) -> StoredMessage | None:
        return await leader_message(
            self._jetstream,
            self._stream,
            min_last_seq=request.min_last_seq,
            timeout=request.timeout,
            **request.body,
        )

    async def _leader_message_if_permitted(
        self, request: SingleRequest, denied: PermissionDeniedError
    ) -> StoredMessage | None:
        """The leader's message, for a user whose Direct Get was denied.

        If both requests are denied, the error of the Direct Get is raised: its subject may allow
        one subject of the stream, that of the leader request allows all.
        """
        try:
            return await self._leader_message(request)
        except PermissionDeniedError as leader_denied:
            raise (denied if await self._allows_direct() else leader_denied) from None

    async def _allows_direct(self) -> bool:
        """Whether the stream's configuration allows Direct Get, as far as the user may read it."""
        try:
            info = await self._jetstream.stream_info(self._stream)
        except (PermissionDeniedError, RequestTimeoutError):
            return True
        return bool(info.config.get("allow_direct"))

    async def _first_response(
        self, request: SingleRequest, reply: DirectGetResponse | None
    ) -> StoredMessage | None:
        """The message of the leader, None if it has none, or a sufficient Direct Get message.

        Args:
            reply: the first reply, which was not sufficient; None without a Direct Get.
        """
        leader = asyncio.ensure_future(self._leader_message(request))
        tasks: set[asyncio.Future[Any]] = {leader}
        attempts = 1
        try:
            while reply is not None:
                await asyncio.wait({leader}, timeout=0 if reply.is_silent else _RETRY_PAUSE)
                if leader.done():
                    if attempts >= ATTEMPTS or not _is_missing(leader.exception(), reply):
                        break
                    await asyncio.sleep(_LAG_PAUSE)
                attempts += 1
                attempt = asyncio.ensure_future(self._direct_get(request))
                tasks = {leader, attempt}
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if leader.done() and not _is_missing(leader.exception(), reply):
                    break
                try:
                    repeated = await attempt
                except NatsSourceError as error:
                    if not is_transient(error) and not isinstance(error, PermissionDeniedError):
                        raise
                    repeated = None
                if repeated is None:
                    break  # the leader decides
                reply = repeated
                if (message := self._sufficient_message(request, reply)) is not None:
                    return message
            return await leader
        except PermissionDeniedError as error:
            if reply is None or reply.code != NOT_FOUND or request.min_last_seq is not None:
                raise
            raise self._not_found(
                f"a replica or mirror has no message for {request.body}, and the leader could not "
                f"be queried: {error}"
            ) from error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _direct_get(self, request: SingleRequest) -> DirectGetResponse | None:
        """The reply of a replica or mirror; None where Direct Get is not available."""
        if self._disabled:
            return None
        subject = f"DIRECT.GET.{self._stream}"
        connection = self._jetstream.connection
        appended = f"{subject}.{request.appended_subject}"
        if request.appended_subject is not None and self._jetstream.fits(appended):
            reply = await send_request(connection, appended, None)
        else:
            reply = await send_request(connection, subject, request.body)
        if reply.code == UNAVAILABLE:
            # A starting server reports 503 too; only the stream's configuration shows that Direct
            # Get is permanently off.
            self._disabled = not await self._allows_direct()
            return None
        if "start_time" in request.body and reply.code is not None and reply.code != NOT_FOUND:
            return None  # before 2.11 a request with only a start time counts as empty
        raise_for_status(self._stream, reply)
        return reply


def _is_missing(failure: BaseException | None, reply: DirectGetResponse) -> bool:
    """Whether another Direct Get may have what the leader could not be queried for."""
    if isinstance(failure, PermissionDeniedError):
        return reply.code != NOT_FOUND
    return failure is not None and is_transient(failure)


@dataclass(frozen=True, slots=True)
class PageLimits:
    """Which pages a read requests, and when.

    Attributes:
        batch: the maximum number of messages of a page; None for as many as the server sends.
        max_bytes: the maximum number of bytes of a page.
        min_last_seq, timeout: as for :func:`wait_for_last_seq`.
    """

    batch: int | None = None
    max_bytes: int = MAX_BYTES
    min_last_seq: int | None = None
    timeout: float | None = None


class PageReader(ABC):
    """Reads pages of one stream: ``(_position, _end]`` is left to read."""

    def __init__(self, jetstream: JetStream, stream: str, limits: PageLimits) -> None:
        self._jetstream = jetstream
        self._stream = stream
        self._limits = limits
        self._position = 0
        self._end = 0

    async def pages(self, info: StreamInfo | None = None) -> AsyncGenerator[Deliveries, None]:
        """Yield the messages; no page is empty.

        Args:
            info: the stream as its leader has just reported it.

        Raises:
            StreamChangedError: the stream was re-created or rolled back between two pages.
        """
        limits = self._limits
        if info is None:
            info = await wait_for_last_seq(
                self._jetstream, self._stream, limits.min_last_seq, limits.timeout
            )
        self._info = info
        self._end = await self._last_sequence()
        failed_attempts, has_page, has_several_requests = 0, False, False
        while self._position < self._end and failed_attempts < ATTEMPTS:
            has_several_requests |= has_page
            reply = await self._request_page()
            if reply is None:
                break
            if not self._counts(reply):
                failed_attempts += 1
                continue
            if reply.page:
                has_page = True
                if page := self._take(reply):
                    yield page
            if reply.code in (EOB, NOT_FOUND):
                failed_attempts = 0
                if not await self._goes_on(reply):
                    break
                continue
            log.warning("a Direct Get ended early", stream=self._stream, position=self._position)
            failed_attempts += not (reply.connection_lost and reply.page)
            if reply.stopped_after_first:
                break
        has_several_requests |= has_page and self._position < self._end
        async with contextlib.aclosing(self._rest()) as rest:
            async for page in rest:
                if page:
                    yield page
        if has_several_requests:
            now = await self._jetstream.stream_info(self._stream)
            await verify_unchanged(self._jetstream, now, [KnownStream.of(info)])

    @abstractmethod
    async def _last_sequence(self) -> int:
        """The sequence at which the read ends."""

    @abstractmethod
    async def _request_page(self) -> DirectGetResponse | None:
        """The reply with the next page; None where Direct Get does not serve it."""

    @abstractmethod
    def _counts(self, reply: DirectGetResponse) -> bool:
        """Whether the messages of a reply are those of the stream, and current."""

    @abstractmethod
    def _take(self, reply: DirectGetResponse) -> Deliveries:
        """The messages of a reply that were not read before; moves the position after them."""

    @abstractmethod
    async def _goes_on(self, reply: DirectGetResponse) -> bool:
        """Whether Direct Get goes on after a whole page; sets the end if nothing is left."""

    @abstractmethod
    def _rest(self) -> AsyncGenerator[Deliveries, None]:
        """The messages that Direct Get did not read."""

    async def _send(
        self, body: dict[str, Any], subjects: tuple[str, ...] = ()
    ) -> DirectGetResponse | None:
        body["max_bytes"] = self._limits.max_bytes
        reply = await send_batch_request(self._jetstream.connection, self._stream, body)
        if reply is None or reply.code == UNAVAILABLE or reply.is_of_old_server:
            return None
        raise_for_status(self._stream, reply, subjects=subjects)
        return reply

    async def _read_with_consumer(
        self, filters: tuple[str, ...]
    ) -> AsyncGenerator[Deliveries, None]:
        """The messages that are left, by an ordered consumer, which waits for lagging replicas."""
        if self._position >= self._end:
            return
        connection, timeout = self._jetstream.connection, self._limits.timeout
        request = RangeRequest(
            stream=self._stream,
            known=KnownStream.of(self._info),
            start=self._position,
            end=self._end,
            filters=filters,
            batch_rows=self._limits.batch or _BATCH,
            batch_bytes=self._limits.max_bytes,
            heartbeat=_HEARTBEAT,
            catch_up_timeout=connection.settings.request_timeout if timeout is None else timeout,
        )
        log.debug(
            "an ordered consumer reads", stream=self._stream, start=self._position, end=self._end
        )
        reader = OrderedReader(SharedConnection(connection), request)
        async with contextlib.aclosing(reader.batches()) as batches:
            async for page in batches:
                yield page


class BatchReader(PageReader):
    """Reads the messages of a subject.

    Args:
        seq: the start sequence.
        start_time: the start time instead; RFC 3339.
        limit: the maximum number of messages.
    """

    def __init__(
        self,
        jetstream: JetStream,
        stream: str,
        subject: str,
        limits: PageLimits,
        *,
        seq: int = 1,
        start_time: str | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__(jetstream, stream, limits)
        self._subject = subject
        self._position = seq - 1
        self._start_time = start_time
        self._left = limit

    async def _last_sequence(self) -> int:
        if self._start_time is not None:
            first = await first_message_at(
                self._jetstream, self._stream, self._start_time, self._subject
            )
            self._position = self._info.last_seq if first is None else first.seq - 1
        return 0 if self._left == 0 else self._info.last_seq

    async def _request_page(self) -> DirectGetResponse | None:
        batch = self._limits.batch or _BATCH
        body: dict[str, Any] = {
            "batch": batch if self._left is None else min(batch, self._left),
            "seq": self._position + 1,
        }
        if self._subject != ">":  # the filter ``>`` is slower than no filter
            body["next_by_subj"] = self._subject
        return await self._send(body)

    def _counts(self, reply: DirectGetResponse) -> bool:
        return reply.page.all_from(self._stream)

    def _take(self, reply: DirectGetResponse) -> Deliveries:
        sequences = reply.page.stream_seq
        self._position = int(sequences[-1])
        # Not a mask, which would copy the numbers of each page.
        end = int(np.searchsorted(sequences, self._end, side="right"))
        return self._limited(reply.page.select(slice(end)))

    def _limited(self, page: Deliveries) -> Deliveries:
        if self._left is None:
            return page
        page = page.select(slice(0, self._left))
        self._left -= len(page)
        if not self._left:
            self._end = self._position
        return page

    async def _goes_on(self, reply: DirectGetResponse) -> bool:
        num_pending = reply.status.num_pending if reply.status and reply.page else 0
        if num_pending or self._position >= self._end:
            return True
        message = await self._jetstream.message(
            self._stream, seq=self._position + 1, next_by_subj=self._subject
        )
        if message is not None and message.seq <= self._end:
            return False  # the replica lags
        self._end = self._position
        return True

    async def _rest(self) -> AsyncGenerator[Deliveries, None]:
        filters = () if self._subject == ">" else (self._subject,)
        async with contextlib.aclosing(self._read_with_consumer(filters)) as pages:
            async for page in pages:
                yield self._limited(page)
                if self._left == 0:
                    return
