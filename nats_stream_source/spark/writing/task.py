"""Writes the rows of one task: the part of a sink that runs on executors, without Spark's classes.

A task finds its bucket or stream, creates it if it is missing, and refuses one that is read-only;
the driver of a batch does so too, before the job starts. Then the task encodes each record batch as
columns, sends it, and reads the next one while PubAcks arrive. It ends when each of its rows has
its PubAck, or was skipped because of a conflict; otherwise it fails with a named error. The rows
that were sent before the failure may be stored.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from nats_stream_source import err_codes
from nats_stream_source.errors import (
    ApiError,
    BucketExistsError,
    BucketNotFoundError,
    ConfigurationError,
    FastIngestNotSupportedError,
    StreamNotFoundError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.kv.batch_writer import KvBatchWriter
from nats_stream_source.jetstream.kv.bucket import Bucket, bucket_stream_info
from nats_stream_source.jetstream.kv.config import KeyValueConfig
from nats_stream_source.jetstream.kv.store import KeyValue
from nats_stream_source.jetstream.publish.batch_publisher import BatchPublisher, FastIngestPublisher
from nats_stream_source.jetstream.publish.column_publisher import ColumnPublisher
from nats_stream_source.jetstream.publish.pub_ack import no_ack_error
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.subjects import is_account_import
from nats_stream_source.logs import field_logger
from nats_stream_source.options.writing import KvWriteOptions, StreamWriteOptions, WriteOptions
from nats_stream_source.spark.runner import Runner, cached_runner
from nats_stream_source.spark.writing.rows import (
    KvRowEncoder,
    MessageIds,
    RowEncoder,
    StreamRowEncoder,
)

log = field_logger(__name__)

_NANOSECONDS = 1_000_000_000  # per second
_SMALLER = "set the option 'maxBytes' to a size that account and server have left"
_ACTIONS = {
    err_codes.MAX_BYTES_REQUIRED: "set the option 'maxBytes', the size of the bucket or stream",
    err_codes.MAX_STREAM_BYTES_EXCEEDED: "set a smaller 'maxBytes'",
    err_codes.MEMORY_RESOURCES_EXCEEDED: f"{_SMALLER}, or set storage=file",
    err_codes.STORAGE_RESOURCES_EXCEEDED: f"{_SMALLER}, or set storage=memory",
    err_codes.NO_PEERS: "set other 'placementCluster' or 'placementTags', or fewer 'replicas'",
    err_codes.REPLICAS_NOT_SUPPORTED: "set the option 'replicas' to 1, or use a cluster",
    err_codes.NO_LIMITS: "set the option 'replicas' to a number for which the account has limits",
    err_codes.MAX_STREAMS_EXCEEDED: "raise 'max_streams' of the account, or delete one of its "
    "streams",
    err_codes.INVALID_STREAM_CONFIG: "change the option of the property that the text names",
}
"""What to do after an err_code of a creation."""

_SHORT_WINDOW = 120 * _NANOSECONDS  # the server's default; a restart may take longer than less


def prepare_target(options: KvWriteOptions | StreamWriteOptions) -> None:
    """Open the target of a batch on the driver, before its job starts."""
    with closing(Runner(options.connection)) as runner:

        async def prepare() -> None:
            jetstream = await runner.connection.jetstream()
            if isinstance(options, KvWriteOptions):
                await open_bucket(jetstream, options)
            else:
                await open_stream(jetstream, options)

        runner.plan(prepare)


async def open_bucket(jetstream: JetStream, options: KvWriteOptions) -> StreamInfo:
    """The stream of the bucket; creates the bucket if it is missing and ``ifMissing=create``."""
    name = options.target
    try:
        info = await bucket_stream_info(jetstream, name)
    except BucketNotFoundError:
        if not options.create:
            raise
        # Another task may create it at the same time, with the same properties.
        with _creation():
            await KeyValue.create_bucket(jetstream, options.config)
        info = await bucket_stream_info(jetstream, name)
    KeyValueConfig.of(info.config)  # raises UnsupportedStreamError for a stream that is no bucket
    bucket = Bucket.of(info)
    if info.is_mirror:
        raise ConfigurationError(
            f"could not write to bucket {name!r}: it is a mirror, which is read-only; write to the "
            f"mirrored bucket {bucket.write_bucket!r}",
            settings=("bucket",),
        )
    _verify_writable(info, f"bucket {name!r}", options)
    if options.has_ttl and bucket.allows_message_ttl and bucket.history != 1:
        log.warning(
            "a row that expires makes the older revision of its key current again",
            target=f"bucket {name!r}",
            reason="servers write no marker where the key has an older revision",
            history=bucket.history,
            action="write rows with a ttl to a bucket with history=1",
        )
    return info


async def open_stream(jetstream: JetStream, options: StreamWriteOptions) -> StreamInfo:
    """The stream; creates it if it is missing and ``ifMissing=create``."""
    name = options.target
    try:
        info = await jetstream.stream_info(name)
    except StreamNotFoundError:
        if not options.create:
            raise
        await _create_stream(jetstream, options)
        info = await jetstream.stream_info(name)
    if info.is_mirror or not info.config.get("subjects"):
        raise ConfigurationError(
            f"could not write to stream {name!r}: it does not have subjects, because it stores the "
            f"messages of other streams; write to one of those",
            settings=("stream",),
        )
    if options.fast_ingest and not info.config.get("allow_batched"):
        server = jetstream.connection.client.connected_server_version
        raise FastIngestNotSupportedError(
            f"could not write to stream {name!r} with fast ingest: it does not have allow_batched "
            f"(nats-server {server.major}.{server.minor}, expected 2.14 or newer); update the "
            f"stream with allow_batched, or remove the option 'fastIngest'"
        )
    _verify_writable(info, f"stream {name!r}", options)
    return info


def max_message_size(info: StreamInfo, max_payload: int) -> int:
    """The largest message, headers included, that server and stream accept, in bytes."""
    limit = info.config.get("max_msg_size", -1)
    return min(limit, max_payload) if limit > 0 else max_payload


async def _create_stream(jetstream: JetStream, options: StreamWriteOptions) -> None:
    # Another writer may create it at the same time. With other subjects than these, the first row
    # on a subject that it lacks is an error.
    try:
        with _creation():
            await jetstream.call(f"STREAM.CREATE.{options.target}", dict(options.config))
    except ApiError as error:
        if error.err_code != BucketExistsError.err_code:
            raise


@contextmanager
def _creation() -> Iterator[None]:
    """Name the option of a property that the account or the servers refuse."""
    try:
        yield
    except ApiError as error:
        action = _ACTIONS.get(error.err_code or 0)
        if action is None:
            raise
        raise ApiError(f"{error}; {action}", error.code, error.err_code) from error


def _verify_writable(info: StreamInfo, target: str, options: WriteOptions) -> None:
    config: Mapping[str, Any] = info.config
    if config.get("sealed"):
        raise ConfigurationError(
            f"could not write to {target}: its stream is sealed, which is read-only and permanent; "
            f"write to another one"
        )
    if info.no_ack:
        raise no_ack_error(target)
    if config.get("persist_mode") == "async":
        if options.async_persist == "fail":
            raise ConfigurationError(
                f"could not write to {target} with asyncPersist=fail: its persist_mode is 'async', "
                f"expected the default, with which acknowledged rows are stored; write to another "
                f"one, or remove the option"
            )
        log.warning(
            "rows are acknowledged before they are stored",
            target=target,
            reason="persist_mode is async: a server that crashes can lose them",
            action="write to a stream without persist_mode, or accept it",
        )
    window = config.get("duplicate_window", 0)
    if options.message_ids and window < _SHORT_WINDOW:
        log.warning(
            "duplicate window is shorter than a restart may take",
            target=target,
            seconds=window / _NANOSECONDS,
            expected=_SHORT_WINDOW // _NANOSECONDS,
        )


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
    ids = MessageIds(job, partition, options.message_ids)
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
        kv_encoder = KvRowEncoder(
            bucket.name,
            ids,
            max_message_size(info, max_payload),
            options.invalid_headers,
            prefix=bucket.write_prefix(options.connection.api_prefix),
            no_ttl="" if bucket.allows_message_ttl else _why_no_ttl(jetstream),
            codec=options.codec,
        )
        async with KvBatchWriter(
            jetstream,
            bucket,
            skip_conflicts=options.skip_conflicts,
            max_in_flight=options.max_in_flight,
        ) as kv_writer:
            yield kv_encoder, kv_writer
        return
    info = await open_stream(jetstream, options)
    # An import of an account may have renamed the subjects.
    renamed = is_account_import(options.connection.api_prefix)
    encoder = StreamRowEncoder(
        options.target,
        ids,
        max_message_size(info, max_payload),
        options.invalid_headers,
        subject=options.subject,
        filters=() if renamed else info.config["subjects"],
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
