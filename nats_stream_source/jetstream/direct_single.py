"""One message by Direct Get (ADR-31), from who answers where that is enough, else by the leader."""

from __future__ import annotations

import contextlib
from typing import Any

from nats_stream_source.errors import (
    MessageNotFoundError,
    PermissionDeniedError,
    ServerTooOldError,
)
from nats_stream_source.jetstream.api import JetStream, StoredMessage
from nats_stream_source.jetstream.direct_request import Reply, ask, check
from nats_stream_source.jetstream.read_after_write import leader_message
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.wire.answers import NOBODY, NOT_FOUND


class SingleReads:
    """Reads of one message each from one stream.

    Attributes:
        off: the stream's configuration says that there is no Direct Get: only the leader is asked.
    """

    def __init__(self, jetstream: JetStream, stream: str) -> None:
        self.off = False
        self._jetstream = jetstream
        self._stream = stream

    async def read(
        self,
        request: dict[str, Any],
        appended: str | None,
        mirrors: bool,
        min_last_seq: int | None,
        timeout: float | None,
    ) -> StoredMessage:
        """One message by Direct Get where its answer is enough, else by the leader.

        Args:
            appended: the subject for the subject-appended form; ``request`` is for the leader then.
            mirrors: whether a mirror's answer is enough.

        Raises:
            MessageNotFoundError: the leader has none, or who answered, where it may not be asked.
            ServerTooOldError: ``start_time`` needs a server of version 2.11.
        """
        reply = await self._direct(request, appended)
        found = None
        if reply is not None and reply.page and (mirrors or reply.speaks_for(self._stream)):
            found = reply.page.messages()[0]
        if found is None or (min_last_seq is not None and found.seq < min_last_seq):
            try:
                found = await leader_message(
                    self._jetstream,
                    self._stream,
                    min_last_seq=min_last_seq,
                    timeout=timeout,
                    **request,
                )
            except PermissionDeniedError as denied:
                if reply is None or reply.code != NOT_FOUND or min_last_seq is not None:
                    raise
                raise MessageNotFoundError(
                    f"{self._stream}: no message for {request} where a replica or mirror looked; "
                    f"the leader was not asked: {denied}",
                    MessageNotFoundError.code,
                    MessageNotFoundError.err_code,
                ) from denied
        if found is None:
            raise MessageNotFoundError(
                f"{self._stream}: no message for {request} (code 404, err_code 10037)",
                MessageNotFoundError.code,
                MessageNotFoundError.err_code,
            )
        start_time = request.get("start_time")
        if start_time is not None and nanoseconds(found.time) < nanoseconds(start_time):
            raise ServerTooOldError(
                f"{self._stream}: the server has overlooked the start time: Direct Get from a time "
                f"needs nats-server 2.11 or later"
            )
        return found

    async def _direct(self, request: dict[str, Any], appended: str | None) -> Reply | None:
        """The answer of a replica or mirror; None where nobody is there to give one."""
        if self.off:
            return None
        subject = f"DIRECT.GET.{self._stream}"
        connection = self._jetstream.connection
        try:
            if appended is not None:
                reply = await ask(connection, f"{subject}.{appended}", None)
            else:
                reply = await ask(connection, subject, request)
        except PermissionDeniedError:
            return None  # the leader may be allowed to be asked
        if reply.code == NOBODY:
            # A server that starts says so too: only the configuration says that it stays so.
            with contextlib.suppress(PermissionDeniedError):
                info = await self._jetstream.stream_info(self._stream)
                self.off = not info.config.get("allow_direct")
            return None
        if "start_time" in request and reply.code is not None and reply.code != NOT_FOUND:
            return None  # before 2.11 a start time alone is an empty request
        check(self._stream, reply)
        return reply
