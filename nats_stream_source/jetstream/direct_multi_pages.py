"""Pages of a multi-subject Direct Get, as whoever answers has them (ADR-31).

A server answers from its own store at one point in time: what was asked for, or its last sequence,
which the EOB names (``Nats-UpTo-Sequence``). Most often one page is all. Where a page is cut, by
``batch`` or ``max_bytes``, the next one asks up to the same sequence and from after the last
message on, since a page ascends by sequence. What makes this complete is in ``direct_multi``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from nats_stream_source.errors import BadRequestError, PermissionDeniedError, ServerTooOldError
from nats_stream_source.jetstream.api import JetStream, StoredMessage
from nats_stream_source.jetstream.direct_request import (
    Reply,
    ask,
    check,
    check_positive,
    one_answer_only,
)
from nats_stream_source.jetstream.subjects import covers
from nats_stream_source.wire.answers import EOB, NOBODY, NOT_FOUND

ATTEMPTS = 4  # at Direct Get, since another one may answer the next time


@dataclass(frozen=True, slots=True)
class LastRequest:
    """What :meth:`DirectGet.last_for` was asked for; see there."""

    stream: str
    subjects: tuple[str, ...]
    up_to_seq: int | None
    up_to_time: str | None
    batch: int | None
    max_bytes: int
    complete: bool
    min_last_seq: int | None
    timeout: float | None

    def check(self) -> None:
        """Raise BadRequestError for what no server would take."""
        if not self.subjects or not all(self.subjects):
            raise BadRequestError("no subject to get the last message of")
        if self.up_to_seq is not None and self.up_to_time is not None:
            raise BadRequestError("up_to_seq and up_to_time exclude each other")
        check_positive(up_to_seq=self.up_to_seq, batch=self.batch, max_bytes=self.max_bytes)


class LastReading:
    """One :meth:`DirectGet.last_for` being read.

    Attributes:
        unfinished: whether :meth:`pages` ended before all was there.
    """

    def __init__(self, jetstream: JetStream, request: LastRequest) -> None:
        self._jetstream = jetstream
        self._request = request
        self._last = 0
        self._seen: set[str] = set()
        self._patterns = [one for one in request.subjects if "*" in one or ">" in one]
        self._literals = set(request.subjects).difference(self._patterns)
        self.unfinished = False

    async def pages(self) -> AsyncGenerator[list[StoredMessage], None]:
        """What whoever answers has, page by page."""
        request = self._request
        up_to: dict[str, Any] = {}
        if request.up_to_seq is not None:
            up_to["up_to_seq"] = request.up_to_seq
        elif request.up_to_time is not None:
            up_to["up_to_time"] = request.up_to_time
        fruitless = 0
        while True:
            reply = await self._ask(request.subjects, up_to, request.batch)
            if reply is not None and reply.code == NOT_FOUND:
                missing = request.up_to_time is None
                self.unfinished = missing and await self._any_at_leader(request.up_to_seq)
                return
            if reply is None or not (reply.page or reply.code == EOB):
                fruitless += 1
                if fruitless >= ATTEMPTS or reply is None or reply.code == NOBODY:
                    self.unfinished = True
                    return
                continue
            fruitless = 0
            yield self._new(reply)
            if reply.status is not None:
                if not remaining(reply):
                    return
                up_to = {"up_to_seq": reply.status.up_to_seq}
            elif not up_to:
                self.unfinished = True  # no EOB, so no point in time to go on with
                return

    async def _ask(
        self, subjects: tuple[str, ...], up_to: dict[str, Any], batch: int | None
    ) -> Reply | None:
        """The next page; None where it may not be asked for."""
        request = self._request
        if self._jetstream.connection in one_answer_only:
            return None
        body: dict[str, Any] = {"multi_last": list(subjects), "max_bytes": request.max_bytes}
        body |= up_to
        if batch is not None:
            body["batch"] = batch
        if self._last:
            body["seq"] = self._last + 1
        try:
            reply = await ask(self._jetstream.connection, f"DIRECT.GET.{request.stream}", body)
        except PermissionDeniedError:
            return None
        check(request.stream, reply, needs="2.11", subjects=subjects)
        if reply.page and reply.page.answers[0].pending is None:
            raise ServerTooOldError(
                f"{request.stream}: the server has overlooked the subjects: multi-subject requests "
                f"need nats-server 2.11 or later"
            )
        return reply

    def _new(self, reply: Reply) -> list[StoredMessage]:
        """The page's messages of subjects that were not seen yet."""
        self._last = max(self._last, reply.page.last_seq)
        return self._unseen(reply.page.messages())

    def _unseen(self, messages: list[StoredMessage]) -> list[StoredMessage]:
        # A witness may be of a subject that nobody asked for.
        new = [
            message
            for message in messages
            if message.subject not in self._seen
            and (
                message.subject in self._literals
                or any(covers(one, message.subject) for one in self._patterns)
            )
        ]
        self._seen.update(message.subject for message in new)
        return new

    async def _any_at_leader(self, up_to: int | None) -> bool:
        """Whether the leader has a message that is still to be read."""
        for subject in self._request.subjects:
            found = await self._jetstream.message(
                self._request.stream, seq=self._last + 1, next_by_subj=subject
            )
            if found is not None and (up_to is None or found.seq <= up_to):
                return True
        return False


def remaining(reply: Reply) -> int:
    """How many messages are still to come after this page."""
    if reply.page:
        return reply.page.answers[-1].pending or 0
    return (reply.status.num_pending if reply.status else None) or 0
