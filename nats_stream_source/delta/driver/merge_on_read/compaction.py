"""Compaction of a table with deletion vectors: fewer files, and no removed rows in them.

**Which files.** The files of a partition are in classes of size, each ten times as large as the
one below. Once a class has enough files, their live rows become one file, which is usually of the
class above; therefore a row is written about once for each class. A file whose rows are mostly
removed is written alone. Files of the target size stay.

**Beside the merges.** The files are read, the new file is written and the index is searched for its
rows without the table's lock. The commit then gives the new file a vector of the rows that were
replaced meanwhile. It changes no data (``dataChange`` is false). The index is changed row by row,
not built again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyroaring import BitMap64

from nats_stream_source.delta.conflicts import retry_conflicts
from nats_stream_source.delta.driver.data_files import (
    read_data_file,
    write_data_file,
)
from nats_stream_source.delta.driver.deletion_vectors import VectorFile
from nats_stream_source.delta.driver.delta_log import (
    Action,
    VersionExistsError,
    removal,
    with_vector,
)
from nats_stream_source.delta.driver.live_files import (
    LiveFile,
    LiveFiles,
    positions,
)
from nats_stream_source.delta.driver.merge_on_read.indexed_table import IndexedTable
from nats_stream_source.delta.driver.merge_on_read.key_index import Integers

FILES_PER_CLASS = 10
"""How many files of a class become one."""

SMALL_FILES = 50
"""How many files of the smallest class become one: the files of single commits."""

_SMALL_BYTES = 1 << 20  # below: the smallest class
_MOST_FILES = 500  # of one compaction; bounds its memory


@dataclass(frozen=True, slots=True)
class _Source:
    """A file that is compacted.

    Attributes:
        file: its state at the begin.
        rows: its live rows then.
        start: the position of the first of them in the new file.
        kept: all its rows, if they are in memory.
    """

    number: int
    file: LiveFile
    rows: Integers
    start: int
    kept: pa.Table | None


@dataclass(frozen=True, slots=True)
class _Moves:
    """The rows of the new file in the index.

    Attributes:
        slots: of rows that were in the sources after the begin.
        numbers: the source of each.
        positions: where each is in the new file.
    """

    slots: Integers
    numbers: NDArray[np.int32]
    positions: Integers


def select_files(files: LiveFiles, target_bytes: int, small_files: int) -> list[int]:
    """The numbers of the files to compact next; empty if compaction is not due.

    Args:
        target_bytes: files of half this size or more are not joined with others.
        small_files: how many files more than one a class may have, if that is less than usual.
    """
    classes: dict[tuple[object, int], list[int]] = defaultdict(list)
    for number, file in files.items():
        if 2 * file.live_rows < file.rows and file.add["size"] >= _SMALL_BYTES:
            return [number]
        if 2 * file.live_bytes < target_bytes:
            partition = tuple(sorted(file.add["partitionValues"].items()))
            classes[partition, _size_class(file.live_bytes)].append(number)
    due = [
        numbers
        for (_, size), numbers in classes.items()
        if len(numbers) > min(small_files, (FILES_PER_CLASS if size else SMALL_FILES) - 1)
    ]
    return max(due, key=len, default=[])[:_MOST_FILES]


def _size_class(size: int) -> int:
    return 0 if size < _SMALL_BYTES else len(str(size // _SMALL_BYTES))


def compact(table: IndexedTable, numbers: Sequence[int]) -> None:
    """Replace files by one file with their live rows.

    A file that is removed meanwhile no longer has live rows, or another writer has moved them: all
    its rows are removed rows of the new file.

    Raises:
        TableConflictError: other writers committed during each attempt.
        TableChangedError: the table must be opened again.
    """
    with table.lock:
        files = [
            (number, file, table.kept_rows(file.add))
            for number, file in ((number, table.files[number]) for number in numbers)
        ]
    sources, count = [], 0
    for number, file, kept in files:
        sources.append(_Source(number, file, file.live_positions(), count, kept))
        count += file.live_rows
    values = sources[0].file.add["partitionValues"]
    add = None
    if count:
        rows = pa.concat_tables([_live_rows(table, source) for source in sources])
        add = write_data_file(table.objects, rows, values, data_change=False)
        del rows
    moves = _moves(table, sources)

    def commit() -> None:
        with table.lock:
            table.refresh()
            _commit(table, sources, moves, add, count)

    retry_conflicts(commit, table.name, (VersionExistsError,))


def _live_rows(table: IndexedTable, source: _Source) -> pa.Table:
    names = [name for name in table.schema.names if name not in table.partition_columns]
    if source.kept is not None:
        rows = source.kept.select(names)
    else:
        rows = read_data_file(table.objects, source.file.add, names, table.schema)
    return rows if len(source.rows) == len(rows) else rows.take(pa.array(source.rows))


def _moves(table: IndexedTable, sources: Sequence[_Source]) -> _Moves:
    """The rows of the sources; merges beside this can only take rows out of them."""
    index = table.index
    slots, numbers = index.in_files([source.number for source in sources])
    rows, at = index.row[slots], np.empty(len(slots), np.int64)
    for source in sources:
        of_source = numbers == source.number
        at[of_source] = np.searchsorted(source.rows, rows[of_source]) + source.start
    return _Moves(slots, numbers, at)


def _commit(
    table: IndexedTable, sources: Sequence[_Source], moves: _Moves, add: Action | None, rows: int
) -> None:
    removed = []
    present = [source for source in sources if source.number in table.files]
    for source in sources:
        since = source.rows
        if source.number in table.files:
            since = positions(table.files[source.number].vector - source.file.vector)
        removed.append(np.searchsorted(source.rows, since) + source.start)
    vector = BitMap64(np.concatenate(removed))
    actions = [removal(table.files[s.number].add, data_change=False) for s in present]
    new = None
    if add is not None and len(vector) < rows:
        if vector:
            vectors = VectorFile()
            add = with_vector(add, vectors.add(vector), rows, data_change=False)
            table.objects.put(vectors.name, vectors.content())
        new = LiveFile(add, rows, vector)
        actions.append({"add": add})

    def update() -> None:
        if new is not None:
            number = table.files.add(new)
            still = table.index.file[moves.slots] == moves.numbers
            slots = moves.slots[still]
            table.index.file[slots], table.index.row[slots] = number, moves.positions[still]

    table.commit("OPTIMIZE", actions, [(source.number, None) for source in present], update)
