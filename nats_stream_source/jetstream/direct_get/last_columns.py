"""The last message of each of many subjects without wildcards, as columns.

``last_messages`` reads subjects with wildcards, as objects, at one point in time. This module reads
thousands of known subjects, in requests of at most 1,024 (ADR-31, "Multi-subject requests") of
which several are sent at a time, and creates no object for a message.

**Complete and current.** The caller has the stream info of the leader. A message that the leader
had then, or a newer one of its subject, is in the result. A reply counts if

- each of its messages names the stream itself: a mirror may hold only a part;
- its EOB reports (``Nats-UpTo-Sequence``) that the server had reached the leader's last sequence.

A 404 does not name the server that sent it. So the request is repeated with one more subject of
which the leader has a message: a reply with that message is a reply as above. A reply that
``max_bytes`` cuts is followed by a request for the subjects that it lacks, as they are by then.

Where replies do not count (a replica lags, a mirror responds, Direct Get is off or not permitted,
an account import passes one message only, a server before 2.11), the leader is requested for each
subject.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.aio.tasks import gather_limited
from nats_stream_source.connection.connection import Connection
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.direct_get.page import DirectGetPage
from nats_stream_source.jetstream.direct_get.request import (
    ATTEMPTS,
    MAX_SUBJECTS,
    DirectGetReply,
    send_batch_request,
)
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.wire.arrow_slices import slices
from nats_stream_source.wire.columns import entry_operations, payloads
from nats_stream_source.wire.direct_get.reply import EOB, NOT_FOUND
from nats_stream_source.wire.headers import operations

MAX_BYTES = 8 << 20  # of a reply
_MAX_IN_FLIGHT = 4  # requests for many subjects
_MAX_LEADER_REQUESTS = 64
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


async def last_columns(jetstream: JetStream, info: StreamInfo, subjects: pa.Array) -> pa.Table:
    """Return the last message of each subject that has one: :data:`LAST_MESSAGES`, in any order.

    Args:
        info: the stream as its leader has just reported it.
        subjects: distinct subjects without wildcards.

    Raises:
        NameTooLongError: no server accepts a subject.
        StreamNotFoundError, PermissionDeniedError, RequestTimeoutError: of requests to the leader.
    """
    if not info.messages:
        return LAST_MESSAGES.empty_table()
    reader = _Reader(jetstream, info)
    parts = list(_parts(subjects, jetstream.connection))
    batches = await gather_limited(reader.read, parts, _MAX_IN_FLIGHT)
    return pa.Table.from_batches([one for part in batches for one in part], LAST_MESSAGES)


def _parts(subjects: pa.Array, connection: Connection) -> Iterator[list[str]]:
    """Divide the subjects into those of one request, which the server accepts."""
    # One subject less, for the one that is added after a 404.
    longest = pc.max(pc.binary_length(subjects)).as_py() or 0
    by_size = connection.client.max_payload // 2 // (longest + _BODY_OF_SUBJECT)
    names = iter(subjects.to_pylist())
    while part := list(islice(names, max(1, min(MAX_SUBJECTS - 1, by_size)))):
        yield part


class _Reader:
    """Reads the subjects of one request at a time."""

    def __init__(self, jetstream: JetStream, info: StreamInfo) -> None:
        self._jetstream = jetstream
        self._info = info

    async def read(self, subjects: list[str]) -> list[pa.RecordBatch]:
        """Return the last messages of subjects."""
        batches: list[pa.RecordBatch] = []
        rest = subjects
        while rest:
            reply = await self._current_reply(rest)
            if reply is None:
                return [*batches, await self._read_from_leader(rest)]
            # Without the subject that was added after a 404.
            page = _batch(reply.page)
            batches.append(page.filter(pc.is_in(page["subject"], value_set=pa.array(rest))))
            if not reply.num_pending:
                break
            found = set(page["subject"].to_pylist())
            rest = [subject for subject in rest if subject not in found]
        return batches

    async def _current_reply(self, subjects: list[str]) -> DirectGetReply | None:
        """A reply that counts; None if no server returns one."""
        requested = subjects
        for _ in range(ATTEMPTS):
            body = {"multi_last": requested, "max_bytes": MAX_BYTES}
            reply = await send_batch_request(self._jetstream.connection, self._info.name, body)
            if reply is None:
                return None
            if reply.code == NOT_FOUND:
                known = await self._jetstream.message(self._info.name, seq=self._info.last_seq)
                if known is None:
                    return None
                requested = [*subjects, known.subject]
            elif reply.code == EOB and self._counts(reply):
                return reply
            elif reply.code not in (EOB, None):
                return None
        return None

    def _counts(self, reply: DirectGetReply) -> bool:
        assert reply.status is not None
        is_current = (reply.status.up_to_seq or 0) >= self._info.last_seq
        return is_current and len(reply.page) > 0 and reply.is_from_stream(self._info.name)

    async def _read_from_leader(self, subjects: list[str]) -> pa.RecordBatch:
        found = await self._jetstream.last_messages(self._info.name, subjects, _MAX_LEADER_REQUESTS)
        headers = pa.array([message.headers for message in found], pa.binary())
        return pa.record_batch(
            [
                pa.array([message.subject for message in found], pa.string()),
                pa.array([message.seq for message in found], pa.int64()),
                pa.array(
                    [nanoseconds(message.time) for message in found], LAST_MESSAGES.field(2).type
                ),
                pa.array([message.data for message in found], pa.binary()),
                operations(headers),
            ],
            schema=LAST_MESSAGES,
        )


def _batch(page: DirectGetPage) -> pa.RecordBatch:
    """The messages of a page as columns."""
    replies, frames = page.replies, page.frames
    subjects = slices(frames.buffer, *replies.subject_spans, pa.binary())
    times = slices(frames.buffer, *replies.time_spans, pa.string())
    marked = entry_operations(frames)
    return pa.record_batch(
        [
            subjects.cast(pa.string()),
            pa.array(page.sequences),
            times.cast(LAST_MESSAGES.field(2).type),
            payloads(frames),
            pa.repeat("PUT", len(page)) if marked is None else marked,
        ],
        schema=LAST_MESSAGES,
    )
