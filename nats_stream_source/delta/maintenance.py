"""Upkeep of a Delta table: OPTIMIZE (compaction), VACUUM, and the retention of the log.

Each merge is a commit. It writes a file of the log, adds data files, and removes the ones that it
rewrote; they stay on disk until VACUUM deletes them. At a commit a second, three things grow:

- **Live files**, where keys are inserted but not updated: each commit adds a small one.
  Compaction rewrites them as few files. Its commit changes no data (``dataChange`` is false): it is
  not in the change data feed, and streams that read the table skip it.
- **Removed files.** VACUUM deletes those that no version of the last ``retention_hours`` needs. A
  reader that opened an older version then fails with a missing file. It lists the directory, since
  a checkpoint of the log no longer has the names of files that were removed before the retention.
- **Files of the log.** Each merge lists them. Both engines delete the expired ones when they write
  a checkpoint. How long they keep them, and how often they write one, are properties of the table
  (``delta.logRetentionDuration``, ``delta.checkpointInterval``); :meth:`Upkeep.table_properties`
  has them for a new table. The properties of an existing table are the user's and stay.

**Conflicts.** Compaction removes files. If another writer removed one of them since, its commit
fails, nothing changes, and the next one tries again; a merge that runs meanwhile is merged again.
VACUUM does not conflict with commits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from nats_stream_source.delta.conflicts import first_line
from nats_stream_source.errors import ConfigurationError, TableError
from nats_stream_source.logs import field_logger

if TYPE_CHECKING:
    from deltalake import DeltaTable

SAFE_RETENTION_HOURS = 168
"""Delta's own default and safety limit for VACUUM: 7 days."""

_log = field_logger(__name__)


@dataclass(frozen=True, slots=True)
class Upkeep:
    """When ``merge_changes`` maintains its table, and how long Delta keeps what is removed.

    Attributes:
        compact_files: compact if a table has this many small data files more than it needs. None:
            never.
        target_file_bytes: size of the files that compaction writes; a file below half of it is
            small. A merge rewrites each file that has one of its keys, so larger ones cost more.
        vacuum_commits: run VACUUM once in this many commits. None: never.
        retention_hours: how long VACUUM keeps data files after their removal. Readers and commits
            must end within this time. None: the table's ``delta.deletedFileRetentionDuration``,
            whose default is Delta's safety limit of 168 hours (7 days).
        log_retention_hours: how long the log of a table that ``merge_changes`` creates keeps its
            versions: for time travel, and for streams that read the table. Delta requires at least
            the retention of files. None: the same.
        checkpoint_commits: the interval of the log's checkpoints in such a table.
    """

    compact_files: int | None = 100
    target_file_bytes: int = 32 << 20
    vacuum_commits: int | None = 1000
    retention_hours: int | None = None
    log_retention_hours: int | None = None
    checkpoint_commits: int = 100

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            optional = name not in ("target_file_bytes", "checkpoint_commits")
            if value is None and optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(
                    f"invalid argument: {name} is {value!r}, expected an integer from 1"
                    f"{', or None' if optional else ''}"
                )

        hours = self.retention_hours or SAFE_RETENTION_HOURS
        if self.log_retention_hours is not None and self.log_retention_hours < hours:
            raise ConfigurationError(
                f"invalid argument: log_retention_hours is {self.log_retention_hours}, expected at "
                f"least retention_hours ({hours}), as Delta requires"
            )

    def table_properties(self) -> dict[str, str]:
        """The properties of a table that is created with this upkeep."""
        hours = self.retention_hours or SAFE_RETENTION_HOURS
        return {
            "delta.checkpointInterval": str(self.checkpoint_commits),
            "delta.logRetentionDuration": f"interval {self.log_retention_hours or hours} hours",
            "delta.deletedFileRetentionDuration": f"interval {hours} hours",
        }

    def vacuum_due(self, before: int, after: int) -> bool:
        """Whether VACUUM is due after the commits from version ``before`` to ``after``.

        It depends on the versions only. A restarted query therefore continues the count.
        """
        return _crosses(self.vacuum_commits, before, after)

    def look_at_files_due(self, before: int, after: int) -> bool:
        """Whether enough commits were made to look at the files, where that is a Spark job."""
        return _crosses(self.compact_files, before, after)

    def compaction_due(self, files: Iterable[tuple[object, int]]) -> bool:
        """Whether compaction is due for these live files.

        Args:
            files: partition (any value that identifies it) and size of each.
        """
        if self.compact_files is None:
            return False
        small = Counter(partition for partition, size in files if 2 * size < self.target_file_bytes)
        return small.total() - len(small) >= self.compact_files


DEFAULT_UPKEEP = Upkeep()


@dataclass(frozen=True)
class MaintenanceResult:
    """What was done.

    Attributes:
        compacted: small data files that were replaced.
        written: data files that replaced them.
        deleted: removed files that VACUUM deleted.
        skipped: why compaction was skipped; empty if it was not.
    """

    compacted: int = 0
    written: int = 0
    deleted: int = 0
    skipped: str = ""


def _crosses(every: int | None, before: int, after: int) -> bool:
    """Whether a multiple of ``every`` is between two versions."""
    return every is not None and before // every != after // every


def compaction_problem(target: DeltaTable) -> str | None:
    """Why delta-rs cannot compact this table although it can merge into it; None if it can."""
    mode = target.metadata().configuration.get("delta.columnMapping.mode", "none")
    return None if mode == "none" else f"delta-rs does not compact with column mapping ({mode})"


def live_files(target: DeltaTable) -> list[tuple[object, int]]:
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
            result = _vacuum(target, upkeep, result)
    except _failures() as error:
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
        result = _vacuum(target, upkeep, result)
        target.create_checkpoint()
        if target.metadata().configuration.get("delta.enableExpiredLogCleanup") != "false":
            target.cleanup_metadata()
    except _failures() as error:
        raise TableError(
            f"could not maintain table {table!r}: {first_line(error)}; its rows are unchanged, run "
            f"maintain again"
        ) from error
    return result


def _compact(target: DeltaTable, upkeep: Upkeep) -> MaintenanceResult:
    # Imported here: the other engine does not require deltalake.
    from deltalake.exceptions import CommitFailedError

    try:
        metrics = target.optimize.compact(target_size=upkeep.target_file_bytes)
    except CommitFailedError as error:
        return MaintenanceResult(skipped=f"another writer changed the table ({first_line(error)})")
    return MaintenanceResult(metrics["numFilesRemoved"], metrics["numFilesAdded"])


def _vacuum(target: DeltaTable, upkeep: Upkeep, result: MaintenanceResult) -> MaintenanceResult:
    deleted = target.vacuum(
        upkeep.retention_hours,
        dry_run=False,
        # A retention that the user asks for can be below the table's.
        enforce_retention_duration=upkeep.retention_hours is None,
        full=True,
    )
    return MaintenanceResult(result.compacted, result.written, len(deleted), result.skipped)


def _failures() -> tuple[type[Exception], ...]:
    # Imported here: the other engine does not require deltalake.
    from deltalake.exceptions import DeltaError

    return (DeltaError, OSError)
