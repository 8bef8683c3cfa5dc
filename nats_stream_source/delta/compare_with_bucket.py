"""Compare a table with its bucket: remove, mark, close or replace the rows that differ.

A key can be removed without a marker: a purge of its subject through the API, ``max_age``,
``max_bytes``, or a TTL without delete markers. The query reads no change then, and the row stays. A
row also stays if the query did not read the marker (``ignoreDeletes``, a start position after it),
or if its revision expired and an older revision of the key is current again. This module compares
the table with the bucket itself.

**Steps.** 1. Read the table's rows: key, ``stream_created``, ``revision``. 2. Request the stream's
``created`` and ``last_seq`` from the leader. 3. Request the last message of each row's key from the
leader (``STREAM.MSG.GET``, many requests at once). A key is missing if the leader has no message
for it, or if the message is a marker; its value is older if the message is a PUT with a lower
revision. 4. Remove, mark or close the rows of the missing keys, by one merge. 5. Replace the rows
with older values, by another one. A crash between the two leaves rows for the next call.

**Why no live row is lost**, also while a query merges into the same table. Suppose step 1 read the
row of a key at revision *r*, and the leader reported at a later time *t* that the key is missing or
older. Steps 4 and 5 change the row only if it still has the revision *r*. If the key is written
again after *t*, at revision *w*, the query merges *w* either before them, and they do not change
the row, or after them, and *w* is newer than what they wrote. Of two commits at the same time, one
is repeated. In each case only a row that was obsolete at *t* is changed. Mirrors and followers do
not take part: all requests go to the leader. A leader that is behind the table is detected because
the table has a revision beyond its ``last_seq``, which step 2 reads after step 1. Such a leader,
and a stream that was rolled back, raise an error.

The list of the bucket's subjects cannot replace step 3: it includes keys whose last message is a
marker, and its pages describe different times, so each key would have to be requested anyway.

**Limit.** A query that is behind can have a PUT of such a key in a batch that it has already read,
and merge it after step 5. With ``deletes="remove"``, and for an older value, the row returns and
stays until the next call. A marked row prevents this: its revision is the ``last_seq`` of step 2,
and every message of the key up to that sequence was missing at *t*.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from nats_stream_source.aio.tasks import gather_limited
from nats_stream_source.connection.connection import Connection, ConnectionSettings
from nats_stream_source.delta.merge_result import MergeResult
from nats_stream_source.delta.rules.layout import DELETE, REPLACES, SEQUENCE, TIME, Deletes, Layout
from nats_stream_source.delta.rules.reconciled import (
    differences_of,
    has_entries_only,
    open_row_columns,
    open_rows,
    open_rows_where,
    require_entries,
)
from nats_stream_source.delta.schema import TIMESTAMP
from nats_stream_source.delta.tables import Table
from nats_stream_source.errors import (
    ConfigurationError,
    DataLossError,
    InvalidNameError,
    MinLastSequenceError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.kv.bucket import Bucket, bucket_stream_info
from nats_stream_source.jetstream.kv.codec import NO_CODEC, KvCodec
from nats_stream_source.jetstream.kv.entry import Entry, entry_from_message
from nats_stream_source.jetstream.kv.requests import with_origin
from nats_stream_source.jetstream.stream_identity import Identity, KnownStream, identify
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.times import nanoseconds, rfc3339
from nats_stream_source.logs import field_logger
from nats_stream_source.wire.header_columns import header_maps

_log = field_logger(__name__)

_ORDER = pa.struct([("stream_created", TIMESTAMP), ("revision", pa.int64())])
_EVENTS = pa.schema(
    [
        *(("key", pa.string()), ("value", pa.binary()), ("revision", pa.int64())),
        *(("created", TIMESTAMP), ("operation", pa.string()), ("stream_created", TIMESTAMP)),
        *(("headers", pa.binary()), (REPLACES, _ORDER), (SEQUENCE, _ORDER)),
        *((DELETE, pa.bool_()), (TIME, TIMESTAMP)),
    ]
)
_Event = dict[str, Any]
"""A row of :data:`_EVENTS`; times are in microseconds since 1970."""


class TableRow(NamedTuple):
    """The identity and order of a table's row."""

    key: str
    stream_created: int  # microseconds since 1970
    revision: int


@dataclass(frozen=True, slots=True)
class ReconcileResult:
    """The counts of one :func:`reconcile`.

    Attributes:
        removed: rows removed, marked or closed.
        kept: rows whose keys have a value in the bucket.
        changed: rows whose keys were missing or had an older value, but which a query changed at
            the same time; they are not modified.
        last_seq: the stream's last sequence before the comparison; it covers at least this range.
        replaced: rows that got an older value, which is current again.
    """

    removed: int
    kept: int
    changed: int
    last_seq: int
    replaced: int = 0


def compare_with_bucket(
    target: Table,
    bucket: str,
    settings: ConnectionSettings,
    codec: KvCodec,
    deletes: Deletes,
    select: Callable[[pa.Table], pa.Table] = lambda rows: rows,
) -> ReconcileResult:
    """Give a table what its bucket has; see :func:`nats_stream_source.delta.reconcile`.

    Args:
        select: the rows that are compared, of a table with ``key`` and ``revision``.
    """
    name = target.name
    if not target.exists():
        raise ConfigurationError(
            f"could not reconcile table {name!r}: no Delta table found; check the path or name"
        )
    layout, schema = require_entries(name, target.layout), target.schema
    if layout.entries:
        layout = Layout.of_entries(schema.names, deletes)
        layout.verify(name, None, schema, None)
    scanned = target.scan(open_row_columns(schema.names), open_rows_where(layout, bucket))
    found = select(open_rows(scanned))
    parts = found["key"], found["stream_created"].cast(pa.int64()), found["revision"]
    rows = [TableRow(*row) for row in zip(*(part.to_pylist() for part in parts), strict=True)]
    # In a separate thread, since the thread of a notebook already runs an event loop.
    with ThreadPoolExecutor(1) as thread:
        search = find_differences(rows, name, bucket, settings, codec)
        differences, last_seq = thread.submit(asyncio.run, search).result()
    missing = [one for one in differences if one[DELETE]]
    older = [one for one in differences if not one[DELETE]]
    if older and not has_entries_only(layout, schema):
        _log.warning(
            "rows have a newer revision than the bucket, and their older value is unknown",
            table=name,
            bucket=bucket,
            rows=len(older),
            reason="the revision expired; the table lacks columns of nats_kv, or has others",
            action="replay the bucket into a new table",
        )
        older = []

    def merged(of: list[_Event]) -> MergeResult:
        events = differences_of(difference_table(of), bucket, layout, schema)
        return target.merge(events, None)

    removed = merged(missing).changed if missing else 0
    replaced = merged(older).updated if older else 0
    if older:
        _log.info(
            "replaced rows by older revisions that are current again",
            table=name,
            bucket=bucket,
            rows=replaced,
        )
    return ReconcileResult(
        removed=removed,
        kept=len(rows) - len(missing) - len(older),
        changed=len(missing) + len(older) - removed - replaced,
        last_seq=last_seq,
        replaced=replaced,
    )


async def find_differences(
    rows: Sequence[TableRow],
    table: str,
    bucket: str,
    settings: ConnectionSettings,
    codec: KvCodec = NO_CODEC,
) -> tuple[list[_Event], int]:
    """The events of the rows that differ, and the stream's last sequence before the requests."""
    connection = await Connection.open(settings)
    try:
        jetstream = JetStream(connection)
        info = await with_origin(jetstream, await bucket_stream_info(jetstream, bucket))
        of = Bucket.of(info)
        subjects = [_key_subject(of.prefix, row.key, table, codec) for row in rows]
        await _verify_revisions(jetstream, rows, info, table, bucket)

        async def compared(one: tuple[TableRow, str]) -> _Event | None:
            row, subject = one
            message = await jetstream.message(info.name, last_by_subj=subject)
            entry = None if message is None else entry_from_message(message, of)
            event = _difference(row, entry, info)
            if entry is not None and event is not None and not event[DELETE]:
                event["value"] = codec.decoded_value(entry.value)
                if event["value"] is None:
                    raise codec.undecodable(bucket, entry.key, entry.revision)
            return event

        events = await gather_limited(compared, list(zip(rows, subjects, strict=True)))
        found = [event for event in events if event is not None]
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


def _difference(row: TableRow, entry: Entry | None, info: StreamInfo) -> _Event | None:
    """The event that gives the row of a key what its last entry says; None if it has that."""
    created, last_time = _micros(info.created), _micros(info.last_time or info.created)
    revision, operation, time, headers = info.last_seq, "PURGE", last_time, None
    # Without a marker a version ends at the sequence after the last one: no entry has it yet, so
    # the row's own version is not empty.
    end, end_time = info.last_seq + 1, last_time
    if entry is not None:
        newer = (created, entry.revision) > (row.stream_created, row.revision)
        if not entry.is_marker:
            if newer or (created, entry.revision) == (row.stream_created, row.revision):
                return None
            revision, operation, time = entry.revision, "PUT", entry.created_ns // 1000
            headers = entry.header_block
        elif newer:
            # The mark has the marker's own columns. A marker older than the row (the value after it
            # was deleted by its sequence) would not prevent the merge of that value.
            revision, operation, time = entry.revision, entry.operation, entry.created_ns // 1000
            end, end_time = revision, time
    return {
        "key": row.key,
        "revision": revision,
        "created": time,
        "operation": operation,
        "stream_created": created,
        "headers": headers,
        REPLACES: {"stream_created": row.stream_created, "revision": row.revision},
        SEQUENCE: {"stream_created": created, "revision": end},
        DELETE: operation != "PUT",
        TIME: end_time,
    }


def difference_table(events: Sequence[_Event]) -> pa.Table:
    """Events as a table, with the columns of an entry and those of an event.

    ``__REPLACES`` is the order of the row as it was read; ``__SEQUENCE`` and ``__TIME`` are where a
    version of the key ends.
    """
    found = pa.Table.from_pylist(list(events), _EVENTS)
    at = found.column_names.index("headers")
    return found.set_column(at, "headers", header_maps(found["headers"].combine_chunks()))
