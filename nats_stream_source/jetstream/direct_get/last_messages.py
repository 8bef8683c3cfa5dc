"""The last message of each of many subjects by Direct Get (ADR-31, "Multi-subject requests").

``last_pages`` reads the pages. A result is complete under three conditions:

- Every message names the stream itself: a mirror may hold only a part of the stream.
- The responding server has reached the last sequence that the leader had before the request.
  Without ``up_to_seq`` the EOB reports the server's last sequence. With ``up_to_seq`` the EOB only
  repeats that number. On a replicated stream the *boundary message*, the message at that sequence,
  is then requested too, by its subject: a replica that has not reached it cannot send it.
- No subject is lost between two pages. A stream that keeps one message of a subject removes the
  message of the point in time when a newer one is written. The first page reports the number of all
  subjects, in the last message's ``Nats-Num-Pending`` (the EOB of 2.11 counts one less when the
  page was cut).

If a condition does not hold, an ordered consumer reads ``(last message, up_to]``, and the last
message of each subject is kept. For the present, not for a past point in time, the leader can also
list the subjects (``STREAM.INFO`` with ``subjects_filter``) and return the last message of each.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

from nats_stream_source.err_codes import UNAVAILABLE
from nats_stream_source.errors import ServerTooOldError, TooManySubjectsError
from nats_stream_source.jetstream.api import JetStream, StoredMessage
from nats_stream_source.jetstream.direct_get.batch import consumer_pages, verify_stream_unchanged
from nats_stream_source.jetstream.direct_get.last_pages import (
    LastMessagesReader,
    LastMessagesRequest,
)
from nats_stream_source.jetstream.direct_get.request import (
    ATTEMPTS,
    MAX_SUBJECTS,
    DirectGetReply,
    too_many_subjects_error,
)
from nats_stream_source.jetstream.leader import stream_info_after
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.subjects import covers, overlap
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.wire.direct_get.reply import EOB, NOT_FOUND

_MAX_IN_FLIGHT = 64  # concurrent message requests to the leader


class LastMessages(AsyncIterator[StoredMessage]):
    """The messages that :meth:`DirectGet.last_for` reads: an async iterator.

    Attributes:
        up_to_seq: the sequence of the point in time of the messages (``Nats-UpTo-Sequence``), from
            the first message or the end of the iteration on. A read that starts after it misses no
            message; it repeats a message that was yielded with a higher sequence. None before, and
            if no server reports it: with ``complete`` off, where no message matches ``up_to_time``.
    """

    def __init__(self, jetstream: JetStream, request: LastMessagesRequest) -> None:
        self.up_to_seq: int | None = None
        self._messages = self._read(jetstream, request)

    def __repr__(self) -> str:
        return f"<LastMessages up_to_seq={self.up_to_seq}>"

    def __aiter__(self) -> LastMessages:
        return self

    async def __anext__(self) -> StoredMessage:
        return await self._messages.__anext__()

    async def aclose(self) -> None:
        """End the read early."""
        await self._messages.aclose()

    async def _read(
        self, jetstream: JetStream, request: LastMessagesRequest
    ) -> AsyncGenerator[StoredMessage, None]:
        incomplete_reader = None
        if not request.complete:
            incomplete_reader = LastMessagesReader(jetstream, request)
            async with contextlib.aclosing(incomplete_reader.pages()) as pages:
                async for page in pages:
                    self.up_to_seq = incomplete_reader.up_to_seq
                    for message in page:
                        yield message
            if not incomplete_reader.incomplete:
                self.up_to_seq = incomplete_reader.up_to_seq
                return
        reader = _CompleteReader(jetstream, request, incomplete_reader)
        async with contextlib.aclosing(reader.complete_pages()) as pages:
            async for page in pages:
                self.up_to_seq = reader.up_to_seq
                for message in page:
                    yield message
        self.up_to_seq = reader.up_to_seq


class _CompleteReader(LastMessagesReader):
    """Reads every message that the leader had, without those that ``predecessor`` has read.

    No message is older than the one that the leader had at the start of the read.
    """

    def __init__(
        self,
        jetstream: JetStream,
        request: LastMessagesRequest,
        predecessor: LastMessagesReader | None,
    ) -> None:
        super().__init__(jetstream, request)
        self._max_up_to_seq: int | None = None
        if predecessor is not None:
            self._last_seq = predecessor._last_seq
            # The leader may have a newer message of a subject that the predecessor has read.
            self._max_up_to_seq = predecessor.up_to_seq or predecessor._last_seq or None
            self._seen_subjects = predecessor._seen_subjects

    async def complete_pages(self) -> AsyncGenerator[list[StoredMessage], None]:
        request = self._request
        info = await stream_info_after(
            self._jetstream, request.stream, request.min_last_seq, request.timeout
        )
        pages_read = 0
        async with contextlib.aclosing(self._read_pages(info)) as pages:
            async for page in pages:
                pages_read += 1
                yield page
        if pages_read > 1:
            await verify_stream_unchanged(self._jetstream, info)

    async def _read_pages(self, info: StreamInfo) -> AsyncGenerator[list[StoredMessage], None]:
        request = self._request
        reads_past = request.up_to_seq is not None or request.up_to_time is not None
        up_to = await self._resolve_up_to(info)
        self._set_up_to_seq(info.last_seq if up_to is None else up_to)
        if up_to == 0:
            return  # the stream had no message at that time
        reply = await self._first_page(info, up_to)
        if reply is not None and reply.code == NOT_FOUND:
            return
        subject_count = None
        if reply is not None:
            assert reply.status is not None
            if reply.status.up_to_seq is not None:
                self._set_up_to_seq(reply.status.up_to_seq)
            subject_count = len(self._seen_subjects) + len(reply.page) + reply.num_pending
            yield self._new_messages(reply)
            up_to = reply.status.up_to_seq
            while reply is not None and reply.num_pending and not info.replicated:
                reply = await self._next_page(up_to)
                if reply is not None:
                    yield self._new_messages(reply)
            if reply is not None and not reply.num_pending:
                subject_count = subject_count if not reads_past else None
                if subject_count is None or len(self._seen_subjects) >= subject_count:
                    return
                yield await self._read_from_leader()
                return
        if not reads_past and (reply is None and subject_count is None):
            yield await self._read_from_leader()
            return
        assert up_to is not None
        for page in _split(await self._read_with_consumer(info, up_to), request.batch):
            yield page
        if (
            not reads_past
            and subject_count is not None
            and len(self._seen_subjects) < subject_count
        ):
            yield await self._read_from_leader()

    def _set_up_to_seq(self, seq: int) -> None:
        self.up_to_seq = seq if self._max_up_to_seq is None else min(seq, self._max_up_to_seq)

    async def _resolve_up_to(self, info: StreamInfo) -> int | None:
        """The sequence of the point in time; None for the present, 0 before the first message."""
        request = self._request
        if request.up_to_seq is not None:
            return min(request.up_to_seq, info.last_seq)
        if request.up_to_time is None:
            return None
        next_message = await self._jetstream.message(
            request.stream, start_time=request.up_to_time, next_by_subj=">"
        )
        if next_message is None:
            return info.last_seq
        if nanoseconds(next_message.time) < nanoseconds(request.up_to_time):
            raise ServerTooOldError(
                f"could not read the last messages of stream {request.stream!r}: the server "
                f"ignored 'up_to_time'; multi-subject requests require nats-server 2.11"
            )
        return min(next_message.seq - 1, info.last_seq)

    async def _first_page(self, info: StreamInfo, up_to: int | None) -> DirectGetReply | None:
        """A page, or a 404, as current as the leader's; None if no server returns one."""
        request = self._request
        subjects, expects_boundary = request.subjects, False
        if up_to is not None and info.replicated:
            boundary = await self._jetstream.message(request.stream, seq=up_to)
            if boundary is None:
                return None
            expects_boundary = True
            if not any(covers(subject, boundary.subject) for subject in subjects):
                subjects = (*subjects, boundary.subject)
        up_to_field = {} if up_to is None else {"up_to_seq": up_to}
        for _ in range(ATTEMPTS):
            try:
                # With ``batch`` the page could end before the boundary message.
                batch = None if info.replicated else request.batch
                reply = await self._request_page(subjects, up_to_field, batch)
            except TooManySubjectsError:
                if subjects == request.subjects:
                    raise
                return None  # the boundary message's subject may exceed the limit by one
            if reply is None or reply.code == UNAVAILABLE:
                return None
            if reply.code == NOT_FOUND and not await self._leader_has_more(up_to):
                return reply
            if reply.code != EOB or not reply.is_from_stream(request.stream):
                continue
            if expects_boundary:
                is_current = bool((reply.page.sequences == up_to).any())
            else:
                assert reply.status is not None
                is_current = up_to is not None or (reply.status.up_to_seq or 0) >= info.last_seq
            if is_current:
                return reply
        return None

    async def _next_page(self, up_to: int | None) -> DirectGetReply | None:
        request = self._request
        for _ in range(ATTEMPTS):
            reply = await self._request_page(request.subjects, {"up_to_seq": up_to}, request.batch)
            if reply is None:
                return None
            if reply.code == EOB and reply.is_from_stream(request.stream):
                return reply
            if reply.code == NOT_FOUND:
                return None  # the pending messages were removed, or a mirror responded
        return None

    async def _read_with_consumer(self, info: StreamInfo, up_to: int) -> list[StoredMessage]:
        """The last message of each remaining subject, out of ``(last message, up_to]``."""
        request = self._request
        last_by_subject: dict[str, StoredMessage] = {}
        async for page in consumer_pages(
            self._jetstream,
            info,
            self._last_seq,
            up_to,
            _disjoint_filters(request.subjects),
            batch=8192,
            max_bytes=request.max_bytes,
            timeout=request.timeout,
        ):
            for message in page.messages():
                last_by_subject[message.subject] = message
            if len(last_by_subject) > MAX_SUBJECTS:
                raise too_many_subjects_error(request.stream, request.subjects)
        return self._without_seen(sorted(last_by_subject.values(), key=lambda found: found.seq))

    async def _read_from_leader(self) -> list[StoredMessage]:
        """The leader's last message of each subject that was not read before."""
        request = self._request
        names: set[str] = set()
        for subject in request.subjects:
            names |= await self._jetstream.subjects(request.stream, subject, MAX_SUBJECTS)
            if len(names) > MAX_SUBJECTS:
                raise too_many_subjects_error(request.stream, request.subjects)

        unseen = sorted(names - self._seen_subjects)
        messages = await self._jetstream.last_messages(request.stream, unseen, _MAX_IN_FLIGHT)
        return self._without_seen(sorted(messages, key=lambda message: message.seq))


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


def _split(messages: list[StoredMessage], size: int | None) -> list[list[StoredMessage]]:
    """``messages`` in pages of at most ``size``."""
    step = size or max(len(messages), 1)
    return [messages[i : i + step] for i in range(0, len(messages), step)]
