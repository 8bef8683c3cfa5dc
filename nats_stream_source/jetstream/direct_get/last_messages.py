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

:func:`last_columns` reads any number of subjects at present, in requests of at most 1,024, each
with a point in time of its own. No object is created for a message of a Direct Get.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Set
from itertools import combinations, islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.aio.tasks import gather_limited
from nats_stream_source.connection.connection import Connection
from nats_stream_source.errors import TooManySubjectsError
from nats_stream_source.jetstream.api import JetStream, as_deliveries
from nats_stream_source.jetstream.direct_get.readers import MAX_BYTES, PageLimits, PageReader
from nats_stream_source.jetstream.direct_get.request import (
    MAX_SUBJECTS,
    first_message_at,
    stored_messages,
    too_many_subjects_error,
)
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.subjects import covers, overlap
from nats_stream_source.wire.columns import entry_operations, payloads, subjects as subjects_of
from nats_stream_source.wire.consumer.deliveries import Deliveries
from nats_stream_source.wire.direct_get.replies import EOB, NOT_FOUND, DirectGetResponse

_MAX_MESSAGE_GETS = 64  # concurrent, for many subjects
_MAX_PARTS = 4  # concurrent multi-subject requests
_BODY_OF_SUBJECT = 3  # bytes of a subject in the request beside its name

LAST_MESSAGES = pa.schema(
    [
        ("subject", pa.string()),
        ("sequence", pa.int64()),
        ("time", pa.timestamp("ns", "UTC")),
        ("data", pa.binary()),
        ("operation", pa.string()),
    ]
)
"""The columns of the messages; ``operation`` is that of an entry of a bucket."""


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
        self._patterns = {subject for subject in subjects if "*" in subject or ">" in subject}
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

    async def _request_page(self) -> DirectGetResponse | None:
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

    async def _request_subjects(self) -> DirectGetResponse | None:
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

    def _counts(self, reply: DirectGetResponse) -> bool:
        status, page = reply.status, reply.page
        if status is None or status.code != EOB or not page:
            return False
        if not page.all_from(self._stream):
            return False
        if self._is_first_of_present:
            return (status.up_to_seq or 0) >= self._info.last_seq
        return not self._info.replicated or bool((page.stream_seq == self._end).any())

    def _take(self, reply: DirectGetResponse) -> Deliveries:
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
        names = subjects_of(page).to_pylist()
        new = [name not in self._seen and self._is_requested(name) for name in names]
        if not all(new):
            page = page.select(np.array(new))
            names = subjects_of(page).to_pylist()
        self._seen.update(names)
        return page

    async def _goes_on(self, reply: DirectGetResponse) -> bool:
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
        filters = _disjoint_filters(self._patterns, self._literals)
        async for page in self._read_with_consumer(filters):
            for message in stored_messages(page):
                if self._is_requested(message.subject):
                    last[message.subject] = message
            if len(last) > MAX_SUBJECTS:
                raise too_many_subjects_error(self._stream, self._subjects)
        return self._unseen(as_deliveries(self._stream, last.values()))

    async def _last_of_leader(self) -> Deliveries:
        names = set(self._literals)
        for pattern in self._patterns:
            names |= await self._jetstream.subjects(self._stream, pattern, MAX_SUBJECTS)
            if len(names) > MAX_SUBJECTS:
                raise too_many_subjects_error(self._stream, self._subjects)
        unseen = sorted(names - self._seen)
        found = await self._jetstream.last_messages(self._stream, unseen, _MAX_MESSAGE_GETS)
        return self._unseen(as_deliveries(self._stream, found))


def _disjoint_filters(patterns: Set[str], literals: Set[str]) -> tuple[str, ...]:
    """Filters that match all of these and do not overlap, as a consumer requires them.

    Empty, for the whole stream, where the patterns that no other one covers overlap.
    """
    wide = {one for one in patterns if sum(covers(other, one) for other in patterns) == 1}
    if ">" in wide or any(overlap(one, other) for one, other in combinations(wide, 2)):
        return ()
    rest = (one for one in literals if not any(covers(pattern, one) for pattern in wide))
    return (*sorted(wide), *sorted(rest))


async def last_columns(jetstream: JetStream, info: StreamInfo, subjects: pa.Array) -> pa.Table:
    """Return the last message of each subject that has one: :data:`LAST_MESSAGES`, in any order.

    A message that the leader had at ``info``, or a newer one of its subject, is in the result.

    Args:
        info: the stream as its leader has just reported it.
        subjects: distinct subjects without wildcards.

    Raises:
        NameTooLongError: no server accepts a subject.
        DataLossError: the stream was re-created or rolled back during the read.
        StreamNotFoundError, PermissionDeniedError, RequestTimeoutError: of requests to the leader.
    """
    if not info.messages:
        return LAST_MESSAGES.empty_table()

    async def read(part: tuple[str, ...]) -> list[pa.RecordBatch]:
        reader = LastMessagesReader(jetstream, info.name, part, PageLimits(max_bytes=MAX_BYTES))
        return [_columns(page) async for page in reader.pages(info)]

    parts = list(_parts(subjects, jetstream.connection, info))
    batches = await gather_limited(read, parts, _MAX_PARTS)
    return pa.Table.from_batches([one for part in batches for one in part], LAST_MESSAGES)


def _parts(
    subjects: pa.Array, connection: Connection, info: StreamInfo
) -> Iterator[tuple[str, ...]]:
    """Divide the subjects by requests, which a server accepts and answers with one page."""
    longest = pc.max(pc.binary_length(subjects)).as_py() or 0
    by_request = connection.client.max_payload // 2 // (longest + _BODY_OF_SUBJECT)
    by_reply = int(MAX_BYTES // max(1.0, info.mean_size))
    # One subject less, for the boundary message's.
    size = max(1, min(MAX_SUBJECTS - 1, by_request, by_reply))
    names = iter(subjects.to_pylist())
    while part := tuple(islice(names, size)):
        yield part


def _columns(page: Deliveries) -> pa.RecordBatch:
    operations = entry_operations(page)
    return pa.record_batch(
        [
            subjects_of(page),
            pa.array(page.stream_seq),
            pa.array(page.time).cast(LAST_MESSAGES.field("time").type),
            payloads(page),
            pa.repeat("PUT", len(page)) if operations is None else operations,
        ],
        schema=LAST_MESSAGES,
    )
