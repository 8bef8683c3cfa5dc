"""One message by Direct Get (ADR-31); from the stream leader where the reply is not sufficient."""

from __future__ import annotations

import contextlib
from typing import Any

from nats_stream_source.errors import (
    MessageNotFoundError,
    PermissionDeniedError,
    ServerTooOldError,
)
from nats_stream_source.jetstream.api import JetStream, StoredMessage
from nats_stream_source.jetstream.direct_get.request import (
    DirectGetReply,
    raise_for_status,
    send_request,
)
from nats_stream_source.jetstream.leader import leader_message
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.wire.direct_get.reply import NOBODY, NOT_FOUND


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

    async def read(
        self,
        request: dict[str, Any],
        appended_subject: str | None,
        accept_mirrors: bool,
        min_last_seq: int | None,
        timeout: float | None,
    ) -> StoredMessage:
        """Read one message by Direct Get, or from the leader where the reply is not sufficient.

        Args:
            appended_subject: the subject for the subject-appended form; ``request`` is then only
                sent to the leader.
            accept_mirrors: whether the reply of a mirror is sufficient.

        Raises:
            MessageNotFoundError: the leader has no such message; where the user may not send
                requests to the leader, the replica or mirror that replied has none.
            ServerTooOldError: ``start_time`` requires nats-server 2.11.
        """
        stream = self._stream
        reply = await self._direct_get(request, appended_subject)
        message = None
        if reply is not None and reply.page and (accept_mirrors or reply.is_from_stream(stream)):
            message = reply.page.messages()[0]
        if message is None or (min_last_seq is not None and message.seq < min_last_seq):
            try:
                message = await leader_message(
                    self._jetstream,
                    stream,
                    min_last_seq=min_last_seq,
                    timeout=timeout,
                    **request,
                )
            except PermissionDeniedError as denied:
                if reply is None or reply.code != NOT_FOUND or min_last_seq is not None:
                    raise
                raise MessageNotFoundError(
                    f"could not read a message of stream {stream!r}: a replica or mirror has no "
                    f"message for {request}, and the leader could not be queried: {denied}",
                    MessageNotFoundError.code,
                    MessageNotFoundError.err_code,
                ) from denied
        if message is None:
            raise MessageNotFoundError(
                f"could not read a message of stream {stream!r}: no message matches {request} "
                f"(code 404, err_code 10037)",
                MessageNotFoundError.code,
                MessageNotFoundError.err_code,
            )
        start_time = request.get("start_time")
        if start_time is not None and nanoseconds(message.time) < nanoseconds(start_time):
            raise ServerTooOldError(
                f"could not read from stream {stream!r}: the server ignored 'start_time'; Direct "
                f"Get with a start time requires nats-server 2.11"
            )
        return message

    async def _direct_get(
        self, request: dict[str, Any], appended_subject: str | None
    ) -> DirectGetReply | None:
        """The reply of a replica or mirror; None where none is available."""
        if self.disabled:
            return None
        subject = f"DIRECT.GET.{self._stream}"
        connection = self._jetstream.connection
        try:
            if appended_subject is not None:
                reply = await send_request(connection, f"{subject}.{appended_subject}", None)
            else:
                reply = await send_request(connection, subject, request)
        except PermissionDeniedError:
            return None  # the user may still be allowed to send requests to the leader
        if reply.code == NOBODY:
            # A starting server reports 503 too; only the stream's configuration shows that Direct
            # Get is permanently off.
            with contextlib.suppress(PermissionDeniedError):
                info = await self._jetstream.stream_info(self._stream)
                self.disabled = not info.config.get("allow_direct")
            return None
        if "start_time" in request and reply.code is not None and reply.code != NOT_FOUND:
            return None  # before 2.11 a request with only a start time counts as empty
        raise_for_status(self._stream, reply)
        return reply
