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
    ServerTooOldError,
)
from nats_stream_source.jetstream.api import JetStream, StoredMessage
from nats_stream_source.jetstream.direct_get.request import (
    ATTEMPTS,
    DirectGetReply,
    raise_for_status,
    send_request,
    stored_messages,
)
from nats_stream_source.jetstream.leader import leader_message
from nats_stream_source.jetstream.retry import is_transient
from nats_stream_source.jetstream.times import nanoseconds
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
    """Reads single messages of one stream.

    Attributes:
        disabled: the stream's configuration has ``allow_direct`` off, so every request goes to the
            stream leader.
    """

    def __init__(self, jetstream: JetStream, stream: str) -> None:
        self.disabled = False
        self._jetstream = jetstream
        self._stream = stream

    async def read(self, request: SingleRequest) -> StoredMessage:
        """Read one message by Direct Get, or from the leader where the reply is not sufficient.

        Raises:
            MessageNotFoundError: the leader has no such message; where the user may not send
                requests to the leader, the replica or mirror that replied has none.
            ServerTooOldError: ``start_time`` requires nats-server 2.11.
        """
        stream, body = self._stream, request.body
        try:
            reply = await self._direct_get(request)
        except PermissionDeniedError as denied:
            reply, message = None, await self._leader_message_if_permitted(request, denied)
        else:
            message = self._sufficient_message(request, reply)
            if message is None and reply is None:
                message = await self._leader_message(request)
            elif message is None:
                assert reply is not None
                message = await self._first_response(request, reply)
        if message is None:
            raise MessageNotFoundError(
                f"could not read a message of stream {stream!r}: no message matches {body} "
                f"(code 404, err_code 10037)",
                MessageNotFoundError.code,
                MessageNotFoundError.err_code,
            )
        start_time = body.get("start_time")
        if start_time is not None and nanoseconds(message.time) < nanoseconds(start_time):
            raise ServerTooOldError(
                f"could not read from stream {stream!r}: the server ignored 'start_time'; Direct "
                f"Get with a start time requires nats-server 2.11"
            )
        return message

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

        Raises:
            PermissionDeniedError: of the Direct Get if both requests are denied. Its subject may
                allow one subject of the stream, that of the leader request allows all.
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
        self, request: SingleRequest, reply: DirectGetReply
    ) -> StoredMessage | None:
        """The message of the leader, None if it has none, or a sufficient Direct Get message.

        Args:
            reply: the first reply, which was not sufficient.
        """
        leader = asyncio.ensure_future(self._leader_message(request))
        retries = asyncio.ensure_future(self._retry_direct_get(request, reply, leader))
        try:
            await asyncio.wait({leader, retries}, return_when=asyncio.FIRST_COMPLETED)
            if not leader.done():
                message = self._sufficient_message(request, retries.result())
                if message is not None:
                    return message
                await asyncio.wait({leader})
            try:
                return leader.result()
            except NatsSourceError as error:
                is_denied = isinstance(error, PermissionDeniedError)
                if not is_denied and not is_transient(error):
                    raise
                if not is_denied or reply.code != NOT_FOUND:
                    reply = await retries
                message = self._sufficient_message(request, reply)
                if message is not None:
                    return message
                if not is_denied or reply.code != NOT_FOUND or request.min_last_seq is not None:
                    raise
                raise MessageNotFoundError(
                    f"could not read a message of stream {self._stream!r}: a replica or mirror has "
                    f"no message for {request.body}, and the leader could not be queried: {error}",
                    MessageNotFoundError.code,
                    MessageNotFoundError.err_code,
                ) from error
        finally:
            for task in (leader, retries):
                task.cancel()
            await asyncio.gather(leader, retries, return_exceptions=True)

    async def _retry_direct_get(
        self,
        request: SingleRequest,
        reply: DirectGetReply,
        leader: asyncio.Future[StoredMessage | None],
    ) -> DirectGetReply:
        """Repeat the Direct Get until a reply is sufficient, or the leader responds.

        Returns:
            the last reply.
        """
        attempts = 1
        while attempts < ATTEMPTS or not leader.done():
            attempts += 1
            if leader.done():
                await asyncio.sleep(_LAG_PAUSE)
            elif reply.page or reply.code is not None:
                await asyncio.wait({leader}, timeout=_RETRY_PAUSE)
            try:
                next_reply = await self._direct_get(request)
            except NatsSourceError as error:
                if not is_transient(error) and not isinstance(error, PermissionDeniedError):
                    raise
                next_reply = None
            if next_reply is None:
                return reply
            reply = next_reply
            if self._sufficient_message(request, reply) is not None:
                return reply
        return reply

    async def _direct_get(self, request: SingleRequest) -> DirectGetReply | None:
        """The reply of a replica or mirror; None where none is available.

        Raises:
            PermissionDeniedError: the user may still be allowed to send requests to the leader.
        """
        if self.disabled:
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
            self.disabled = not await self._allows_direct()
            return None
        if "start_time" in request.body and reply.code is not None and reply.code != NOT_FOUND:
            return None  # before 2.11 a request with only a start time counts as empty
        raise_for_status(self._stream, reply)
        return reply
