"""Remove or mark the rows whose keys were removed from the bucket without a marker.

A key can be removed without a marker: a purge of its subject through the API, ``max_age``,
``max_bytes``, or a TTL without delete markers. The query reads no change then, and the row stays. A
row also stays if the query did not read the marker (``ignoreDeletes``, a start position after it).
This module compares the table with the bucket itself.

**Steps.** 1. Read the table's rows: key, ``stream_created``, ``revision``. 2. Request the stream's
``created`` and ``last_seq`` from the leader. 3. Request the last message of each row's key from the
leader (``STREAM.MSG.GET``, many requests at once). A key is missing if the leader has no message
for it, or if the message is a marker. 4. Merge a delete of each missing key, as any other event:
its sequence is that of the marker, or the ``last_seq`` of step 2. A row that is newer stays.

**Why no live row is lost**, also while a query merges into the same table. Suppose step 1 read the
row of a key at revision *r*, and the leader reported the key missing at a later time *t*. If the
key is written again after *t*, at revision *w*, the query merges *w* either before step 4 or after
it. In the first case *w* is greater than the delete's sequence, and step 4 does not change the row.
In the second case the query inserts *w*. Of two commits at the same time, one is repeated. In each
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
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pyspark.sql import SparkSession

from nats_stream_source.delta.limits import AutoLimits
from nats_stream_source.delta.location import Engine as EngineName
from nats_stream_source.delta.location import TableArgument, TableLocation
from nats_stream_source.delta.missing_keys import find_missing, missing_table, table_rows
from nats_stream_source.delta.rules.events import (
    deletes_of,
    open_row_columns,
    open_rows,
    open_rows_where,
    require_entries,
)
from nats_stream_source.delta.rules.layout import Deletes, Layout, validate_deletes
from nats_stream_source.delta.spark.choice import EngineChoice
from nats_stream_source.delta.tables import Engine
from nats_stream_source.errors import ConfigurationError
from nats_stream_source.jetstream.kv.codec import kv_codec
from nats_stream_source.jetstream.subjects import validate_bucket
from nats_stream_source.options import CONNECTION, connection_settings, parse


@dataclass(frozen=True, slots=True)
class ReconcileResult:
    """The counts of one :func:`reconcile`.

    Attributes:
        removed: rows removed, marked or closed.
        kept: rows whose keys have a value in the bucket.
        changed: rows whose keys were missing but which a query changed at the same time; they are
            not modified.
        last_seq: the stream's last sequence before the comparison; it covers at least this range.
    """

    removed: int
    kept: int
    changed: int
    last_seq: int


def reconcile(
    spark: SparkSession,
    table: TableArgument,
    *,
    bucket: str,
    servers: str,
    deletes: Deletes = "remove",
    engine: EngineName = "auto",
    storage_options: Mapping[str, str] | None = None,
    limits: AutoLimits | None = None,
    key_codec: str | None = None,
    **options: str,
) -> ReconcileResult:
    """Remove, mark or close the rows of a table whose keys the bucket no longer has.

    In a history table (``stored_as_scd_type=2``) the open row of such a key is closed. A marked row
    has null in the columns that ``nats_kv`` delivers, and keeps all others: here the columns of the
    query are not known.

    Rows of an earlier bucket of this name are included. A row is changed only if its key had no
    value when the bucket's leader responded, and the row was not changed since. The driver holds
    the table's keys in memory and sends one request for each key.

    Args:
        spark: a session; with Delta Lake if Spark changes the table.
        table: as in :func:`merge`. In a table with a column ``bucket``, only this bucket's rows are
            compared.
        bucket: the bucket that the table follows.
        servers: the server list, as the source's option ``servers``.
        deletes: the same value as for the table's :func:`merge`.
        engine: what changes the table, see :func:`merge`.
        storage_options: the object store's options for the driver, see :func:`merge`.
        limits: up to which size of its index ``engine="auto"`` takes the driver.
        key_codec: the option ``keyCodec`` of the query that filled the table.
        options: other connection options of the source, by their names (``user="…"``).

    Raises:
        OptionError: a connection option is unknown or has an invalid value.
        KeyNotEncodableError: the table has a key that ``key_codec`` does not decode.
        ConfigurationError: the table does not exist, was not created from a bucket, was created for
            other ``deletes``, or follows a bucket that was created later than this one.
        BucketNotFoundError: the bucket does not exist.
        DataLossError: the table has revisions beyond the bucket's last sequence: the bucket was
            rolled back.
        ConnectError, RequestTimeoutError, PermissionDeniedError: a request to the bucket failed.
        TableConflictError: a query changed the table during each attempt; reconcile again.
        TableError: the engine or its storage failed; the table is unchanged.
    """
    validate_deletes(deletes)
    validate_bucket(bucket)
    codec = kv_codec(key_codec)
    settings = connection_settings(parse({"servers": servers, **options}, CONNECTION))
    location = TableLocation(table, engine, storage_options)
    name = location.name

    def work(tables: Engine) -> ReconcileResult:
        target = tables.find()
        if target is None:
            raise ConfigurationError(
                f"could not reconcile table {name!r}: no Delta table found; check the path or name"
            )
        layout = require_entries(name, target.layout)
        if layout.entries:
            layout = Layout.of_entries(target.schema.names, deletes)
            layout.verify(name, None, target.schema, None)
        columns = open_row_columns(layout, target.schema.names)
        rows = table_rows(open_rows(target.scan(columns, open_rows_where(layout, bucket))))
        # In a separate thread, since the thread of a notebook already runs an event loop.
        with ThreadPoolExecutor(1) as thread:
            search = find_missing(rows, name, bucket, settings, codec)
            missing, last_seq = thread.submit(asyncio.run, search).result()
        changed = 0
        if missing:
            events = deletes_of(missing_table(missing), bucket, layout, target.schema)
            changed = tables.merge(events, None).changed
        return ReconcileResult(
            removed=changed,
            kept=len(rows) - len(missing),
            changed=len(missing) - changed,
            last_seq=last_seq,
        )

    return EngineChoice(location, limits).run(spark, work)
