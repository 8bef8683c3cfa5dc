"""The last message of each of many subjects without wildcards, as columns.

The columns are a view of the pages of :class:`LastMessagesReader`. Subjects are read in requests of
at most 1,024 (ADR-31, "Multi-subject requests"), of which several are sent at a time, each with a
point in time of its own. No object is created for a message of a Direct Get.

The caller has the stream info of the leader: a message that the leader had then, or a newer one of
its subject, is in the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.aio.tasks import gather_limited
from nats_stream_source.connection.connection import Connection
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.direct_get.last_messages import LastMessagesReader
from nats_stream_source.jetstream.direct_get.pages import PageLimits
from nats_stream_source.jetstream.direct_get.request import MAX_SUBJECTS
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.wire.columns import entry_operations, payloads
from nats_stream_source.wire.columns import subjects as subjects_of
from nats_stream_source.wire.consumer.deliveries import Deliveries

MAX_BYTES = 8 << 20  # of a reply
_MAX_IN_FLIGHT = 4  # requests for many subjects
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
        DataLossError: the stream was re-created or rolled back during the read.
        StreamNotFoundError, PermissionDeniedError, RequestTimeoutError: of requests to the leader.
    """
    if not info.messages:
        return LAST_MESSAGES.empty_table()

    async def read(part: tuple[str, ...]) -> list[pa.RecordBatch]:
        reader = LastMessagesReader(jetstream, info.name, part, PageLimits(None, MAX_BYTES))
        return [_columns(page) async for page in reader.pages(info)]

    parts = list(_parts(subjects, jetstream.connection, info))
    batches = await gather_limited(read, parts, _MAX_IN_FLIGHT)
    return pa.Table.from_batches([one for part in batches for one in part], LAST_MESSAGES)


def _parts(
    subjects: pa.Array, connection: Connection, info: StreamInfo
) -> Iterator[tuple[str, ...]]:
    """Divide the subjects into those of one request, which the server accepts and answers whole."""
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
