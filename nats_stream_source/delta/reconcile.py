"""Rows whose keys the bucket no longer has.

A key can go and leave no marker: its subject purged through the API, ``max_age`` or ``max_bytes``
or a TTL without delete markers. No change is there to be read then, and the row stays. The same
row stays when the query did not read the markers (``ignoreDeletes``, a start after them). This
compares the table with the bucket itself.

**How.** 1. Read the table's rows: key, ``stream_created``, ``revision``. 2. Ask the leader for the
stream's ``created`` and ``last_seq``. 3. Ask the leader for the last message of each row's key
(``STREAM.MSG.GET``, many under way at once). A key is gone if there is none, or if it is a marker.
4. In one MERGE, remove (or mark) the rows of the gone keys that are still what step 1 read.

**Why no row is lost**, also while a query merges into the same table. Say step 1 read the row of a
key at revision *r*, and the leader found the key gone at a later time *t*. If the key is written
again after *t*, at revision *w*, then the query merges *w* either before step 4, and the row is no
longer what step 1 read and is left alone; or after step 4, and inserts it. Delta puts the two in an
order, or fails one of them with a conflict. In no case does anything but a row that was already
obsolete at *t* go away. Mirrors and replicas take no part: only the leader is asked, and one that
is behind the table is recognised because the table has a revision beyond its ``last_seq``, which
step 2 reads after step 1; that, and a stream set back to an earlier state, is refused.

Why not the list of the bucket's subjects: it has the keys whose last message is a marker too, and
its pages are not of one moment, so that each key would have to be asked for all the same.

**What it cannot do.** A query that is behind may hold, in a batch already read, a PUT of a key that
has gone since, and merge it after step 4. Where rows are removed it comes back and stays until the
next reconcile. A mark keeps it out: it has the revision ``last_seq`` of step 2, and any message of
the key up to there was gone at *t*.
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

from nats_stream_source.delta.table import (
    DELETED,
    Deletes,
    check_deletes,
    check_table,
    find,
    quoted,
)
from nats_stream_source.errors import (
    ConfigurationError,
    DataLossError,
    InvalidNameError,
)
from nats_stream_source.jetstream.api import JetStream, StoredMessage, StreamInfo
from nats_stream_source.jetstream.bucket import Bucket, look_up
from nats_stream_source.jetstream.connection import Connection, ConnectionSettings
from nats_stream_source.jetstream.subjects import check_bucket
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.options import CONNECTION, connection_settings, parse
from nats_stream_source.wire.headers import operations

# Requests under way at once. One server answers some 10,000 to 30,000 a second; more of them
# waiting does not make it faster.
_UNDER_WAY = 256


@dataclass(frozen=True, slots=True)
class ReconcileResult:
    """What :func:`reconcile` found.

    Attributes:
        removed: rows removed or marked.
        kept: rows whose keys have a value in the bucket.
        changed: rows whose keys were gone but which a query changed meanwhile; left alone.
        last_seq: the stream sequence up to which the bucket was compared, at least.
    """

    removed: int
    kept: int
    changed: int
    last_seq: int


@dataclass(frozen=True, slots=True)
class _Row:
    key: str
    stream_created: int  # microseconds since 1970, like all times in a row
    revision: int


@dataclass(frozen=True, slots=True)
class _Gone:
    """A row whose key is gone, and the mark that says so."""

    row: _Row
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
    """Remove, or mark, the rows of a table whose keys the bucket no longer has.

    Rows of an earlier bucket of this name are included. A row is only touched if its key had no
    value when the bucket's leader was asked, and nobody changed it since. The table's keys go
    through the driver's memory, and each is one request.

    Args:
        spark: a session with Delta Lake.
        table: as in :func:`merge`. Of a table with a column ``bucket``, this bucket's rows only.
        bucket: the bucket that the table was filled from.
        servers: where the bucket is, as the source's option ``servers``.
        deletes: as the table is merged.
        options: further connection options of the source, by their names (``user="…"``).

    Raises:
        OptionError: an unknown connection option, or a wrong value of one.
        ConfigurationError: no such table, or not one of a bucket, or made for other ``deletes``,
            or filled from a later bucket than this one.
        BucketNotFoundError: there is no such bucket.
        DataLossError: the table holds revisions that the bucket has not reached: it was restored
            from an earlier state.
        ConnectError, RequestTimeoutError, PermissionDeniedError: the bucket could not be asked.
        ConcurrentAppendException and the like, of ``delta.exceptions``: a query changed the same
            files meanwhile; reconcile again.
    """
    check_deletes(deletes)
    check_bucket(bucket)
    settings = connection_settings(parse({"servers": servers, **options}, CONNECTION))
    target = find(spark, table)
    if target is None:
        raise ConfigurationError(f"there is no Delta table {table!r}")
    columns = target.toDF().columns
    check_table(table, columns, deletes)
    rows = _rows(target, columns, bucket, deletes)
    # A thread of its own: a notebook's thread has an event loop running already.
    with ThreadPoolExecutor(1) as thread:
        ask = thread.submit(lambda: asyncio.run(_compare(rows, table, bucket, settings)))
        gone, last_seq = ask.result()
    removed = _apply(spark, target, columns, bucket, gone, deletes) if gone else 0
    return ReconcileResult(
        removed=removed,
        kept=len(rows) - len(gone),
        changed=len(gone) - removed,
        last_seq=last_seq,
    )


def _rows(target: DeltaTable, columns: list[str], bucket: str, deletes: Deletes) -> list[_Row]:
    frame = target.toDF()
    if "bucket" in columns:
        frame = frame.where(F.col("bucket") == bucket)
    if deletes == "mark":
        frame = frame.where(~F.coalesce(F.col(DELETED), F.lit(False)))
    frame = frame.select("key", F.unix_micros("stream_created").alias("created"), "revision")
    found = frame.where("key IS NOT NULL AND created IS NOT NULL AND revision IS NOT NULL")
    values = (column.to_pylist() for column in found.toArrow().columns)
    return [_Row(*row) for row in zip(*values, strict=True)]


async def _compare(
    rows: Sequence[_Row],
    table: str,
    bucket: str,
    settings: ConnectionSettings,
) -> tuple[list[_Gone], int]:
    """The rows whose keys are gone, and the stream's last sequence before the first was asked."""
    connection = await Connection.open(settings)
    try:
        jetstream = JetStream(connection)
        info = await look_up(jetstream, bucket)
        prefix = Bucket.of(bucket, info.config).prefix
        created = nanoseconds(info.created) // 1000
        _check(rows, created, info, table, bucket)
        gone = []
        for start in range(0, len(rows), _UNDER_WAY):
            some = rows[start : start + _UNDER_WAY]
            messages = await asyncio.gather(
                *(
                    jetstream.message(info.name, last_by_subj=_subject(prefix, row.key, table))
                    for row in some
                )
            )
            blocks = pa.array([message and message.headers for message in messages], pa.binary())
            for row, message, operation in zip(
                some, messages, operations(blocks).to_pylist(), strict=True
            ):
                if message is None or operation != "PUT":
                    gone.append(_mark(row, message, operation, created, info))
        if gone and info.replicated:
            info.check_leads_on(await look_up(jetstream, bucket), info.last_seq)
        return gone, info.last_seq
    finally:
        await connection.close()


def _check(rows: Sequence[_Row], created: int, info: StreamInfo, table: str, bucket: str) -> None:
    for row in rows:
        if row.stream_created > created:
            raise ConfigurationError(
                f"the table {table!r} holds the key {row.key!r} from a bucket made later than "
                f"{bucket!r} was ({info.created}): it is not filled from this one"
            )
        if row.stream_created == created and row.revision > info.last_seq:
            raise DataLossError(
                f"the table {table!r} holds revision {row.revision} of the key {row.key!r}, and "
                f"the bucket {bucket!r} ends at {info.last_seq}: it was set back to an earlier "
                f"state, or what answered is behind. Replay the bucket into a new table"
            )


def _subject(prefix: str, key: str, table: str) -> str:
    # As a wildcard it would be answered with another key's message, and the row be kept or lost
    # by that.
    if any(token in ("", "*", ">") or " " in token for token in key.split(".")):
        raise InvalidNameError(
            f"the table {table!r} has the key {key!r}, which no bucket can have: its column 'key' "
            f"must hold the bucket's keys unchanged"
        )
    return prefix + key


def _mark(
    row: _Row, message: StoredMessage | None, operation: str, created: int, info: StreamInfo
) -> _Gone:
    # The marker's own facts where they are newer than the row. A marker that is older (the value
    # after it was deleted by its sequence) would not keep that value out.
    if message is not None and (created, message.seq) > (row.stream_created, row.revision):
        time = nanoseconds(message.time) // 1000
        return _Gone(row, created, message.seq, time, operation)
    time = nanoseconds(info.last_time) // 1000 if info.last_time else created
    return _Gone(row, created, info.last_seq, time, "PURGE")


def _apply(
    spark: SparkSession,
    target: DeltaTable,
    columns: list[str],
    bucket: str,
    gone: Sequence[_Gone],
    deletes: Deletes,
) -> int:
    """Remove or mark the rows that are still what they were; how many."""
    time = pa.timestamp("us", tz="UTC")
    source = spark.createDataFrame(
        pa.table(
            {
                "key": pa.array((one.row.key for one in gone), pa.string()),
                "was_created": pa.array((one.row.stream_created for one in gone), time),
                "was_revision": pa.array((one.row.revision for one in gone), pa.int64()),
                "stream_created": pa.array((one.stream_created for one in gone), time),
                "revision": pa.array((one.revision for one in gone), pa.int64()),
                "created": pa.array((one.created for one in gone), time),
                "operation": pa.array((one.operation for one in gone), pa.string()),
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
    merging = target.alias("t").merge(source.alias("s"), reduce(and_, conditions))
    if deletes == "remove":
        merging = merging.whenMatchedDelete()
    else:
        merging = merging.whenMatchedUpdate(
            ~F.coalesce(F.col(f"t.{DELETED}"), F.lit(False)), _marked(columns)
        )
    counted = merging.execute().first()
    assert counted is not None  # Delta's MERGE answers with one row of counts
    return int(counted.num_affected_rows)


def _marked(columns: list[str]) -> dict[str, str | Column]:
    """What a marked row has in each column: the mark's facts, and null in all others."""
    kept = {"bucket", "key"}
    mark = {name: F.col(f"s.{name}") for name in ("stream_created", "revision", "operation")}
    mark |= {"created": F.col("s.created"), DELETED: F.lit(True)}
    return {
        quoted(column): mark.get(column, F.lit(None)) for column in columns if column not in kept
    }
