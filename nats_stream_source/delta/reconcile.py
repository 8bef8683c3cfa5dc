"""Remove or mark the rows whose keys were removed from the bucket without a marker.

A key can be removed without a marker: a purge of its subject through the API, ``max_age``,
``max_bytes``, or a TTL without delete markers. The query reads no change then, and the row stays. A
row also stays if the query did not read the marker (``ignoreDeletes``, a start position after it).
This module compares the table with the bucket itself.

**Steps.** 1. Read the table's rows: key, ``stream_created``, ``revision``. 2. Request the stream's
``created`` and ``last_seq`` from the leader. 3. Request the last message of each row's key from the
leader (``STREAM.MSG.GET``, many requests at once). A key is missing if the leader has no message
for it, or if the message is a marker. 4. In one MERGE, remove (or mark) the rows of the missing
keys that still have the values of step 1.

**Why no live row is lost**, also while a query merges into the same table. Suppose step 1 read the
row of a key at revision *r*, and the leader reported the key missing at a later time *t*. If the
key is written again after *t*, at revision *w*, the query merges *w* either before step 4 or after
it. In the first case the row differs from step 1, and step 4 does not change it. In the second case
the query inserts *w*. Delta serializes the two MERGEs or fails one of them with a conflict. In each
case only a row that was obsolete at *t* is removed. Mirrors and followers do not take part: all
requests go to the leader. A leader that is behind the table is detected because the table has a
revision beyond its ``last_seq``, which step 2 reads after step 1. Such a leader, and a stream that
was rolled back, raise an error.

The list of the bucket's subjects cannot replace step 3: it includes keys whose last message is a
marker, and its pages describe different times, so each key would have to be requested anyway.

**Limit.** A query that is behind can have a PUT of a key that was removed since in a batch that it
has already read, and merge it after step 4. With ``deletes="remove"`` the row returns and stays
until the next reconcile. A marked row prevents this: its revision is the ``last_seq`` of step 2,
and every message of the key up to that sequence was missing at *t*.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from operator import and_

import pyarrow as pa
from delta.tables import DeltaTable
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from nats_stream_source.connection.connection import Connection, ConnectionSettings
from nats_stream_source.delta.table import (
    DELETED_COLUMN,
    Deletes,
    check_deletes,
    check_table,
    find_table,
    quote,
)
from nats_stream_source.errors import (
    ConfigurationError,
    DataLossError,
    InvalidNameError,
)
from nats_stream_source.jetstream.api import JetStream, StoredMessage, StreamInfo
from nats_stream_source.jetstream.kv.bucket import Bucket, bucket_stream_info
from nats_stream_source.jetstream.subjects import check_bucket
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.options import CONNECTION, connection_settings, parse
from nats_stream_source.wire.headers import operations

# One server responds to 10,000 to 30,000 requests a second; more concurrent requests do not
# increase the rate.
_CONCURRENT_REQUESTS = 256


@dataclass(frozen=True, slots=True)
class ReconcileResult:
    """The counts of one :func:`reconcile`.

    Attributes:
        removed: rows removed or marked.
        kept: rows whose keys have a value in the bucket.
        changed: rows whose keys were missing but which a query changed at the same time; they are
            not modified.
        last_seq: the stream's last sequence before the comparison; it covers at least this range.
    """

    removed: int
    kept: int
    changed: int
    last_seq: int


@dataclass(frozen=True, slots=True)
class _TableRow:
    key: str
    stream_created: int  # microseconds since 1970, like all times in a row
    revision: int


@dataclass(frozen=True, slots=True)
class _MissingKey:
    """A row whose key is missing in the bucket, and the columns of its mark."""

    row: _TableRow
    stream_created: int
    revision: int
    created: int
    operation: str


def reconcile(
    spark: SparkSession,
    table: str,
    *,
    bucket: str,
    servers: str,
    deletes: Deletes = "remove",
    **options: str,
) -> ReconcileResult:
    """Remove or mark the rows of a table whose keys the bucket no longer has.

    Rows of an earlier bucket of this name are included. A row is changed only if its key had no
    value when the bucket's leader responded, and the row was not changed since. The driver holds
    the table's keys in memory and sends one request for each key.

    Args:
        spark: a session with Delta Lake.
        table: as in :func:`merge`. In a table with a column ``bucket``, only this bucket's rows are
            compared.
        bucket: the bucket that the table follows.
        servers: the server list, as the source's option ``servers``.
        deletes: the same value as for the table's :func:`merge`.
        options: other connection options of the source, by their names (``user="…"``).

    Raises:
        OptionError: a connection option is unknown or has an invalid value.
        ConfigurationError: the table does not exist, was not created from a bucket, was created for
            other ``deletes``, or follows a bucket that was created later than this one.
        BucketNotFoundError: the bucket does not exist.
        DataLossError: the table has revisions beyond the bucket's last sequence: the bucket was
            rolled back.
        ConnectError, RequestTimeoutError, PermissionDeniedError: a request to the bucket failed.
        ConcurrentAppendException and the other conflicts of ``delta.exceptions``: a query changed
            the same files at the same time; reconcile again.
    """
    check_deletes(deletes)
    check_bucket(bucket)
    settings = connection_settings(parse({"servers": servers, **options}, CONNECTION))
    target = find_table(spark, table)
    if target is None:
        raise ConfigurationError(
            f"could not reconcile table {table!r}: no Delta table found; check the path or name"
        )
    columns = target.toDF().columns
    check_table(table, columns, deletes)
    rows = _read_rows(target, columns, bucket, deletes)
    # In a separate thread, since the thread of a notebook already runs an event loop.
    with ThreadPoolExecutor(1) as thread:
        search = thread.submit(lambda: asyncio.run(_find_missing(rows, table, bucket, settings)))
        missing, last_seq = search.result()
    removed = _remove_or_mark(spark, target, columns, bucket, missing, deletes) if missing else 0
    return ReconcileResult(
        removed=removed,
        kept=len(rows) - len(missing),
        changed=len(missing) - removed,
        last_seq=last_seq,
    )


def _read_rows(
    target: DeltaTable, columns: list[str], bucket: str, deletes: Deletes
) -> list[_TableRow]:
    frame = target.toDF()
    if "bucket" in columns:
        frame = frame.where(F.col("bucket") == bucket)
    if deletes == "mark":
        frame = frame.where(~F.coalesce(F.col(DELETED_COLUMN), F.lit(False)))
    frame = frame.select("key", F.unix_micros("stream_created").alias("created"), "revision")
    valid = frame.where("key IS NOT NULL AND created IS NOT NULL AND revision IS NOT NULL")
    values = (column.to_pylist() for column in valid.toArrow().columns)
    return [_TableRow(*row) for row in zip(*values, strict=True)]


async def _find_missing(
    rows: Sequence[_TableRow],
    table: str,
    bucket: str,
    settings: ConnectionSettings,
) -> tuple[list[_MissingKey], int]:
    """The rows whose keys are missing, and the stream's last sequence before the first request."""
    connection = await Connection.open(settings)
    try:
        jetstream = JetStream(connection)
        info = await bucket_stream_info(jetstream, bucket)
        prefix = Bucket.from_stream_config(bucket, info.config).prefix
        created = nanoseconds(info.created) // 1000
        _validate_revisions(rows, created, info, table, bucket)
        missing = []
        for start in range(0, len(rows), _CONCURRENT_REQUESTS):
            page = rows[start : start + _CONCURRENT_REQUESTS]
            messages = await asyncio.gather(
                *(
                    jetstream.message(info.name, last_by_subj=_key_subject(prefix, row.key, table))
                    for row in page
                )
            )
            header_blocks = pa.array(
                [message and message.headers for message in messages], pa.binary()
            )
            for row, message, operation in zip(
                page, messages, operations(header_blocks).to_pylist(), strict=True
            ):
                if message is None or operation != "PUT":
                    missing.append(_missing_key(row, message, operation, created, info))
        if missing and info.replicated:
            info.check_same_leader(await bucket_stream_info(jetstream, bucket), info.last_seq)
        return missing, info.last_seq
    finally:
        await connection.close()


def _validate_revisions(
    rows: Sequence[_TableRow], created: int, info: StreamInfo, table: str, bucket: str
) -> None:
    for row in rows:
        if row.stream_created > created:
            raise ConfigurationError(
                f"could not reconcile table {table!r}: its key {row.key!r} is from a bucket "
                f"created later than bucket {bucket!r} ({info.created}); name the bucket that the "
                f"table follows"
            )
        if row.stream_created == created and row.revision > info.last_seq:
            raise DataLossError(
                f"could not reconcile table {table!r}: it has revision {row.revision} of key "
                f"{row.key!r}, and the last sequence of bucket {bucket!r} is {info.last_seq}: the "
                f"bucket was rolled back, or its leader is behind; replay the bucket into a new "
                f"table"
            )


def _key_subject(prefix: str, key: str, table: str) -> str:
    # For a wildcard the server would return the message of another key, which would then decide
    # whether the row is kept.
    if any(token in ("", "*", ">") or " " in token for token in key.split(".")):
        raise InvalidNameError(
            f"could not reconcile table {table!r}: {key!r} in its column 'key' is not a valid key; "
            f"keep the bucket's keys unchanged in this column"
        )
    return prefix + key


def _missing_key(
    row: _TableRow, message: StoredMessage | None, operation: str, created: int, info: StreamInfo
) -> _MissingKey:
    # The mark has the marker's own columns if the marker is newer than the row. A marker older than
    # the row (the value after it was deleted by its sequence) would not prevent the merge of that
    # value.
    if message is not None and (created, message.seq) > (row.stream_created, row.revision):
        created_at = nanoseconds(message.time) // 1000
        return _MissingKey(row, created, message.seq, created_at, operation)
    created_at = nanoseconds(info.last_time) // 1000 if info.last_time else created
    return _MissingKey(row, created, info.last_seq, created_at, "PURGE")


def _remove_or_mark(
    spark: SparkSession,
    target: DeltaTable,
    columns: list[str],
    bucket: str,
    missing: Sequence[_MissingKey],
    deletes: Deletes,
) -> int:
    """Remove or mark the rows that were not changed since they were read; returns their number."""
    timestamp = pa.timestamp("us", tz="UTC")
    source = spark.createDataFrame(
        pa.table(
            {
                "key": pa.array((key.row.key for key in missing), pa.string()),
                "was_created": pa.array((key.row.stream_created for key in missing), timestamp),
                "was_revision": pa.array((key.row.revision for key in missing), pa.int64()),
                "stream_created": pa.array((key.stream_created for key in missing), timestamp),
                "revision": pa.array((key.revision for key in missing), pa.int64()),
                "created": pa.array((key.created for key in missing), timestamp),
                "operation": pa.array((key.operation for key in missing), pa.string()),
            }
        )
    )
    conditions = [
        F.col("t.key") == F.col("s.key"),
        F.col("t.stream_created") == F.col("s.was_created"),
        F.col("t.revision") == F.col("s.was_revision"),
    ]
    if "bucket" in columns:
        conditions.append(F.col("t.bucket") == F.lit(bucket))
    builder = target.alias("t").merge(source.alias("s"), reduce(and_, conditions))
    if deletes == "remove":
        builder = builder.whenMatchedDelete()
    else:
        builder = builder.whenMatchedUpdate(
            ~F.coalesce(F.col(f"t.{DELETED_COLUMN}"), F.lit(False)), _mark_assignments(columns)
        )
    counts = builder.execute().first()
    assert counts is not None  # Delta's MERGE returns one row of counts
    return int(counts.num_affected_rows)


def _mark_assignments(columns: list[str]) -> dict[str, str | Column]:
    """The columns of a marked row: those of the mark, and null in all others."""
    unchanged = {"bucket", "key"}
    mark = {name: F.col(f"s.{name}") for name in ("stream_created", "revision", "operation")}
    mark |= {"created": F.col("s.created"), DELETED_COLUMN: F.lit(True)}
    return {
        quote(column): mark.get(column, F.lit(None))
        for column in columns
        if column not in unchanged
    }
