"""Upkeep of a table: compaction, the log's checkpoints, and removal of what has expired.

**Beside the merges,** a thread does what is due after a commit; at most one runs for a table and
process. It is not a daemon, so the process ends after it. A failure is logged, and the next commit
tries again.

**Compaction** writes data files again: fewer files, and no removed rows in them. The live rows move
to new files, and so does the index, row by row; a merge into a table without deletion vectors does
the same with the files that it touches. The files of a partition are in classes of size, each ten
times as large as the one below. Once a class has enough files, their live rows are written
together, and are usually of the class above then; therefore a row is written about once for each
class. A file whose rows are mostly removed is written alone. Files of the target size stay.

A compaction reads the files, writes the new ones and searches the index for the rows without the
table's lock. If a merge has replaced rows meanwhile, the commit gives the new files vectors of
these; without deletion vectors the attempt is dropped. The commit changes no data (``dataChange``
is false).

**Deletion vectors.** VACUUM of delta-rs deletes data files and ignores the objects with vectors.
:func:`delete_expired_vectors` deletes those that neither the newest version nor a version within
the retention names: a ``remove`` action has the vector that a file had, and the time of its
removal.
"""

from __future__ import annotations

import posixpath
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import pyarrow as pa
import tenacity
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyroaring import BitMap64

from nats_stream_source.delta.conflicts import first_line, retry_conflicts
from nats_stream_source.delta.driver.data_files import (
    LiveFile,
    PartitionWriter,
    positions,
)
from nats_stream_source.delta.driver.log import (
    Action,
    DamagedLogError,
    LogState,
    VersionExistsError,
    is_vector_path,
    now_ms,
    removal,
    vector_file_name,
)
from nats_stream_source.delta.driver.objects import TableObjects
from nats_stream_source.delta.driver.snapshot import Replaced, Snapshot
from nats_stream_source.delta.driver.storage import TableStorage
from nats_stream_source.delta.rules.rows import Integers
from nats_stream_source.delta.tables import EngineRefusedError, TableChangedError
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
    EngineRefusedError,
    NatsSourceError,
    OSError,
    TableChangedError,
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
            writes = checkpoint and table.log.checkpoint_due()
            if not (writes or vacuum_due):
                return
            # A listing of the log beside commits can miss an entry, which reads as a gap.
            opening = tenacity.Retrying(
                retry=tenacity.retry_if_exception_type(DeltaError),
                stop=tenacity.stop_after_attempt(_OPENINGS),
                reraise=True,
            )
            target = opening(self._storage.delta_rs)
            if writes:
                target.create_checkpoint()
                table.log.entry_bytes = 0
            if vacuum_due and upkeep is not None:
                deleted = _delete_expired(self._storage, target, upkeep)
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
        due = islice(iter(lambda: _due(table, upkeep), []), _COMPACTIONS)
        for one in _compactions(table, due, upkeep.target_file_bytes):
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
            parts = all_small_files(table.files, upkeep.target_file_bytes)
        result = MaintenanceResult()
        try:
            for one in _compactions(table, parts, upkeep.target_file_bytes):
                result += one
        except (TableChangedError, TableConflictError) as error:
            result += skipped_after_conflict(error)
        target = storage.delta_rs()
        target.create_checkpoint()
        return replace(result, deleted=_delete_expired(storage, target, upkeep))
    except (DamagedLogError, DeltaError, OSError, pa.ArrowException) as error:
        raise maintenance_error(storage.name, error) from error


def _due(table: Snapshot, upkeep: Upkeep) -> list[int]:
    if upkeep.compact_files is None:
        return []
    with table.lock:
        return select_files(table.files, upkeep.target_file_bytes, upkeep.compact_files)


def _compactions(
    table: Snapshot, parts: Iterable[list[int]], target_bytes: int
) -> Iterator[MaintenanceResult]:
    """Compact the files of each part, until a merge removes one of their rows."""
    for files in parts:
        new = compact(table, files, target_bytes)
        if new is None:
            yield skipped_after_conflict(TableChangedError("it removed rows"))
            return
        yield MaintenanceResult(len(files), new)


def _delete_expired(storage: TableStorage, target: DeltaTable, upkeep: Upkeep) -> int:
    """Delete files of data, vectors and the log that have expired; how many of the former two.

    Other writers can change the table's properties meanwhile: those of its newest version count.
    """
    deleted = target.vacuum(
        upkeep.retention_hours,
        dry_run=False,
        # A retention that the user asks for can be below the table's.
        enforce_retention_duration=upkeep.retention_hours is None,
        full=True,
    )
    newest = storage.read_existing()
    vectors = delete_expired_vectors(storage.objects(), newest, upkeep)
    if newest.properties.get("delta.enableExpiredLogCleanup", "").lower() != "false":
        target.cleanup_metadata()
    return len(deleted) + vectors


def delete_expired_vectors(objects: TableObjects, newest: LogState, upkeep: Upkeep) -> int:
    """Delete the objects with vectors that have expired; returns their number."""
    before = now_ms() - retention_ms(upkeep, newest.properties)
    late = [one for one in newest.removed if (one.get("deletionTimestamp") or 0) >= before]
    kept = {
        vector_file_name(action["deletionVector"])
        for action in (*newest.files.values(), *late)
        if action.get("deletionVector")
    }
    expired = [
        one["path"]
        for one in objects.list()
        # An object that no version names yet belongs to a commit that is under way.
        if is_vector_path(one["path"])
        and posixpath.basename(one["path"]) not in kept
        and one["last_modified"].timestamp() * 1000 < before
    ]
    objects.delete(expired)
    return len(expired)


FILES_PER_CLASS = 10
"""How many files of a class are written together."""

SMALL_FILES = 50
"""How many files of the smallest class are: the files of single commits."""

_SMALL_BYTES = 1 << 20  # below: the smallest class
_MOST_FILES = 500  # of one compaction


@dataclass(frozen=True, slots=True)
class _Source:
    """A file whose rows move to others."""

    number: int
    file: LiveFile  # its state at the begin
    rows: Integers  # the positions of its rows that move, in ascending order
    start: int  # the position of the first of them among all rows that move


class Rewrite:
    """The live rows of files of one partition, written to new files.

    Rows may be taken out of the files beside this, and none is added to them.

    Args:
        files: by number; their vectors have the rows that do not move.
        data_change: whether the commit changes rows.

    Attributes:
        written: the ``add`` of each new file, and its number of rows.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        files: Mapping[int, LiveFile],
        target_bytes: int,
        *,
        data_change: bool,
    ) -> None:
        self._snapshot = snapshot
        self._data_change = data_change
        self._sources: list[_Source] = []
        partition = next(iter(files.values())).add["partitionValues"]
        writer = PartitionWriter(snapshot.objects, partition, target_bytes, data_change=data_change)
        count = 0
        for number, file in files.items():
            rows = file.live_positions()
            self._sources.append(_Source(number, file, rows, count))
            count += len(rows)
            if len(rows):
                writer.add(snapshot.rows_at(file, rows, snapshot.stored_columns))
        writer.finish()
        self.written = writer.files
        if snapshot.indexed:
            index = snapshot.index
            self._slots, self._files = index.in_files([*files])
            at, self._at = index.row[self._slots], np.empty(len(self._slots), np.int64)
            for source in self._sources:
                of_source = self._files == source.number
                self._at[of_source] = np.searchsorted(source.rows, at[of_source]) + source.start

    def removals(self) -> tuple[list[Action], Replaced]:
        """The actions that remove the files which are still live, and these files."""
        files = self._snapshot.files
        live = [source.number for source in self._sources if source.number in files]
        removed = [removal(files[n].add, data_change=self._data_change) for n in live]
        return removed, [(number, None) for number in live]

    def removed_since(self) -> Integers:
        """The positions of moved rows that were removed meanwhile, among all rows that move."""
        removed, files = [np.empty(0, np.int64)], self._snapshot.files
        for source in self._sources:
            since = source.rows
            if source.number in files:
                since = positions(files[source.number].vector - source.file.vector)
            removed.append(np.searchsorted(source.rows, since) + source.start)
        return np.concatenate(removed)

    def apply(self, new: Sequence[LiveFile | None]) -> None:
        """Add the new files, and put the rows into them.

        Args:
            new: None for a file without a live row.
        """
        files = [-1 if file is None else self._snapshot.add(file) for file in new]
        if self._snapshot.indexed:
            index = self._snapshot.index
            still = index.file[self._slots] == self._files
            number, at = places(self._at[still], [rows for _, rows in self.written])
            index.file[self._slots[still]] = np.array(files, np.int32)[number]
            index.row[self._slots[still]] = at


def rewritten(
    snapshot: Snapshot, files: Mapping[int, LiveFile], target_bytes: int, *, data_change: bool
) -> list[Rewrite]:
    """Write the live rows of files of any partition to new files; see :class:`Rewrite`."""
    of_partition: dict[object, dict[int, LiveFile]] = defaultdict(dict)
    for number, file in files.items():
        of_partition[file.partition][number] = file
    return [
        Rewrite(snapshot, members, target_bytes, data_change=data_change)
        for members in of_partition.values()
    ]


def places(at: Integers, counts: Sequence[int]) -> tuple[Integers, Integers]:
    """Which of several files has each row, and where, by its position in all of them."""
    starts = np.cumsum([0, *counts])
    files = np.searchsorted(starts, at, "right") - 1
    return files, at - starts[files]


def select_files(files: Mapping[int, LiveFile], target_bytes: int, small_files: int) -> list[int]:
    """The numbers of the files to compact next; empty if compaction is not due.

    Args:
        target_bytes: files of half this size or more are not joined with others.
        small_files: how many files more than one a class may have, if that is less than usual.
    """
    classes: dict[tuple[object, int], list[int]] = defaultdict(list)
    for number, file in files.items():
        if _mostly_removed(file) and file.add["size"] >= _SMALL_BYTES:
            return [number]
        if 2 * file.live_bytes < target_bytes:
            classes[file.partition, _size_class(file.live_bytes)].append(number)
    due = [
        numbers
        for (_, size), numbers in classes.items()
        if len(numbers) > min(small_files, (FILES_PER_CLASS if size else SMALL_FILES) - 1)
    ]
    return max(due, key=len, default=[])[:_MOST_FILES]


def all_small_files(files: Mapping[int, LiveFile], target_bytes: int) -> list[list[int]]:
    """The files that compaction joins if each partition is to have as few as possible."""
    groups: dict[object, list[int]] = defaultdict(list)
    for number, file in files.items():
        if 2 * file.live_bytes < target_bytes or _mostly_removed(file):
            groups[file.partition].append(number)
    parts = [
        numbers[start : start + _MOST_FILES]
        for numbers in groups.values()
        for start in range(0, len(numbers), _MOST_FILES)
    ]
    return [part for part in parts if len(part) > 1 or _mostly_removed(files[part[0]])]


def _mostly_removed(file: LiveFile) -> bool:
    return 2 * file.live_rows < file.rows


def _size_class(size: int) -> int:
    return 0 if size < _SMALL_BYTES else len(str(size // _SMALL_BYTES))


def compact(snapshot: Snapshot, numbers: Sequence[int], target_bytes: int) -> int | None:
    """Replace files by others with their live rows; returns how many, None if it is dropped.

    With deletion vectors, a file can be removed meanwhile: it no longer has live rows, or another
    writer has moved them. All its rows are then removed rows of the new files.
    """
    with snapshot.lock:
        if not all(number in snapshot.files for number in numbers):
            return None
        files = {number: snapshot.files[number] for number in numbers}
    rewrite = Rewrite(snapshot, files, target_bytes, data_change=False)

    def commit() -> int | None:
        with snapshot.lock:
            snapshot.refresh()
            return _commit(snapshot, rewrite)

    return retry_conflicts(commit, snapshot.name, (VersionExistsError,))


def _commit(snapshot: Snapshot, rewrite: Rewrite) -> int | None:
    removed = rewrite.removed_since()
    if len(removed) and not snapshot.vectors:
        return None
    of_file, at = places(removed, [rows for _, rows in rewrite.written])
    files = (
        LiveFile(add, rows, BitMap64(at[of_file == number]))
        for number, (add, rows) in enumerate(rewrite.written)
    )
    new = snapshot.with_vectors(files, data_change=False)
    live = [file for file in new if file is not None]
    actions, replaced = rewrite.removals()
    actions += [{"add": file.add} for file in live]
    snapshot.commit("OPTIMIZE", actions, replaced, lambda: rewrite.apply(new))
    return len(live)
