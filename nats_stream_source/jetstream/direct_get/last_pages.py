"""Pages of a multi-subject Direct Get, as one replica or mirror returns them (ADR-31).

A server reads its own store at one point in time: the requested one, or its last sequence, which
the EOB reports (``Nats-UpTo-Sequence``). Usually one page contains all messages. If ``batch`` or
``max_bytes`` cuts a page, the next request names the same sequence and starts after the last
message, since a page ascends by sequence. ``last_messages`` makes these pages complete.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from nats_stream_source.err_codes import UNAVAILABLE
from nats_stream_source.errors import BadRequestError, ServerTooOldError
from nats_stream_source.jetstream.api import JetStream, StoredMessage
from nats_stream_source.jetstream.direct_get.arguments import (
    validate_integer,
    validate_optional_integer,
    validate_read_after_write,
)
from nats_stream_source.jetstream.direct_get.request import (
    ATTEMPTS,
    DirectGetReply,
    raise_for_status,
    send_batch_request,
)
from nats_stream_source.jetstream.subjects import covers
from nats_stream_source.wire.direct_get.reply import EOB, NOT_FOUND


@dataclass(frozen=True, slots=True)
class LastMessagesRequest:
    """The arguments of :meth:`DirectGet.last_for`."""

    stream: str
    subjects: tuple[str, ...]
    up_to_seq: int | None
    up_to_time: str | None
    batch: int | None
    max_bytes: int
    complete: bool
    min_last_seq: int | None
    timeout: float | None

    def validate(self) -> None:
        """Raise BadRequestError for invalid arguments, except ``subjects``."""
        if self.up_to_seq is not None and self.up_to_time is not None:
            raise BadRequestError(
                "invalid multi-subject request: 'up_to_seq' and 'up_to_time' exclude each other"
            )
        validate_optional_integer("up_to_seq", self.up_to_seq)
        validate_optional_integer("batch", self.batch)
        validate_integer("max_bytes", self.max_bytes)
        validate_read_after_write(self.min_last_seq, self.timeout)


class LastMessagesReader:
    """Reads one :meth:`DirectGet.last_for`.

    Attributes:
        incomplete: whether :meth:`pages` ended before all messages were read.
        up_to_seq: the sequence of the point in time of the messages read so far; None before the
            first page, and if no response reports it.
    """

    def __init__(self, jetstream: JetStream, request: LastMessagesRequest) -> None:
        self.up_to_seq: int | None = None
        self._jetstream = jetstream
        self._request = request
        self._last_seq = 0
        self._seen_subjects: set[str] = set()
        self._patterns = [
            subject for subject in request.subjects if "*" in subject or ">" in subject
        ]
        self._literals = set(request.subjects).difference(self._patterns)
        self.incomplete = False

    async def pages(self) -> AsyncGenerator[list[StoredMessage], None]:
        """The messages that the responding server has, page by page."""
        request = self._request
        up_to: dict[str, Any] = {}
        if request.up_to_seq is not None:
            up_to["up_to_seq"] = request.up_to_seq
        elif request.up_to_time is not None:
            up_to["up_to_time"] = request.up_to_time
        failed_attempts = 0
        while True:
            reply = await self._request_page(request.subjects, up_to, request.batch)
            if reply is not None and reply.code == NOT_FOUND:
                if request.up_to_time is None:
                    await self._verify_no_match()
                return
            if reply is None or not (reply.page or reply.code == EOB):
                failed_attempts += 1
                if failed_attempts >= ATTEMPTS or reply is None or reply.code == UNAVAILABLE:
                    self.incomplete = True
                    return
                continue
            failed_attempts = 0
            if reply.status is not None and self.up_to_seq is None:
                self.up_to_seq = reply.status.up_to_seq
            yield self._new_messages(reply)
            if reply.status is not None:
                if not reply.num_pending:
                    return
                up_to = {"up_to_seq": reply.status.up_to_seq}
            elif not up_to:
                self.incomplete = True  # without an EOB the point in time is unknown
                return

    async def _request_page(
        self, subjects: tuple[str, ...], up_to: dict[str, Any], batch: int | None
    ) -> DirectGetReply | None:
        """The next page; None where batches are not permitted or do not arrive."""
        request = self._request
        body: dict[str, Any] = {"multi_last": list(subjects), "max_bytes": request.max_bytes}
        body |= up_to
        if batch is not None:
            body["batch"] = batch
        if self._last_seq:
            body["seq"] = self._last_seq + 1
        reply = await send_batch_request(self._jetstream.connection, request.stream, body)
        if reply is None:
            return None
        raise_for_status(request.stream, reply, min_version="2.11", subjects=subjects)
        if reply.is_of_old_server:
            raise ServerTooOldError(
                f"could not read the last messages of stream {request.stream!r}: the server "
                f"ignored 'multi_last'; multi-subject requests require nats-server 2.11"
            )
        return reply

    def _new_messages(self, reply: DirectGetReply) -> list[StoredMessage]:
        """The page's messages of requested subjects that were not read before."""
        self._last_seq = max(self._last_seq, reply.page.last_seq)
        return self._without_seen(reply.page.messages())

    def _without_seen(self, messages: list[StoredMessage]) -> list[StoredMessage]:
        # The boundary message of ``last_messages`` may be of a subject that was not requested.
        new = [
            message
            for message in messages
            if message.subject not in self._seen_subjects
            and (
                message.subject in self._literals
                or any(covers(pattern, message.subject) for pattern in self._patterns)
            )
        ]
        self._seen_subjects.update(message.subject for message in new)
        return new

    async def _verify_no_match(self) -> None:
        """Set ``incomplete`` if the leader has a message that the responding server lacks."""
        # Before the messages are looked for: what is written later has a higher sequence.
        last_seq = (await self._jetstream.stream_info(self._request.stream)).last_seq
        self.incomplete = await self._leader_has_more(self._request.up_to_seq)
        if not self.incomplete and self.up_to_seq is None:
            self.up_to_seq = min(self._request.up_to_seq or last_seq, last_seq)

    async def _leader_has_more(self, up_to: int | None) -> bool:
        """Whether the leader has an unread message at a sequence up to ``up_to``."""
        for subject in self._request.subjects:
            message = await self._jetstream.message(
                self._request.stream, seq=self._last_seq + 1, next_by_subj=subject
            )
            if message is not None and (up_to is None or message.seq <= up_to):
                return True
        return False
