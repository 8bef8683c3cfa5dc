"""Reads the last message of each subject as of now: complete, one row per subject, and finite.

The plan covers the last message of each subject up to ``end``, the stream's last sequence at that
time. A consumer of the stream leader delivers each message that is still its subject's last, once:
the messages up to ``end`` do not change, they can only be removed. (A lagging replica would deliver
an older message of a subject first, and then its last one.)

A message that was superseded before it was delivered is missing: 7 to 8 % of 100,000 keys under
steady writes, at any history (docs/internals/measurements.md, "Servers"). Its successor is beyond
``end``. So unless as many subjects were received as the plan counted, the messages written since
are read as well, and of subjects not yet received the first message is kept
(``catch_up``). If writers do not pause, the leader lists the subjects, and returns
the last message of each that is missing. A subject without a message by then was removed meanwhile.

The guarantee: one row for each subject that had a message both when the read was planned and when
it ended; the row is the subject's last message at some time in between. So it is at least as new as
the plan, and rows of different subjects may be of different times. A subject that is created, or of
which messages are removed, meanwhile may or may not have a row. A repeated task gives the same
guarantee, possibly with later rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence

import pyarrow as pa

from nats_stream_source.jetstream.api import (
    StoredMessage,
    as_delivered,
    list_subjects,
    max_concurrent_requests,
)
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.retry import retry_transient
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.subjects import is_literal
from nats_stream_source.logs import field_logger
from nats_stream_source.rows.base import FormatAdapter
from nats_stream_source.rows.splits import BatchSplit
from nats_stream_source.spark.reading.loss import range_frames
from nats_stream_source.spark.reading.state.catch_up import CatchUpReader, all_subjects_seen
from nats_stream_source.spark.reading.state.subjects_seen import SubjectsSeen
from nats_stream_source.spark.runner import cached_runner
from nats_stream_source.wire.columns import subjects
from nats_stream_source.wire.consumer.deliveries import Deliveries
from nats_stream_source.wire.encode import encode_deliveries

log = field_logger(__name__)


def read_latest_values(batch_split: BatchSplit, adapter: FormatAdapter) -> Iterator[pa.RecordBatch]:
    """Yield the rows: those of the planned range in the order of their sequences, then others.

    Raises:
        DataLossError: the stream was re-created or rolled back while it was read.
        ConsumerLostError, MinLastSequenceError, ConnectError, …: see ``jetstream.ordered.reader``.
    """
    split, runner = batch_split.split, cached_runner(adapter.options.connection)
    seen = SubjectsSeen()
    reader = OrderedReader(runner.connection, split.range)
    with contextlib.closing(runner.iterate(range_frames(reader))) as batches:
        for frames in batches:
            if len(frames):
                seen.add(subjects(frames, replace=True))
            yield from adapter.rows(frames, split)
    in_range, catch_up = len(seen), CatchUpReader(runner, batch_split, reader.info)

    def is_complete(info: StreamInfo) -> bool:
        # The range delivers each subject once, so this count is exact.
        all_in_range = in_range == batch_split.subject_count
        return all_in_range or all_subjects_seen(batch_split, info, len(seen))

    for frames in catch_up.frames(is_complete, headers_only=split.range.headers_only):
        yield from adapter.rows(seen.first_messages(frames), split)
    # A TTL that removes a message may uncover an older one, without a new message.
    uncovers = batch_split.history != 1 and catch_up.info.config.get("allow_msg_ttl")
    if is_complete(catch_up.info) or (catch_up.caught_up and not uncovers):
        return
    missing = _missing_messages(runner.connection, batch_split, adapter, seen)
    with contextlib.closing(runner.iterate(missing)) as batches:
        for frames in batches:
            yield from adapter.rows(frames, split)
    catch_up.verify()


async def _missing_messages(
    connection: ReusableConnection,
    batch_split: BatchSplit,
    adapter: FormatAdapter,
    seen: SubjectsSeen,
) -> AsyncIterator[Deliveries]:
    """The last message of each subject that the leader lists and that was not received."""
    request, timeout = batch_split.split.range, adapter.options.connection.connect_timeout
    stream = request.stream

    async def leader_subjects() -> set[str]:
        return await list_subjects(await connection.jetstream(), stream, request.subject_filters)

    # A subject with wildcard tokens cannot be requested: the server would match others.
    missing = seen.missing(filter(is_literal, await retry_transient(leader_subjects, timeout)))
    log.info("requesting superseded subjects", stream=stream, subjects=len(missing))
    size = max_concurrent_requests(await connection.jetstream())
    for index in range(0, len(missing), size):
        some = missing[index : index + size]

        async def last_messages(names: Sequence[str] = some) -> list[StoredMessage]:
            return await (await connection.jetstream()).last_messages(stream, names)

        if messages := await retry_transient(last_messages, timeout):
            delivered = [
                as_delivered(message, headers_only=request.headers_only) for message in messages
            ]
            yield encode_deliveries(stream, delivered)
