"""Maintain a Delta table now, on demand, with either engine."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import SparkSession

from nats_stream_source.delta.engine import Engine, EngineSelector, LimitCheck, TableLocation
from nats_stream_source.delta.maintenance import DEFAULT_UPKEEP, MaintenanceResult, Upkeep
from nats_stream_source.errors import ConfigurationError


def maintain(
    spark: SparkSession,
    table: str,
    *,
    engine: Engine = "auto",
    storage_options: Mapping[str, str] | None = None,
    upkeep: Upkeep = DEFAULT_UPKEEP,
) -> MaintenanceResult:
    """Compact and VACUUM a table, and shorten its log, whether that is due or not.

    For tables that were never maintained, and for a scheduled job in place of the upkeep of
    ``merge_changes(…, upkeep=None)``. A query can merge into the table meanwhile.

    Args:
        spark: a session; with Delta Lake if Spark changes the table.
        table: as in :func:`merge`.
        engine: what changes the table, see :func:`merge`.
        storage_options: the object store's options for delta-rs, see :func:`merge`.
        upkeep: its ``target_file_bytes`` and ``retention_hours``.

    Raises:
        ConfigurationError: the table does not exist, or the engine cannot change it.
        TableError: the engine or its storage failed; the rows are unchanged.
    """
    selector = EngineSelector(TableLocation(table, engine, storage_options))

    def by_delta_rs(limits: LimitCheck) -> MaintenanceResult:
        # Imported here: the other engine does not require deltalake.
        from nats_stream_source.delta.delta_rs_table import DeltaRsTable

        target = DeltaRsTable.at(selector.location)
        _check_found(table, target.find())
        limits.check("table_bytes", target.live_bytes)
        return target.maintain(upkeep)

    def by_spark() -> MaintenanceResult:
        # Imported here: the other engine does not require delta-spark.
        from nats_stream_source.delta.spark_maintenance import maintain_by_spark
        from nats_stream_source.delta.spark_table import SparkTable

        found = SparkTable.find(spark, table)
        _check_found(table, found)
        assert found is not None
        return maintain_by_spark(spark, found.target, upkeep, table)

    return selector.run(spark, by_delta_rs, by_spark)


def _check_found(table: str, found: object) -> None:
    if found is None:
        raise ConfigurationError(
            f"could not maintain table {table!r}: no Delta table found; check the path or name"
        )
