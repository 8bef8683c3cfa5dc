"""``reconcile`` and ``maintain``: changes of a table on demand, by an executor of the session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.sql import SparkSession

from nats_stream_source.delta.compare_with_bucket import ReconcileResult, compare_with_bucket
from nats_stream_source.delta.location import AutoLimits, TableArgument, TableLocation
from nats_stream_source.delta.location import Engine as EngineName
from nats_stream_source.delta.rules.layout import Deletes, validate_deletes
from nats_stream_source.delta.spark.choice import EngineChoice
from nats_stream_source.delta.tables import Engine, Table
from nats_stream_source.delta.upkeep import DEFAULT_UPKEEP, MaintenanceResult, Upkeep
from nats_stream_source.errors import ConfigurationError
from nats_stream_source.jetstream.kv.codec import kv_codec
from nats_stream_source.jetstream.subjects import validate_bucket
from nats_stream_source.options import CONNECTION, connection_settings, parse


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
    value_codec: str | None = None,
    **options: str,
) -> ReconcileResult:
    """Remove, mark or close the rows of a table whose keys the bucket no longer has.

    In a history table (``stored_as_scd_type=2``) the open row of such a key is closed. A marked row
    has null in the columns that ``nats_kv`` delivers, and keeps all others: here the columns of the
    query are not known.

    A row whose revision has expired while the bucket has an older one of its key gets the older
    value; in a history table the open row is closed, and another one is opened. The table must have
    columns of ``nats_kv`` only, with their types; else a warning has the number of such rows.

    Rows of an earlier bucket of this name are included. A row is changed only if its key had no
    value, or an older one, when the bucket's leader responded, and the row was not changed since.
    The driver holds the table's keys in memory and sends one request for each key.

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
        value_codec: likewise, ``valueCodec``.
        options: other connection options of the source, by their names (``user="…"``).

    Raises:
        OptionError: a connection option is unknown or has an invalid value.
        UndecodableError: ``value_codec`` does not decode an older value of the bucket.
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
    codec = kv_codec(key_codec, value_codec)
    settings = connection_settings(parse({"servers": servers, **options}, CONNECTION))
    location = TableLocation(table, engine, storage_options)

    def work(tables: Engine[Any]) -> ReconcileResult:
        return compare_with_bucket(tables, location.name, bucket, settings, codec, deletes)

    return EngineChoice(location, limits).run(spark, work)


def maintain(
    spark: SparkSession,
    table: TableArgument,
    *,
    engine: EngineName = "auto",
    storage_options: Mapping[str, str] | None = None,
    upkeep: Upkeep = DEFAULT_UPKEEP,
) -> MaintenanceResult:
    """Compact and VACUUM a table, and shorten its log, whether that is due or not.

    A state table beside it is maintained too; the result is the sum of both.

    For tables that were never maintained, and for a scheduled job in place of the upkeep of
    ``merge_changes(…, upkeep=None)``. A query can merge into the table meanwhile.

    Args:
        spark: a session; with Delta Lake if Spark changes the table.
        table: as in :func:`merge`.
        engine: what changes the table, see :func:`merge`.
        storage_options: the object store's options for the driver, see :func:`merge`.
        upkeep: its ``target_file_bytes`` and ``retention_hours``.

    Raises:
        ConfigurationError: the table does not exist, or the engine cannot change it.
        TableError: the engine or its storage failed; the rows are unchanged.
    """
    location = TableLocation(table, engine, storage_options)
    choice = EngineChoice(location)

    def work(tables: Engine[Any]) -> MaintenanceResult:
        target: Table | None = tables.find()
        if target is None:
            raise ConfigurationError(
                f"could not maintain table {location.name!r}: no Delta table found; check the "
                f"path or name"
            )
        result = target.maintain(upkeep)
        if target.layout is not None and target.layout.has_state:
            state = tables.find_state()
            result += state.maintain(upkeep) if state is not None else MaintenanceResult()
        return result

    return choice.run(spark, work)
