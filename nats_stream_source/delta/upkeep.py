"""Upkeep of a Delta table: OPTIMIZE (compaction), VACUUM, and the retention of the log.

Each merge is a commit. It writes a file of the log, adds data files, and removes the ones that it
rewrote; they stay on disk until VACUUM deletes them. At a commit a second, three things grow:

- **Live files**, where keys are inserted but not updated: each commit adds a small one.
  Compaction rewrites them as few files. Its commit changes no data (``dataChange`` is false): it is
  not in the change data feed, and streams that read the table skip it.
- **Removed files.** VACUUM deletes those that no version of the last ``retention_hours`` needs. A
  reader that opened an older version then fails with a missing file. It lists the directory, since
  a checkpoint of the log no longer has the names of files that were removed before the retention.
- **Files of the log.** Each merge by Spark lists them. Spark deletes the expired ones when it
  writes a checkpoint, the driver at VACUUM. How long they keep them, and how often they write one,
  are properties of the table (``delta.logRetentionDuration``, ``delta.checkpointInterval``);
  :meth:`Upkeep.table_properties` has them for a new table. The properties of an existing table are
  the user's and stay. A checkpoint has the removed files, too: at many commits a second the driver
  writes fewer, so that they have at most twice the bytes of the commits.

**Conflicts.** Compaction removes files. If another writer removed one of them since, its commit
fails, nothing changes, and the next one tries again; a merge that runs meanwhile is merged again.
VACUUM does not conflict with commits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from nats_stream_source.delta.conflicts import first_line
from nats_stream_source.errors import ConfigurationError, TableError

SAFE_RETENTION_HOURS = 168
"""Delta's own default and safety limit for VACUUM: 7 days."""

VECTORS_RETENTION_HOURS = 1
"""The default of a new table with deletion vectors, to which several commits a second are made."""

COMMIT_INTERVAL = 0.02
"""The shortest time between two commits of a follower without Spark, in seconds."""

_HOURS = {"hour": 1, "day": 24, "week": 168}


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
            which a new table has as 1 hour with deletion vectors, and as Delta's safety limit of
            168 hours (7 days) without.
        log_retention_hours: how long the log of a table that ``merge_changes`` creates keeps its
            versions: for time travel, and for streams that read the table. Delta requires at least
            the retention of files. None: the same.
        checkpoint_commits: the interval of the log's checkpoints in such a table, at least.
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

        hours = self.retention_hours or VECTORS_RETENTION_HOURS
        if self.log_retention_hours is not None and self.log_retention_hours < hours:
            raise ConfigurationError(
                f"invalid argument: log_retention_hours is {self.log_retention_hours}, expected at "
                f"least retention_hours ({hours}), as Delta requires"
            )

    def table_properties(self, deletion_vectors: bool) -> dict[str, str]:
        """The properties of a table that is created with this upkeep."""
        default = VECTORS_RETENTION_HOURS if deletion_vectors else SAFE_RETENTION_HOURS
        hours = self.retention_hours or default
        log_hours = max(self.log_retention_hours or hours, hours)
        return {
            "delta.checkpointInterval": str(self.checkpoint_commits),
            "delta.logRetentionDuration": f"interval {log_hours} hours",
            "delta.deletedFileRetentionDuration": f"interval {hours} hours",
        }

    def vacuum_due(self, before: int, after: int) -> bool:
        """Whether VACUUM is due after the commits from version ``before`` to ``after``.

        It depends on the versions only. A restarted query therefore continues the count.
        """
        return crosses(self.vacuum_commits, before, after)

    def look_at_files_due(self, before: int, after: int) -> bool:
        """Whether enough commits were made to look at the files, where that is a Spark job."""
        return crosses(self.compact_files, before, after)


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

    def __add__(self, other: MaintenanceResult) -> MaintenanceResult:
        return MaintenanceResult(
            self.compacted + other.compacted,
            self.written + other.written,
            self.deleted + other.deleted,
            other.skipped,
        )


def skipped_after_conflict(error: BaseException) -> MaintenanceResult:
    """The result of a compaction whose commit conflicts with that of another writer."""
    return MaintenanceResult(skipped=f"another writer changed the table ({first_line(error)})")


def maintenance_error(table: str, error: BaseException) -> TableError:
    """The error for a failure of an engine, or of its storage, that maintains a table."""
    return TableError(
        f"could not maintain table {table!r}: {first_line(error)}; its rows are unchanged, run "
        f"maintain again"
    )


def retention_ms(upkeep: Upkeep, properties: Mapping[str, str]) -> int:
    """How long removed files are kept, in milliseconds: by the upkeep, else by the table.

    Args:
        properties: of the table. A duration that is not in whole hours, days or weeks counts as
            Delta's default.
    """
    hours = upkeep.retention_hours
    if hours is None:
        text = properties.get("delta.deletedFileRetentionDuration", "")
        match = re.fullmatch(r"\s*(?:interval\s+)?(\d+)\s+(hour|day|week)s?\s*", text, re.I)
        hours = int(match[1]) * _HOURS[match[2].lower()] if match else SAFE_RETENTION_HOURS
    return hours * 3_600_000


def crosses(every: int | None, before: int, after: int) -> bool:
    """Whether a multiple of ``every`` is between two versions."""
    return every is not None and before // every != after // every
