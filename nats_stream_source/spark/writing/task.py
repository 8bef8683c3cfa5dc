"""Writes the rows of one task: the part of a sink that runs on executors, without Spark's classes.

A task encodes each record batch as columns, sends it, and reads the next one while PubAcks arrive.
It ends when each of its rows has its PubAck, or was skipped because of a conflict; otherwise it
fails with a named error. The rows that were sent before the failure may be stored.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pyarrow as pa

from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.kv.batch_writer import KvBatchWriter
from nats_stream_source.jetstream.kv.bucket import Bucket
from nats_stream_source.jetstream.publish.batch_publisher import BatchPublisher, FastIngestPublisher
from nats_stream_source.jetstream.publish.column_publisher import ColumnPublisher
from nats_stream_source.logs import field_logger
from nats_stream_source.options.writing import (
    KvWriteOptions,
    MessageId,
    OnConflict,
    StreamWriteOptions,
)
from nats_stream_source.spark.runner import cached_runner
from nats_stream_source.spark.writing.rows import (
    KvRowEncoder,
    MessageIds,
    RowEncoder,
    StreamRowEncoder,
)
from nats_stream_source.spark.writing.target import (
    max_message_size,
    open_bucket,
    open_stream,
    writable_subjects,
)

log = field_logger(__name__)


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What a task has written.

    Attributes:
        stored: number of rows that are stored.
        duplicates: number of those that were stored before, by an earlier attempt.
        skipped: number of rows that were not stored because of a conflict.
    """

    stored: int = 0
    duplicates: int = 0
    skipped: int = 0


def write_task(
    options: KvWriteOptions | StreamWriteOptions,
    batches: Iterator[pa.RecordBatch],
    *,
    job: str,
    partition: int,
) -> TaskResult:
    """Write all rows of ``batches``, in order.

    Args:
        job: identifies the job, or the query and its micro-batch, in message ids.
        partition: the number of the task's partition.
    """
    runner = cached_runner(options.connection)
    ids = MessageIds(job, partition, options.message_id is MessageId.AUTO)
    results: list[TaskResult] = []

    async def write() -> AsyncIterator[None]:
        """Write one record batch at a time; Spark produces the next one in between."""
        jetstream = await runner.connection.jetstream()
        async with _open(jetstream, options, ids) as (encoder, writer):
            for batch in batches:
                await writer.send(encoder.encode(batch))
                yield
            await writer.flush()
            if changed := encoder.changed_headers:
                log.warning(
                    "headers that cannot be sent were changed",
                    target=options.target,
                    headers=changed,
                    how=options.invalid_headers.value,
                )
            skipped = writer.skipped if isinstance(writer, KvBatchWriter) else 0
            results.append(TaskResult(writer.stored, writer.duplicates, skipped))

    for _ in runner.iterate(write()):
        pass
    return results[0]


@asynccontextmanager
async def _open(
    jetstream: JetStream, options: KvWriteOptions | StreamWriteOptions, ids: MessageIds
) -> AsyncIterator[tuple[RowEncoder, KvBatchWriter | ColumnPublisher]]:
    max_payload = jetstream.connection.client.max_payload
    if isinstance(options, KvWriteOptions):
        info = await open_bucket(jetstream, options)
        bucket = Bucket.of(info, options.codec)
        no_ttl = "" if bucket.allows_message_ttl else _why_no_ttl(jetstream)
        kv_encoder = KvRowEncoder(
            bucket.name,
            bucket.write_prefix(options.connection.api_prefix),
            ids,
            max_message_size(info, max_payload),
            no_ttl,
            options.codec,
            options.invalid_headers,
        )
        async with KvBatchWriter(
            jetstream,
            bucket,
            skip_conflicts=options.on_conflict is OnConflict.SKIP,
            max_in_flight=options.max_in_flight,
        ) as kv_writer:
            yield kv_encoder, kv_writer
        return
    info = await open_stream(jetstream, options)
    encoder = StreamRowEncoder(
        options.target,
        options.subject,
        writable_subjects(info, options),
        ids,
        max_message_size(info, max_payload),
        options.invalid_headers,
    )
    publisher = FastIngestPublisher if options.fast_ingest else BatchPublisher
    async with publisher(
        jetstream, options.target, max_in_flight=options.max_in_flight, no_ack=info.no_ack
    ) as writer:
        yield encoder, writer


def _why_no_ttl(jetstream: JetStream) -> str:
    version = jetstream.connection.client.connected_server_version
    if (version.major, version.minor) < (2, 11):
        return (
            f"a ttl needs nats-server 2.11 or newer, found {version.major}.{version.minor}; "
            f"upgrade the server or drop the column 'ttl'"
        )
    return (
        "the bucket does not accept a ttl; update it with limit_marker_ttl (create it with "
        "limitMarkerTtl), or drop the column 'ttl'"
    )
