"""Upkeep of a Delta table by Spark: OPTIMIZE and VACUUM of Delta Lake.

Both are Spark jobs that list the table, and take seconds. Spark itself writes the log's checkpoints
and deletes the expired files of the log. See :mod:`nats_stream_source.delta.upkeep`.
"""

from __future__ import annotations

from delta.exceptions import (
    ConcurrentAppendException,
    ConcurrentDeleteDeleteException,
    ConcurrentDeleteReadException,
    ConcurrentTransactionException,
    ConcurrentWriteException,
    MetadataChangedException,
    ProtocolChangedException,
)
from delta.tables import DeltaTable
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from nats_stream_source.delta.conflicts import first_line
from nats_stream_source.delta.spark.session import temporary_settings
from nats_stream_source.delta.upkeep import (
    MaintenanceResult,
    Upkeep,
    maintenance_error,
    skipped_after_conflict,
)
from nats_stream_source.logs import field_logger

CONFLICTS = (
    ConcurrentAppendException,
    ConcurrentDeleteDeleteException,
    ConcurrentDeleteReadException,
    ConcurrentTransactionException,
    ConcurrentWriteException,
    MetadataChangedException,
    ProtocolChangedException,
)
"""Delta's exceptions of a commit that conflicts with another one; they lack a common base."""

_RETENTION_CHECK = "spark.databricks.delta.retentionDurationCheck.enabled"
_MAX_FILE_SIZE = "spark.databricks.delta.optimize.maxFileSize"
_LISTING_TASKS = "spark.sql.sources.parallelPartitionDiscovery.parallelism"
_FAILURES = (PySparkException, Py4JJavaError)

_log = field_logger(__name__)


def upkeep_after_spark_commit(
    spark: SparkSession, target: DeltaTable, upkeep: Upkeep, table: str
) -> MaintenanceResult:
    """Do what is due after a commit by Spark. A failure is logged; the next commit tries again.

    Args:
        spark: the session of the table.
        target: the table after the commit.
        upkeep: when what is due.
        table: path or name, for the log.
    """
    result = MaintenanceResult()
    try:
        after = newest_version(target)
        before = after - 1
        if upkeep.look_at_files_due(before, after):
            detail = target.detail().select("numFiles", "sizeInBytes").head()
            assert detail is not None  # DESCRIBE DETAIL has one row
            needed = detail.sizeInBytes // upkeep.target_file_bytes + 1
            if upkeep.compact_files and detail.numFiles - needed >= upkeep.compact_files:
                result = _compact(spark, target, upkeep)
        if upkeep.vacuum_due(before, after):
            _vacuum(spark, target, upkeep)
    except _FAILURES as error:
        _log.warning("could not maintain the table", table=table, error=first_line(error))
    return result


def maintain_by_spark(
    spark: SparkSession, target: DeltaTable, upkeep: Upkeep, table: str
) -> MaintenanceResult:
    """Compact and VACUUM.

    Raises:
        TableError: Spark or its storage failed.
    """
    try:
        result = _compact(spark, target, upkeep)
        _vacuum(spark, target, upkeep)
    except _FAILURES as error:
        raise maintenance_error(table, error) from error
    return result


def newest_version(target: DeltaTable) -> int:
    """The newest version of the table."""
    newest = target.history(1).select("version").head()
    assert newest is not None  # a table has at least the version that created it
    return int(newest.version)


def _compact(spark: SparkSession, target: DeltaTable, upkeep: Upkeep) -> MaintenanceResult:
    with temporary_settings(spark, {_MAX_FILE_SIZE: str(upkeep.target_file_bytes)}):
        try:
            row = target.optimize().executeCompaction().select("metrics.*").head()
        except CONFLICTS as error:
            return skipped_after_conflict(error)
    assert row is not None  # OPTIMIZE returns one row
    return MaintenanceResult(int(row.numFilesRemoved), int(row.numFilesAdded))


def _vacuum(spark: SparkSession, target: DeltaTable, upkeep: Upkeep) -> None:
    # VACUUM lists the directories in as many tasks as this; the default of 10,000 takes minutes on
    # a few cores. A retention that the user asks for can be below the table's.
    settings: dict[str, str | None] = {_LISTING_TASKS: "64"}
    if upkeep.retention_hours is not None:
        settings[_RETENTION_CHECK] = "false"
    with temporary_settings(spark, settings):
        target.vacuum(upkeep.retention_hours)
