"""Maintain a Delta table now, on demand, with either executor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.sql import SparkSession

from nats_stream_source.delta.location import Engine as EngineName
from nats_stream_source.delta.location import TableArgument, TableLocation
from nats_stream_source.delta.spark.choice import EngineChoice
from nats_stream_source.delta.tables import Engine, Table
from nats_stream_source.delta.upkeep import DEFAULT_UPKEEP, MaintenanceResult, Upkeep
from nats_stream_source.errors import ConfigurationError


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
