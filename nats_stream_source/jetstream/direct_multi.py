"""The last message of each of many subjects by Direct Get (ADR-31, "Multi-subject requests").

The pages themselves are read in ``direct_multi_pages``. What makes an answer complete:

- Every message names the stream itself: mirrors may hold a part only.
- Who answered has got as far as the leader had when it was asked: the EOB says so where no
  ``up_to_seq`` was given. Where one was, the EOB only repeats it; on a replicated stream the
  message *at* that sequence is then asked for too, by its subject, as a witness: a replica that
  has not got there cannot send it.
- No subject is lost between two pages. A stream that keeps one message of a subject forgets the one
  that was current at the point in time when another is written. The first page says how many
  subjects there are in all (the last message's ``Nats-Num-Pending``: the EOB of 2.11 counts one
  less when the page was cut).

Where that does not hold, an ordered consumer reads ``(last message, up_to]`` and the last of each
subject is taken; or, for the present and not the past, the leader lists the subjects
(``STREAM.INFO`` with ``subjects_filter``) and is asked for the last message of each.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from nats_stream_source.errors import ServerTooOldError, TooManySubjectsError
from nats_stream_source.jetstream.api import JetStream, StoredMessage, StreamInfo
from nats_stream_source.jetstream.direct_batch import check_same, ordered_pages
from nats_stream_source.jetstream.direct_multi_pages import (
    ATTEMPTS,
    LastReading,
    LastRequest,
    remaining,
)
from nats_stream_source.jetstream.direct_request import Reply, too_many
from nats_stream_source.jetstream.read_after_write import info_with
from nats_stream_source.jetstream.subjects import covers, overlap
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.jetstream.together import together
from nats_stream_source.wire.answers import EOB, NOBODY, NOT_FOUND

MOST_SUBJECTS = 1024
_IN_FLIGHT = 64  # message gets at the leader


async def last_messages(
    jetstream: JetStream, request: LastRequest
) -> AsyncGenerator[StoredMessage, None]:
    """The messages that :meth:`DirectGet.last_for` yields."""
    request.check()
    before = None
    if not request.complete:
        before = LastReading(jetstream, request)
        async with contextlib.aclosing(before.pages()) as pages:
            async for page in pages:
                for message in page:
                    yield message
        if not before.unfinished:
            return
    async with contextlib.aclosing(_Complete(jetstream, request, before).runs()) as runs:
        async for run in runs:
            for message in run:
                yield message


class _Complete(LastReading):
    """Nothing missing, nothing older than what the leader had; but for what was read before."""

    def __init__(
        self,
        jetstream: JetStream,
        request: LastRequest,
        before: LastReading | None,
    ) -> None:
        super().__init__(jetstream, request)
        if before is not None:
            self._last, self._seen = before._last, before._seen

    async def runs(self) -> AsyncGenerator[list[StoredMessage], None]:
        info = await self._info()
        runs = 0
        async with contextlib.aclosing(self._runs(info)) as found:
            async for run in found:
                runs += 1
                yield run
        if runs > 1:
            await check_same(self._jetstream, info)

    async def _runs(self, info: StreamInfo) -> AsyncGenerator[list[StoredMessage], None]:
        request = self._request
        past = request.up_to_seq is not None or request.up_to_time is not None
        up_to = await self._up_to(info)
        if up_to == 0:
            return  # nothing had been written
        reply = await self._first_page(info, up_to)
        if reply is not None and reply.code == NOT_FOUND:
            return
        announced = None
        if reply is not None:
            assert reply.status is not None
            announced = len(self._seen) + len(reply.page) + remaining(reply)
            yield self._new(reply)
            up_to = reply.status.up_to_seq
            while reply is not None and remaining(reply) and _replicas(info) == 1:
                reply = await self._next_page(up_to)
                if reply is not None:
                    yield self._new(reply)
            if reply is not None and not remaining(reply):
                announced = announced if not past else None
                if announced is None or len(self._seen) >= announced:
                    return
                yield await self._from_leader()
                return
        if not past and (reply is None and announced is None):
            yield await self._from_leader()
            return
        assert up_to is not None
        for run in _parts(await self._by_consumer(info, up_to), request.batch):
            yield run
        if not past and announced is not None and len(self._seen) < announced:
            yield await self._from_leader()

    async def _info(self) -> StreamInfo:
        request = self._request
        least, timeout = request.min_last_seq, request.timeout
        return await info_with(self._jetstream, request.stream, least, timeout)

    async def _up_to(self, info: StreamInfo) -> int | None:
        """The sequence of the point in time; None for the present, 0 for before everything."""
        request = self._request
        if request.up_to_seq is not None:
            return min(request.up_to_seq, info.last_seq)
        if request.up_to_time is None:
            return None
        after = await self._jetstream.message(
            request.stream, start_time=request.up_to_time, next_by_subj=">"
        )
        if after is None:
            return info.last_seq
        if nanoseconds(after.time) < nanoseconds(request.up_to_time):
            raise ServerTooOldError(
                f"{request.stream}: the server has overlooked the time: multi-subject requests "
                f"need nats-server 2.11 or later"
            )
        return min(after.seq - 1, info.last_seq)

    async def _first_page(self, info: StreamInfo, up_to: int | None) -> Reply | None:
        """A page, or a 404, that is as good as the leader's; None where there is none to be had."""
        request = self._request
        alone = _replicas(info) == 1
        subjects, witness = request.subjects, False
        if up_to is not None and not alone:
            at = await self._jetstream.message(request.stream, seq=up_to)
            if at is None:
                return None
            witness = True
            if not any(covers(one, at.subject) for one in subjects):
                subjects = (*subjects, at.subject)
        bound = {} if up_to is None else {"up_to_seq": up_to}
        for _ in range(ATTEMPTS):
            try:
                # A page that is cut would end before the witness.
                reply = await self._ask(subjects, bound, request.batch if alone else None)
            except TooManySubjectsError:
                if subjects == request.subjects:
                    raise
                return None  # the witness may be one too many
            if reply is None or reply.code == NOBODY:
                return None
            if reply.code == NOT_FOUND and not await self._any_at_leader(up_to):
                return reply
            if reply.code != EOB or not reply.speaks_for(request.stream):
                continue
            if witness:
                fresh = bool((reply.page.sequences == up_to).any())
            else:
                assert reply.status is not None
                fresh = up_to is not None or (reply.status.up_to_seq or 0) >= info.last_seq
            if fresh:
                return reply
        return None

    async def _next_page(self, up_to: int | None) -> Reply | None:
        for _ in range(ATTEMPTS):
            reply = await self._ask(
                self._request.subjects, {"up_to_seq": up_to}, self._request.batch
            )
            if reply is None:
                return None
            if reply.code == EOB and reply.speaks_for(self._request.stream):
                return reply
            if reply.code == NOT_FOUND:
                return None  # what was announced is gone, or a mirror has answered
        return None

    async def _by_consumer(self, info: StreamInfo, up_to: int) -> list[StoredMessage]:
        """The last message of each subject in ``(last, up_to]``, where the rest of them are."""
        request = self._request
        found: dict[str, StoredMessage] = {}
        async for page in ordered_pages(
            self._jetstream,
            info,
            self._last,
            up_to,
            _apart(request.subjects),
            batch=8192,
            max_bytes=request.max_bytes,
            timeout=request.timeout,
        ):
            for message in page.messages():
                found[message.subject] = message
            if len(found) > MOST_SUBJECTS:
                raise too_many(request.stream, request.subjects)
        return self._unseen(sorted(found.values(), key=lambda message: message.seq))

    async def _from_leader(self) -> list[StoredMessage]:
        """The leader's last message of each subject that was not seen yet."""
        request = self._request
        names: set[str] = set()
        for subject in request.subjects:
            names |= await self._jetstream.subjects(request.stream, subject, MOST_SUBJECTS)
            if len(names) > MOST_SUBJECTS:
                raise too_many(request.stream, request.subjects)

        async def last(name: str) -> StoredMessage | None:
            return await self._jetstream.message(request.stream, last_by_subj=name)

        found = await together(last, sorted(names - self._seen), _IN_FLIGHT)
        # None: removed between the list and the get.
        messages = [message for message in found if message is not None]
        return self._unseen(sorted(messages, key=lambda message: message.seq))


def _replicas(info: StreamInfo) -> int:
    return int(info.config.get("num_replicas", 1))


def _apart(subjects: tuple[str, ...]) -> tuple[str, ...]:
    """Filters that match all of ``subjects`` and do not overlap, as a consumer needs them.

    None, for the whole stream, where that cannot be done by leaving some out.
    """
    apart: list[str] = []
    for subject in dict.fromkeys(subjects):
        if any(covers(other, subject) for other in apart):
            continue
        apart = [other for other in apart if not covers(subject, other)]
        apart.append(subject)
    for index, one in enumerate(apart):
        if one == ">" or any(overlap(one, other) for other in apart[:index]):
            return ()
    return tuple(apart)


def _parts(messages: list[StoredMessage], size: int | None) -> list[list[StoredMessage]]:
    step = size or max(len(messages), 1)
    return [messages[i : i + step] for i in range(0, len(messages), step)]
