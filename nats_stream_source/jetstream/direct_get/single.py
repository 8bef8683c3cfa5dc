"""One message by Direct Get (ADR-31); from the stream leader where the reply is not sufficient.

A reply is not sufficient if it is a 404, if it is of a mirror that may hold only a part of the
stream, or if its message is older than ``min_last_seq``. Then the leader is queried, and also where
no reply arrives, because the server that received the request is paused or lost. That server may
be the leader. So until the leader responds, the Direct Get is repeated: each one may be handled by
another replica or mirror. The first sufficient response is used.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

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
    DirectGetReply,
    raise_for_status,
    send_request,
    stored_messages,
    verify_start_time,
)
from nats_stream_source.jetstream.leader import leader_message
from nats_stream_source.jetstream.retry import is_transient
from nats_stream_source.wire.direct_get.replies import NOT_FOUND

_RETRY_PAUSE = 1.0  # seconds after an insufficient reply in which only the leader is queried
_LAG_PAUSE = 0.1  # seconds between Direct Gets where the leader fails; replicas catch up meanwhile


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
        self, request: SingleRequest, reply: DirectGetReply | None
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
        self, request: SingleRequest, reply: DirectGetReply | None
    ) -> StoredMessage | None:
        """The message of the leader, None if it has none, or a sufficient Direct Get message.

        Args:
            reply: the first reply, which was not sufficient; None without a Direct Get.
        """
        leader = asyncio.ensure_future(self._leader_message(request))
        attempts = 1
        try:
            while reply is not None:
                await asyncio.wait({leader}, timeout=0 if reply.is_silent else _RETRY_PAUSE)
                if leader.done():
                    if attempts >= ATTEMPTS or not _is_missing(leader.exception(), reply):
                        break
                    await asyncio.sleep(_LAG_PAUSE)
                attempts += 1
                reply = await self._repeated(request)
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
            leader.cancel()
            await asyncio.gather(leader, return_exceptions=True)

    async def _repeated(self, request: SingleRequest) -> DirectGetReply | None:
        """The reply to a repeated Direct Get; None also if it fails: the leader decides."""
        try:
            return await self._direct_get(request)
        except NatsSourceError as error:
            if not is_transient(error) and not isinstance(error, PermissionDeniedError):
                raise
            return None

    async def _direct_get(self, request: SingleRequest) -> DirectGetReply | None:
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


def _is_missing(failure: BaseException | None, reply: DirectGetReply) -> bool:
    """Whether another Direct Get may have what the leader could not be queried for."""
    if isinstance(failure, PermissionDeniedError):
        return reply.code != NOT_FOUND
    return failure is not None and is_transient(failure)
