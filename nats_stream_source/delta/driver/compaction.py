"""Data files that are written again: their live rows move to new files, and so does the index.

**By a merge,** where the table does not have deletion vectors: the live rows of the files that the
merge touches, together with its own rows.

**By compaction:** fewer files, and no removed rows in them. The files of a partition are in classes
of size, each ten times as large as the one below. Once a class has enough files, their live rows
are written together, and are usually of the class above then; therefore a row is written about once
for each class. A file whose rows are mostly removed is written alone. Files of the target size
stay.

**Beside the merges.** A compaction reads the files, writes the new ones and searches the index for
the rows without the table's lock. If a merge has replaced rows meanwhile, the commit gives the new
files vectors of these; without deletion vectors the attempt is dropped. The commit changes no data
(``dataChange`` is false). The index is changed row by row, not built again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

from nats_stream_source.delta.conflicts import retry_conflicts
from nats_stream_source.delta.driver.data_files import (
    LiveFile,
    LiveFiles,
    PartitionWriter,
    positions,
)
from nats_stream_source.delta.driver.log import (
    Action,
    VersionExistsError,
    removal,
    with_vector,
)
from nats_stream_source.delta.driver.snapshot import Snapshot
from nats_stream_source.delta.driver.vectors import VectorFile
from nats_stream_source.delta.rules.reading import Integers

FILES_PER_CLASS = 10
"""How many files of a class are written together."""

SMALL_FILES = 50
"""How many files of the smallest class are: the files of single commits."""

_SMALL_BYTES = 1 << 20  # below: the smallest class
_MOST_FILES = 500  # of one compaction


@dataclass(frozen=True, slots=True)
class Source:
    """A file whose rows move to others.

    Attributes:
        number: of the file.
        file: its state at the begin.
        rows: the positions of its rows that move, in ascending order.
        start: the position of the first of them among all rows that move.
    """

    number: int
    file: LiveFile
    rows: Integers
    start: int


class Moves:
    """The rows of files in the index, and where they are among all rows that move.

    Rows may be taken out of the sources beside this, and none is added to them.
    """

    def __init__(self, snapshot: Snapshot, sources: Sequence[Source]) -> None:
        self._index = snapshot.index
        self._slots, self._files = self._index.in_files([source.number for source in sources])
        rows, self._at = self._index.row[self._slots], np.empty(len(self._slots), np.int64)
        for source in sources:
            of_source = self._files == source.number
            self._at[of_source] = np.searchsorted(source.rows, rows[of_source]) + source.start

    def apply(self, files: NDArray[np.int32], counts: Sequence[int]) -> None:
        """Put the rows into the files that they have moved to.

        Args:
            files: their numbers; -1 for one without a live row.
            counts: the rows of each.
        """
        still = self._index.file[self._slots] == self._files
        number, at = places(self._at[still], counts)
        self._index.file[self._slots[still]] = files[number]
        self._index.row[self._slots[still]] = at


def places(at: Integers, counts: Sequence[int]) -> tuple[Integers, Integers]:
    """Which of several files has each row, and where, by its position in all of them."""
    starts = np.cumsum([0, *counts])
    files = np.searchsorted(starts, at, "right") - 1
    return files, at - starts[files]


def select_files(files: LiveFiles, target_bytes: int, small_files: int) -> list[int]:
    """The numbers of the files to compact next; empty if compaction is not due.

    Args:
        files: of the table.
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


def all_small_files(files: LiveFiles, target_bytes: int) -> list[list[int]]:
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

    Raises:
        TableConflictError: other writers committed during each attempt.
        TableChangedError: the table must be opened again.
    """
    with snapshot.lock:
        if not all(number in snapshot.files for number in numbers):
            return None
        files = [(number, snapshot.files[number]) for number in numbers]
    sources, count = [], 0
    for number, file in files:
        sources.append(Source(number, file, file.live_positions(), count))
        count += file.live_rows
    partition = files[0][1].add["partitionValues"]
    writer = PartitionWriter(snapshot.objects, partition, target_bytes, data_change=False)
    for source in sources:
        if len(source.rows):
            writer.add(snapshot.rows_at(source.file, source.rows, snapshot.stored_columns))
    writer.finish()
    moves = Moves(snapshot, sources) if snapshot.indexed else None

    def commit() -> int | None:
        with snapshot.lock:
            snapshot.refresh()
            return _commit(snapshot, sources, moves, writer.files)

    return retry_conflicts(commit, snapshot.name, (VersionExistsError,))


def _commit(
    snapshot: Snapshot,
    sources: Sequence[Source],
    moves: Moves | None,
    written: Sequence[tuple[Action, int]],
) -> int | None:
    present = [source for source in sources if source.number in snapshot.files]
    removed = _removed_since(snapshot, sources)
    if len(removed) and not snapshot.vectors:
        return None
    counts = [rows for _, rows in written]
    of_file, at = places(removed, counts)
    vectors = VectorFile()
    new: list[LiveFile | None] = []
    for number, (add, rows) in enumerate(written):
        vector = BitMap64(at[of_file == number])
        if vector:
            descriptor = vectors.add(vector)
            add = with_vector(add, descriptor, rows, data_change=False)
        new.append(LiveFile(add, rows, vector) if len(vector) < rows else None)
    if content := vectors.content():
        snapshot.objects.put(vectors.name, content)
    live = [file for file in new if file is not None]
    actions = [removal(snapshot.files[s.number].add, data_change=False) for s in present]
    actions += [{"add": file.add} for file in live]

    def update() -> None:
        files = [-1 if file is None else snapshot.files.add(file) for file in new]
        if moves is not None:
            moves.apply(np.array(files, np.int32), counts)

    snapshot.commit("OPTIMIZE", actions, [(source.number, None) for source in present], update)
    return len(live)


def _removed_since(snapshot: Snapshot, sources: Sequence[Source]) -> Integers:
    """The positions of moved rows that were removed meanwhile."""
    removed = [np.empty(0, np.int64)]
    for source in sources:
        since = source.rows
        if source.number in snapshot.files:
            since = positions(snapshot.files[source.number].vector - source.file.vector)
        removed.append(np.searchsorted(source.rows, since) + source.start)
    return np.concatenate(removed)
