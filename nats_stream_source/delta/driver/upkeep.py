"""Upkeep of a table: compaction, the log's checkpoints, and removal of what has expired.

**Beside the merges,** a thread does what is due after a commit; at most one runs for a table and
process. It is not a daemon, so the process ends after it. A failure is logged, and the next commit
tries again.

**Deletion vectors.** VACUUM of delta-rs deletes data files and ignores the objects with vectors.
:func:`delete_expired_vectors` deletes those that neither the newest version nor a version within
the retention names: a ``remove`` action has the vector that a file had, and the time of its
removal.
"""

from __future__ import annotations

import posixpath
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

import pyarrow as pa
import tenacity
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from nats_stream_source.delta.conflicts import first_line
from nats_stream_source.delta.driver.compaction import compact, select_files
from nats_stream_source.delta.driver.log import DamagedLogError, now_ms
from nats_stream_source.delta.driver.snapshot import Snapshot
from nats_stream_source.delta.driver.storage import TableStorage
from nats_stream_source.delta.driver.vectors import VectorError, is_vector_path, vector_file_name
from nats_stream_source.delta.tables import TableChangedError
from nats_stream_source.delta.upkeep import (
    MaintenanceResult,
    Upkeep,
    crosses,
    maintenance_error,
    retention_ms,
    skipped_after_conflict,
)
from nats_stream_source.errors import NatsSourceError, TableConflictError
from nats_stream_source.logs import field_logger

_COMPACTIONS = 20  # of one run of the thread: the next commit continues
_OPENINGS = 3  # attempts to open the table beside commits
_FAILURES = (
    DamagedLogError,
    DeltaError,
    NatsSourceError,
    OSError,
    TableChangedError,
    VectorError,
    pa.ArrowException,
)

_log = field_logger(__name__)


class BackgroundUpkeep:
    """The upkeep of one table in this process."""

    def __init__(self, storage: TableStorage) -> None:
        self._storage = storage
        self._thread: threading.Thread | None = None
        self._maintained: int | None = None  # the version at the last look
        self._done: deque[MaintenanceResult] = deque()

    def after_commit(self, table: Snapshot, upkeep: Upkeep | None) -> None:
        """Start what is due after a commit, unless the thread still runs.

        Without an ``upkeep``, that is checkpoints of the log only.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        with table.lock:
            version = table.version
            since = version - 1 if self._maintained is None else self._maintained
            compacts = upkeep is not None and bool(_due(table, upkeep))
        checkpoint = crosses(table.checkpoint_commits, since, version)
        vacuum_due = upkeep is not None and upkeep.vacuum_due(since, version)
        self._maintained = version
        if not (compacts or checkpoint or vacuum_due):
            return

        def work() -> None:
            if compacts and upkeep is not None:
                self._compact(table, upkeep)
            if checkpoint or vacuum_due:
                # A listing of the log beside commits can miss an entry, which reads as a gap.
                opening = tenacity.Retrying(
                    retry=tenacity.retry_if_exception_type(DeltaError),
                    stop=tenacity.stop_after_attempt(_OPENINGS),
                    reraise=True,
                )
                target = opening(self._storage.delta_rs)
                target.create_checkpoint()
                if vacuum_due and upkeep is not None:
                    deleted = _delete_expired(target, table, upkeep)
                    self._done.append(MaintenanceResult(deleted=deleted))
                    _log.info("maintained the table", table=self._storage.name, deleted=deleted)

        self._thread = threading.Thread(
            target=self._run, args=(work,), name=f"upkeep of {self._storage.name}"
        )
        self._thread.start()

    def take_done(self) -> MaintenanceResult:
        """What was done since the last call."""
        done = MaintenanceResult()
        while self._done:
            done += self._done.popleft()
        return done

    def wait(self) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except _FAILURES as error:
            _log.warning(
                "could not maintain the table", table=self._storage.name, error=first_line(error)
            )

    def _compact(self, table: Snapshot, upkeep: Upkeep) -> None:
        begin, done = time.monotonic(), MaintenanceResult()
        for one in islice(_compactions(table, upkeep), _COMPACTIONS):
            done += one
        self._done.append(done)
        _log.info(
            "maintained the table",
            table=self._storage.name,
            compacted=done.compacted,
            written=done.written,
            seconds=round(time.monotonic() - begin, 2),
        )


def maintain(storage: TableStorage, table: Snapshot, upkeep: Upkeep) -> MaintenanceResult:
    """Compact and VACUUM a table, write a checkpoint and delete the expired files of the log."""
    try:
        with table.lock:
            table.refresh()
        result = MaintenanceResult()
        try:
            for one in _compactions(table, replace(upkeep, compact_files=1)):
                result += one
        except (TableChangedError, TableConflictError) as error:
            result += skipped_after_conflict(error)
        target = storage.delta_rs()
        target.create_checkpoint()
        return replace(result, deleted=_delete_expired(target, table, upkeep))
    except (DamagedLogError, DeltaError, OSError, VectorError, pa.ArrowException) as error:
        raise maintenance_error(storage.name, error) from error


def _due(table: Snapshot, upkeep: Upkeep) -> list[int]:
    if upkeep.compact_files is None:
        return []
    return select_files(table.files, upkeep.target_file_bytes, upkeep.compact_files)


def _compactions(table: Snapshot, upkeep: Upkeep) -> Iterator[MaintenanceResult]:
    """Compact files as long as that is due, or until a merge removes one of their rows."""
    while True:
        with table.lock:
            files = _due(table, upkeep)
        if not files:
            return
        new = compact(table, files, upkeep.target_file_bytes)
        if new is None:
            yield skipped_after_conflict(TableChangedError("it removed rows"))
            return
        yield MaintenanceResult(len(files), new)


def _delete_expired(target: DeltaTable, table: Snapshot, upkeep: Upkeep) -> int:
    """Delete files of data, vectors and the log that have expired; how many of the former two."""
    deleted = target.vacuum(
        upkeep.retention_hours,
        dry_run=False,
        # A retention that the user asks for can be below the table's.
        enforce_retention_duration=upkeep.retention_hours is None,
        full=True,
    )
    vectors = delete_expired_vectors(table, upkeep)
    if table.properties.get("delta.enableExpiredLogCleanup", "").lower() != "false":
        target.cleanup_metadata()
    return len(deleted) + vectors


def delete_expired_vectors(table: Snapshot, upkeep: Upkeep) -> int:
    """Delete the objects with vectors that have expired; returns their number."""
    before = now_ms() - retention_ms(upkeep, table.properties)
    newest = table.log.newest()
    assert newest is not None  # it is the log of a table that is open
    late = [one for one in newest.removed if (one.get("deletionTimestamp") or 0) >= before]
    kept = {
        vector_file_name(action["deletionVector"])
        for action in (*newest.files.values(), *late)
        if action.get("deletionVector")
    }
    expired = [
        one["path"]
        for one in table.objects.list()
        # An object that no version names yet belongs to a commit that is under way.
        if is_vector_path(one["path"])
        and posixpath.basename(one["path"]) not in kept
        and one["last_modified"].timestamp() * 1000 < before
    ]
    table.objects.delete(expired)
    return len(expired)
