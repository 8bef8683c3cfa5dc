"""Compaction of a table with deletion vectors: fewer files, and no removed rows in them.

**Which files.** The files of a partition are in classes of size, each ten times as large as the
one below. Once a class has enough files, their live rows become one file, which is usually of the
class above; therefore a row is written about once for each class. A file whose rows are mostly
removed is written alone. Files of the target size stay.

**Beside the merges.** The files are read and the new file is written without the table's lock. The
commit then gives the new file a vector of the rows that were replaced meanwhile. It changes no data
(``dataChange`` is false). The index is changed row by row, not built again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
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
    """A file that is compacted: its state at the begin, and its live rows then."""

    number: int
    file: LiveFile
    rows: Integers


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
        files = [(number, table.files[number]) for number in numbers]
    sources = [_Source(number, file, file.live_positions()) for number, file in files]
    names = [name for name in table.schema.names if name not in table.partition_columns]
    parts = [
        read_data_file(table.objects, source.file.add, names, table.schema).take(
            pa.array(source.rows)
        )
        for source in sources
    ]
    rows = pa.concat_tables(parts)
    values = sources[0].file.add["partitionValues"]
    add = write_data_file(table.objects, rows, values, data_change=False) if len(rows) else None

    def commit() -> None:
        with table.lock:
            table.refresh()
            _commit(table, sources, add, len(rows))

    retry_conflicts(commit, table.name, (VersionExistsError,))


def _commit(table: IndexedTable, sources: Sequence[_Source], add: Action | None, rows: int) -> None:
    start, removed, moves = 0, [], []
    present = [source for source in sources if source.number in table.files]
    for source in sources:
        since = source.rows
        if source.number in table.files:
            since = positions(table.files[source.number].vector - source.file.vector)
        removed.append(np.searchsorted(source.rows, since) + start)
        slots = table.index.in_file(source.number)
        moves.append((slots, np.searchsorted(source.rows, table.index.row[slots]) + start))
        start += len(source.rows)
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
            for slots, at in moves:
                table.index.file[slots], table.index.row[slots] = number, at

    table.commit("OPTIMIZE", actions, [(source.number, None) for source in present], update)
