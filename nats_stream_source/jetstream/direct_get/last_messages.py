"""The last message of each of many subjects by Direct Get (ADR-31, "Multi-subject requests").

The messages are those of one point in time: a past one, or the present, which the first page
reports (``Nats-UpTo-Sequence``). A page counts if it is whole and its server has reached the
point in time:

- At present the EOB reports the server's own last sequence, which must not be lower than the
  leader's was.
- In the past the EOB only repeats the requested sequence. A replicated stream proves it by the
  *boundary message*, the message at that sequence, which is requested too, by its subject.
- A 404 does not name the server that sent it. The request is repeated with the boundary's subject.

A stream that keeps one message of a subject removes the message of the point in time when a newer
one is written between two pages. So the first page reports the number of all subjects, in the last
message's ``Nats-Num-Pending`` (the EOB of 2.11 counts one less when the page was cut).

What the pages lack of the present is requested from the leader, subject by subject. For the past,
an ordered consumer reads ``(last message, up_to]``, and the last message of each subject is kept.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Any

import numpy as np

from nats_stream_source.errors import TooManySubjectsError
from nats_stream_source.jetstream.api import JetStream, StoredMessage, as_delivered
from nats_stream_source.jetstream.direct_get.pages import PageLimits, PageReader
from nats_stream_source.jetstream.direct_get.request import (
    MAX_SUBJECTS,
    DirectGetReply,
    first_message_at,
    stored_messages,
    too_many_subjects_error,
)
from nats_stream_source.jetstream.subjects import covers, overlap
from nats_stream_source.wire.columns import subjects
from nats_stream_source.wire.consumer.deliveries import Deliveries
from nats_stream_source.wire.direct_get.replies import EOB, NOT_FOUND
from nats_stream_source.wire.encode import encode_deliveries

_MAX_IN_FLIGHT = 64  # concurrent message requests to the leader


class LastMessagesReader(PageReader):
    """Reads the last message of each subject.

    Args:
        subjects: at least one; they may have wildcards and overlap.
        up_to_seq: the sequence of the point in time; None for the present.
        up_to_time: the point in time instead; RFC 3339.

    Attributes:
        up_to_seq: the sequence of the point in time; None before the first page.
    """

    def __init__(
        self,
        jetstream: JetStream,
        stream: str,
        subjects: tuple[str, ...],
        limits: PageLimits,
        *,
        up_to_seq: int | None = None,
        up_to_time: str | None = None,
    ) -> None:
        super().__init__(jetstream, stream, limits)
        self.up_to_seq: int | None = None
        self._subjects = subjects
        self._patterns = [subject for subject in subjects if "*" in subject or ">" in subject]
        self._literals = set(subjects).difference(self._patterns)
        self._point = up_to_seq, up_to_time
        self._is_past = (up_to_seq or up_to_time) is not None
        self._boundary: str | None = None
        self._seen: set[str] = set()
        self._expected = 0  # subjects at present, as the first page reports them

    async def _last_sequence(self) -> int:
        """The sequence of the point in time; 0 before the first message."""
        seq, time = self._point
        last_seq = self._info.last_seq
        if seq is not None:
            last_seq = min(seq, last_seq)
        elif time is not None:
            later = await first_message_at(self._jetstream, self._stream, time)
            if later is not None:
                last_seq = min(later.seq - 1, last_seq)
        self.up_to_seq = last_seq
        return last_seq

    @property
    def _is_first_of_present(self) -> bool:
        return not self._is_past and not self._position

    async def _request_page(self) -> DirectGetReply | None:
        needs_boundary = self._info.replicated and not self._is_first_of_present
        while True:
            if needs_boundary and self._boundary is None:
                boundary = await self._jetstream.message(self._stream, seq=self._end)
                if boundary is None:
                    return None
                self._boundary = boundary.subject
            try:
                reply = await self._request_subjects()
            except TooManySubjectsError:
                if self._boundary is None:
                    raise
                return None  # the boundary's subject may exceed the limit by one
            if reply is None or reply.code != NOT_FOUND or self._boundary is not None:
                return reply
            needs_boundary = True

    async def _request_subjects(self) -> DirectGetReply | None:
        subjects = self._subjects
        if self._boundary is not None and not self._is_requested(self._boundary):
            subjects = (*subjects, self._boundary)
        body: dict[str, Any] = {"multi_last": list(subjects)}
        if not self._is_first_of_present:
            body["up_to_seq"] = self._end
        # With ``batch`` the page could end before the boundary message.
        if self._limits.batch is not None and self._boundary is None:
            body["batch"] = self._limits.batch
        if self._position:
            body["seq"] = self._position + 1
        return await self._send(body, subjects)

    def _counts(self, reply: DirectGetReply) -> bool:
        status, page = reply.status, reply.page
        if status is None or status.code != EOB or not page:
            return False
        if not page.all_from(self._stream):
            return False
        if self._is_first_of_present:
            return (status.up_to_seq or 0) >= self._info.last_seq
        return not self._info.replicated or bool((page.stream_seq == self._end).any())

    def _take(self, reply: DirectGetReply) -> Deliveries:
        page = self._unseen(reply.page)
        if self._is_first_of_present:
            assert reply.status is not None
            self._end = self.up_to_seq = reply.status.up_to_seq or self._info.last_seq
            self._expected = len(page) + reply.num_pending
            self._boundary = None
        self._position = int(reply.page.stream_seq[-1])
        return page

    def _is_requested(self, subject: str) -> bool:
        return subject in self._literals or any(covers(one, subject) for one in self._patterns)

    def _unseen(self, page: Deliveries) -> Deliveries:
        """The messages of requested subjects that were not read before."""
        # The boundary message may be of a subject that was not requested.
        names = subjects(page).to_pylist()
        new = [name not in self._seen and self._is_requested(name) for name in names]
        if not all(new):
            page = page.select(np.array(new))
            names = subjects(page).to_pylist()
        self._seen.update(names)
        return page

    async def _goes_on(self, reply: DirectGetReply) -> bool:
        if not reply.num_pending:
            self._position = self._end
        return True

    async def _rest(self) -> AsyncGenerator[Deliveries, None]:
        if self._is_past:
            yield await self._last_of_consumer()
        elif self._position < self._end or len(self._seen) < self._expected:
            yield await self._last_of_leader()

    async def _last_of_consumer(self) -> Deliveries:
        last = {}
        filters = _disjoint_filters(self._subjects)
        async for page in self._read_with_consumer(filters):
            for message in stored_messages(page):
                last[message.subject] = message
            if len(last) > MAX_SUBJECTS:
                raise too_many_subjects_error(self._stream, self._subjects)
        return self._page(last.values())

    async def _last_of_leader(self) -> Deliveries:
        names = set(self._literals)
        for pattern in self._patterns:
            names |= await self._jetstream.subjects(self._stream, pattern, MAX_SUBJECTS)
            if len(names) > MAX_SUBJECTS:
                raise too_many_subjects_error(self._stream, self._subjects)
        unseen = sorted(names - self._seen)
        found = await self._jetstream.last_messages(self._stream, unseen, _MAX_IN_FLIGHT)
        return self._page(found)

    def _page(self, found: Iterable[StoredMessage]) -> Deliveries:
        in_order = sorted(found, key=lambda message: message.seq)
        delivered = [as_delivered(message, headers_only=False) for message in in_order]
        return self._unseen(encode_deliveries(self._stream, delivered))


def _disjoint_filters(subjects: tuple[str, ...]) -> tuple[str, ...]:
    """Filters that match all of ``subjects`` and do not overlap, as a consumer requires them.

    Empty, for the whole stream, where omitting covered subjects does not make them disjoint.
    """
    disjoint: list[str] = []
    for subject in dict.fromkeys(subjects):
        if any(covers(other, subject) for other in disjoint):
            continue
        disjoint = [other for other in disjoint if not covers(subject, other)]
        disjoint.append(subject)
    for index, subject in enumerate(disjoint):
        if subject == ">" or any(overlap(subject, other) for other in disjoint[:index]):
            return ()
    return tuple(disjoint)
