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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from nats_stream_source.connection.connection import ConnectionSettings
from nats_stream_source.delta.missing_keys import difference_table, find_differences, table_rows
from nats_stream_source.delta.rules.layout import Deletes, Layout
from nats_stream_source.delta.rules.reconciled import (
    differences_of,
    has_entries_only,
    open_row_columns,
    open_rows,
    open_rows_where,
    require_entries,
)
from nats_stream_source.delta.tables import Engine
from nats_stream_source.errors import ConfigurationError
from nats_stream_source.jetstream.kv.codec import KvCodec
from nats_stream_source.logs import field_logger

_log = field_logger(__name__)


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
    tables: Engine[Any],
    name: str,
    bucket: str,
    settings: ConnectionSettings,
    codec: KvCodec,
    deletes: Deletes,
    select: Callable[[pa.Table], pa.Table] = lambda rows: rows,
) -> ReconcileResult:
    """Give a table what its bucket has; see :func:`nats_stream_source.delta.reconcile`.

    Args:
        tables: the executor of the table.
        name: path or name of the table, for errors.
        bucket: the bucket that the table follows.
        settings: of the connection.
        codec: of the query that filled the table.
        deletes: as for the table's merge.
        select: the rows that are compared, of a table with ``key`` and ``revision``.
    """
    target = tables.find()
    if target is None:
        raise ConfigurationError(
            f"could not reconcile table {name!r}: no Delta table found; check the path or name"
        )
    layout, schema = require_entries(name, target.layout), target.schema
    if layout.entries:
        layout = Layout.of_entries(schema.names, deletes)
        layout.verify(name, None, schema, None)
    scanned = target.scan(open_row_columns(schema.names), open_rows_where(layout, bucket))
    rows = table_rows(select(open_rows(scanned)))
    # In a separate thread, since the thread of a notebook already runs an event loop.
    with ThreadPoolExecutor(1) as thread:
        search = find_differences(rows, name, bucket, settings, codec)
        differences, last_seq = thread.submit(asyncio.run, search).result()
    missing = [one for one in differences if one.operation != "PUT"]
    older = [one for one in differences if one.operation == "PUT"]
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
    removed = replaced = 0
    if missing:
        events = differences_of(difference_table(missing), bucket, layout, schema)
        removed = tables.merge(events, None).changed
    if older:
        events = differences_of(difference_table(older), bucket, layout, schema)
        replaced = tables.merge(events, None).updated
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
