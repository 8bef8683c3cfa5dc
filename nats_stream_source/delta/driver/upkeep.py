"""Upkeep of a Delta table by delta-rs: compaction, VACUUM and the log's checkpoints.

See :mod:`nats_stream_source.delta.upkeep` for what upkeep is.
"""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError

from nats_stream_source.delta.conflicts import first_line
from nats_stream_source.delta.upkeep import (
    MaintenanceResult,
    Upkeep,
    maintenance_error,
    skipped_after_conflict,
)
from nats_stream_source.logs import field_logger

_FAILURES = (DeltaError, OSError)

_log = field_logger(__name__)


def compaction_problem(target: DeltaTable) -> str | None:
    """Why delta-rs cannot compact this table although it can merge into it; None if it can."""
    mode = target.metadata().configuration.get("delta.columnMapping.mode", "none")
    return None if mode == "none" else f"delta-rs does not compact with column mapping ({mode})"


def live_files(target: DeltaTable) -> list[tuple[tuple[str, ...], int]]:
    """The partition and the size of each data file of this version."""
    actions = pa.table(target.get_add_actions(flatten=True))
    partitions = [name for name in actions.column_names if name.startswith("partition.")]
    columns = [actions[name].to_pylist() for name in ("size_bytes", *partitions)]
    return [(tuple(map(str, values)), size) for size, *values in zip(*columns, strict=True)]


def upkeep_after_commit(
    target: DeltaTable, upkeep: Upkeep, before: int, table: str
) -> MaintenanceResult:
    """Do what is due after a commit by delta-rs. A failure is logged; the next commit tries again.

    Args:
        target: the table after the commit.
        upkeep: when what is due.
        before: the version before the commit.
        table: path or URI, for the log.
    """
    after = target.version()
    if after == before:
        return MaintenanceResult()
    compact = compaction_problem(target) is None and upkeep.compaction_due(live_files(target))
    result = MaintenanceResult()
    try:
        if compact:
            result = _compact(target, upkeep)
        if upkeep.vacuum_due(before, after):
            result = replace(result, deleted=vacuum(target, upkeep))
    except _FAILURES as error:
        _log.warning("could not maintain the table", table=table, error=first_line(error))
        return result
    if result != MaintenanceResult():
        _log.info(
            "maintained the table",
            table=table,
            compacted=result.compacted,
            written=result.written,
            deleted=result.deleted,
            skipped=result.skipped,
        )
    return result


def maintain_by_delta_rs(target: DeltaTable, upkeep: Upkeep, table: str) -> MaintenanceResult:
    """Compact, VACUUM, write a checkpoint and delete the expired files of the log.

    Raises:
        TableError: delta-rs or its storage failed.
    """
    try:
        problem = compaction_problem(target)
        result = MaintenanceResult(skipped=problem) if problem else _compact(target, upkeep)
        result = replace(result, deleted=vacuum(target, upkeep))
        target.create_checkpoint()
        if target.metadata().configuration.get("delta.enableExpiredLogCleanup") != "false":
            target.cleanup_metadata()
    except _FAILURES as error:
        raise maintenance_error(table, error) from error
    return result


def _compact(target: DeltaTable, upkeep: Upkeep) -> MaintenanceResult:
    try:
        metrics = target.optimize.compact(target_size=upkeep.target_file_bytes)
    except CommitFailedError as error:
        return skipped_after_conflict(error)
    return MaintenanceResult(metrics["numFilesRemoved"], metrics["numFilesAdded"])


def vacuum(target: DeltaTable, upkeep: Upkeep) -> int:
    """Delete the data files that have expired; returns their number."""
    deleted = target.vacuum(
        upkeep.retention_hours,
        dry_run=False,
        # A retention that the user asks for can be below the table's.
        enforce_retention_duration=upkeep.retention_hours is None,
        full=True,
    )
    return len(deleted)
