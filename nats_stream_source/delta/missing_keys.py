"""Find the rows of a table that their bucket does not have: one request for each key.

All requests go to the leader (``STREAM.MSG.GET``), many at once. A key is missing if the leader has
no message for it, or if the message is a marker. Its value is an older one if the message is a PUT
with a lower revision than the row: the row's revision has expired, and left no marker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.connection.connection import Connection, ConnectionSettings
from nats_stream_source.delta.rules.layout import DELETE, REPLACES, SEQUENCE, TIME
from nats_stream_source.errors import (
    ConfigurationError,
    DataLossError,
    InvalidNameError,
    MinLastSequenceError,
)
from nats_stream_source.jetstream.api import JetStream, StoredMessage
from nats_stream_source.jetstream.kv.bucket import Bucket, bucket_stream_info
from nats_stream_source.jetstream.kv.codec import NO_CODEC, KvCodec
from nats_stream_source.jetstream.kv.other_messages import with_origin
from nats_stream_source.jetstream.stream_identity import Identity, KnownStream, identify
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.times import nanoseconds, rfc3339
from nats_stream_source.wire.header_columns import header_maps
from nats_stream_source.wire.headers import operations

# One server responds to 10,000 to 30,000 requests a second; more concurrent requests do not
# increase the rate.
_CONCURRENT_REQUESTS = 256


@dataclass(frozen=True, slots=True)
class TableRow:
    """The identity and order of a table's row."""

    key: str
    stream_created: int  # microseconds since 1970, like all times in a row
    revision: int


@dataclass(frozen=True, slots=True)
class Difference:
    """A row whose key is missing in the bucket or has an older value, and what is right for it.

    Attributes:
        row: as it was read.
        stream_created: when the bucket was created.
        revision, created, operation: of the marker, of the mark, or of the older entry.
        end: the sequence at which a version of the key ends. Without a marker it is the one after
            the stream's last: no entry has it yet, so the row's own version is not empty.
        time: the time at which a version ends.
        value, headers: of the older entry.
    """

    row: TableRow
    stream_created: int
    revision: int
    created: int
    operation: str
    end: int
    time: int
    value: bytes | None = None
    headers: bytes | None = None


async def find_differences(
    rows: Sequence[TableRow],
    table: str,
    bucket: str,
    settings: ConnectionSettings,
    codec: KvCodec = NO_CODEC,
) -> tuple[list[Difference], int]:
    """The rows that differ, and the stream's last sequence before the first request."""
    connection = await Connection.open(settings)
    try:
        jetstream = JetStream(connection)
        info = await with_origin(jetstream, await bucket_stream_info(jetstream, bucket))
        prefix = Bucket.of(info).prefix
        subjects = [_key_subject(prefix, row.key, table, codec) for row in rows]
        await _verify_revisions(jetstream, rows, info, table, bucket)
        found = []
        for start in range(0, len(rows), _CONCURRENT_REQUESTS):
            page = rows[start : start + _CONCURRENT_REQUESTS]
            messages = await asyncio.gather(
                *(
                    jetstream.message(info.name, last_by_subj=subject)
                    for subject in subjects[start : start + _CONCURRENT_REQUESTS]
                )
            )
            header_blocks = pa.array(
                [message and message.headers for message in messages], pa.binary()
            )
            for row, message, operation in zip(
                page, messages, operations(header_blocks).to_pylist(), strict=True
            ):
                if message is None or operation != "PUT":
                    found.append(_missing_key(row, message, operation, info))
                elif (_micros(info.created), message.seq) < (row.stream_created, row.revision):
                    found.append(_older_value(row, message, info, bucket, prefix, codec))
        if found and info.replicated:
            info.verify_same_leader(await bucket_stream_info(jetstream, bucket), info.last_seq)
        return found, info.last_seq
    finally:
        await connection.close()


async def _verify_revisions(
    jetstream: JetStream, rows: Sequence[TableRow], info: StreamInfo, table: str, bucket: str
) -> None:
    newest: dict[int, TableRow] = {}  # of each creation time of the bucket
    for row in rows:
        known = newest.setdefault(row.stream_created, row)
        if row.revision > known.revision:
            newest[row.stream_created] = row
    created = _micros(info.created)
    for row in newest.values():
        if row.stream_created > created:
            raise ConfigurationError(
                f"could not reconcile table {table!r}: its key {row.key!r} is from a bucket "
                f"created later than bucket {bucket!r} ({info.created}); name the bucket that the "
                f"table follows"
            )
        same = row.stream_created == created
        known_created = info.created if same else rfc3339(row.stream_created * 1000)
        stream = KnownStream(known_created, row.revision)
        # Rows of a bucket that was deleted and created again are compared like any others.
        identity = await identify(jetstream, info, stream)
        if identity is Identity.LAGGING:
            raise MinLastSequenceError(
                f"could not reconcile table {table!r}: it has revision {row.revision} of key "
                f"{row.key!r}, and the mirror {bucket!r} has reached {info.last_seq} (412, 10180, "
                f"min last sequence); reconcile again once the mirror has caught up with its origin"
            )
        if identity is Identity.ROLLED_BACK:
            raise DataLossError(
                f"could not reconcile table {table!r}: it has revision {row.revision} of key "
                f"{row.key!r}, and the last sequence of bucket {bucket!r} is {info.last_seq}: the "
                f"bucket was rolled back; replay the bucket into a new table"
            )


def _micros(time: str) -> int:
    """A server's time as the table has it: microseconds since 1970."""
    return nanoseconds(time) // 1000


def _key_subject(prefix: str, key: str, table: str, codec: KvCodec) -> str:
    if codec.key:
        try:
            return prefix + codec.raw_key(key)
        except InvalidNameError as error:
            raise type(error)(f"could not reconcile table {table!r}: {error}") from None
    # For a wildcard the server would return the message of another key, which would then decide
    # whether the row is kept.
    if any(token in ("", "*", ">") or " " in token for token in key.split(".")):
        raise InvalidNameError(
            f"could not reconcile table {table!r}: {key!r} in its column 'key' is not a valid key; "
            f"keep the bucket's keys unchanged in this column"
        )
    return prefix + key


def _missing_key(
    row: TableRow, message: StoredMessage | None, operation: str, info: StreamInfo
) -> Difference:
    # The mark has the marker's own columns if the marker is newer than the row. A marker older than
    # the row (the value after it was deleted by its sequence) would not prevent the merge of that
    # value.
    created = _micros(info.created)
    if message is not None and (created, message.seq) > (row.stream_created, row.revision):
        time = _micros(message.time)
        return Difference(row, created, message.seq, time, operation, message.seq, time)
    time = _last_time(info)
    return Difference(row, created, info.last_seq, time, "PURGE", info.last_seq + 1, time)


def _older_value(
    row: TableRow,
    message: StoredMessage,
    info: StreamInfo,
    bucket: str,
    prefix: str,
    codec: KvCodec,
) -> Difference:
    value = codec.decoded_value(message.data)
    if value is None:
        raise codec.undecodable(bucket, message.subject.removeprefix(prefix), message.seq)
    return Difference(
        row,
        _micros(info.created),
        message.seq,
        _micros(message.time),
        "PUT",
        info.last_seq + 1,
        _last_time(info),
        value,
        message.headers,
    )


def _last_time(info: StreamInfo) -> int:
    return _micros(info.last_time or info.created)


def table_rows(rows: pa.Table) -> list[TableRow]:
    """The rows of a table with the columns ``key``, ``stream_created`` and ``revision``."""
    micros = rows["stream_created"].cast(pa.int64()).to_pylist()
    keys, revisions = rows["key"].to_pylist(), rows["revision"].to_pylist()
    return [TableRow(*row) for row in zip(keys, micros, revisions, strict=True)]


def difference_table(differences: Sequence[Difference]) -> pa.Table:
    """The differences as a table, with the columns of an entry and those of an event.

    ``__REPLACES`` is the order of the row as it was read; ``__SEQUENCE`` and ``__TIME`` are where a
    version of the key ends.
    """
    timestamp = pa.timestamp("us", tz="UTC")
    created = pa.array((one.stream_created for one in differences), timestamp)

    def order(stream_created: pa.Array, revisions: list[int]) -> pa.StructArray:
        parts = [stream_created, pa.array(revisions, pa.int64())]
        return pa.StructArray.from_arrays(parts, ["stream_created", "revision"])

    rows = [one.row for one in differences]
    row_created = pa.array((row.stream_created for row in rows), timestamp)
    operation = pa.array((one.operation for one in differences), pa.string())
    return pa.table(
        {
            "key": pa.array((row.key for row in rows), pa.string()),
            "value": pa.array((one.value for one in differences), pa.binary()),
            "revision": pa.array((one.revision for one in differences), pa.int64()),
            "created": pa.array((one.created for one in differences), timestamp),
            "operation": operation,
            "stream_created": created,
            "headers": header_maps(pa.array((one.headers for one in differences), pa.binary())),
            REPLACES: order(row_created, [row.revision for row in rows]),
            SEQUENCE: order(created, [one.end for one in differences]),
            DELETE: pc.not_equal(operation, "PUT"),
            TIME: pa.array((one.time for one in differences), timestamp),
        }
    )
