"""One version of a table in the driver's memory: its live files, and the row of each key.

:class:`Snapshot` is built from the log, and its index from the key and order columns of the data
files, so a restart needs only the table. It changes with each own commit, and
:meth:`Snapshot.refresh` applies the commits of other writers: files that were added, removed or got
another vector change the index.
Another schema, protocol or set of properties, and a table that was deleted and created again, raise
:class:`TableChangedError`, and the table must be opened again.

**Replaced commits.** Not each writer puts an entry of the log only if it does not exist: Delta Lake
looks before it writes, on S3 and on local disks. Its commit can replace one of this process, whose
files the log then lacks. Therefore the identities of the last commits are compared before each
change, and a difference is an error.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pyarrow as pa
from pyroaring import BitMap64

from nats_stream_source.delta.driver.data_files import (
    LARGEST_FILE,
    LiveFile,
    RowCache,
    file_rows,
    positions,
    read_data_file,
    removed_rows,
)
from nats_stream_source.delta.driver.index import BYTES_PER_KEY, NO_FILE, RowIndex
from nats_stream_source.delta.driver.log import (
    Action,
    Commit,
    DeltaLog,
    LogState,
    VectorFile,
    file_id,
    with_vector,
)
from nats_stream_source.delta.driver.storage import TableStorage, schema_of
from nats_stream_source.delta.refused import DELETION_VECTORS, path_outside
from nats_stream_source.delta.rules.layout import Layout, layout_of
from nats_stream_source.delta.rules.rows import Integers
from nats_stream_source.delta.tables import EngineRefusedError, TableChangedError
from nats_stream_source.errors import TableError
from nats_stream_source.logs import field_logger

_LARGE = 1_000_000  # rows; building the index of such a table is logged
_CHECKPOINT = 100  # commits, where the table does not have the property
_PROGRESS_INTERVAL = 2.0  # seconds
_VERIFIED = 32  # commits that are compared with the log before each change

_log = field_logger(__name__)

Replaced = list[tuple[int, "LiveFile | None"]]
"""Files by number, with another vector or removed."""


class Snapshot:
    """See the module. A thread that calls a method holds ``lock``.

    It is also the :class:`~nats_stream_source.delta.rules.rows.Reader` of its version.

    Attributes:
        stored_schema: the columns, all of them nullable, as in data files and in memory.
        files: the live data files by number.
        layout: of the table; None if this package did not create it.
        vectors: whether removed rows are written as deletion vectors.
        cache: the rows of some files, with the table's columns.
        transactions: the ``version`` of each ``txn`` by its id, without those of own commits.

    Raises:
        DamagedLogError, OSError: a file is missing or damaged, or the store failed.
    """

    def __init__(self, storage: TableStorage, state: LogState) -> None:
        self._storage = storage
        self.lock = threading.RLock()
        self.objects = storage.objects()
        self.log = DeltaLog(self.objects)
        self.name = storage.name
        self.schema = schema_of(state)
        self.stored_schema = pa.schema([field.with_nullable(True) for field in self.schema])
        self.properties: Mapping[str, str] = state.properties
        self.layout: Layout | None = layout_of(self.properties, self.schema)
        self.table_id: str = state.metadata["id"]
        self.partition_columns = tuple(state.metadata["partitionColumns"])
        self.stored_columns = [n for n in self.schema.names if n not in self.partition_columns]
        self.vectors = self.properties.get(DELETION_VECTORS) == "true"
        self.checkpoint_commits = int(self.properties.get("delta.checkpointInterval", _CHECKPOINT))
        self.transactions = state.transactions
        self.files: dict[int, LiveFile] = {}
        self._numbers = itertools.count()
        self._index: RowIndex | None = None
        self.cache = RowCache()
        self._broken = False
        self._identities: dict[int, object] = {}
        self._at(state.version)
        for add in state.files.values():
            self._add_file(add)

    @property
    def indexed(self) -> bool:
        """Whether the snapshot has the index."""
        return self._index is not None

    @property
    def index(self) -> RowIndex:
        """The row of each key."""
        assert self._index is not None
        return self._index

    # -- rows -----------------------------------------------------------------------------------

    def find(self, keys: pa.Table) -> Integers:
        """See :class:`nats_stream_source.delta.rules.rows.Reader`."""
        return self.index.find(keys)

    def of_keys(self, keys: pa.Table) -> Integers:
        """See :class:`nats_stream_source.delta.rules.rows.Reader`."""
        return self.index.of_keys(keys)

    def read(self, slots: Integers, columns: Sequence[str]) -> pa.Table:
        """See :class:`nats_stream_source.delta.rules.rows.Reader`."""
        if self.index.has_columns(columns):
            return self.index.read_order(slots, columns)
        schema = pa.schema([self.stored_schema.field(name) for name in columns])
        files = np.full(len(slots), NO_FILE, np.int32)
        files[slots >= 0] = self.index.file[slots[slots >= 0]]
        parts, order = [schema.empty_table()], [np.empty(0, np.int64)]
        group: list[tuple[pa.Table, Integers]] = []  # rows, and the positions of those to take
        size = 0
        for number in np.unique(files):
            which = np.flatnonzero(files == number)
            if number == NO_FILE:
                nulls = [pa.nulls(len(which), field.type) for field in schema]
                group.append((pa.table(nulls, schema=schema), np.arange(len(which))))
            else:
                add, at = self.files[number].add, self.index.row[slots[which]]
                group.append((self._rows_in(add, columns), at.astype(np.int64)))
                size += add["size"]
            order.append(which)
            if size >= LARGEST_FILE:
                parts.append(_taken(group))
                group, size = [], 0
        parts += [_taken(group)] if group else []
        return pa.concat_tables(parts).take(pa.array(np.argsort(np.concatenate(order))))

    def rows_at(self, file: LiveFile, at: Integers, columns: Sequence[str]) -> pa.Table:
        """Columns of the rows of a data file at ascending positions; also without ``lock``."""
        kept = self.cache.get(file.add["path"])
        if kept is not None:
            rows = kept.select(list(columns))
        else:
            rows = read_data_file(self.objects, file.add, columns, self.stored_schema)
        return rows if len(at) == len(rows) else rows.take(pa.array(at))

    def _rows_in(self, add: Action, columns: Sequence[str]) -> pa.Table:
        rows = self.cache.get(add["path"])
        if rows is None:
            if not self.index.several or add["size"] > LARGEST_FILE:
                return read_data_file(self.objects, add, columns, self.stored_schema)
            rows = read_data_file(self.objects, add, self.schema.names, self.stored_schema)
            self.cache.put(add, rows)
        return rows.select(list(columns))

    # -- the newest version ---------------------------------------------------------------------

    def refresh(self) -> None:
        """Apply the commits of other writers.

        Raises:
            TableChangedError: the table must be opened again.
            EngineRefusedError: a data file is outside of the table.
        """
        if self._broken:
            raise TableChangedError("a change of the table failed midway")
        self._verify_commits()
        for commit in self.log.commits_after(self.version):
            with self._whole():
                self._apply(commit)

    def _verify_commits(self) -> None:
        """Raise if an entry of the log is not the one that this process has put or read."""
        now = self.log.identities(self._identities)
        # An entry that is missing has expired, unless it is that of the newest version.
        changed = [one for one, known in self._identities.items() if now.get(one, known) != known]
        if self.version in now and not changed:
            return
        if self.version not in now or self._storage.read_existing().metadata["id"] != self.table_id:
            raise TableChangedError("the table was deleted and created again")
        raise TableError(
            f"could not change table {self.name!r}: another writer has replaced its version "
            f"{changed[0]}, and the rows of the former one are lost (Delta Lake's own commits can "
            f"do so, on S3 and on local disks); restore version {changed[0]} of the table, and "
            f"replay the rows since then"
        )

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """If a change of the state fails midway, the table must be opened again."""
        self._broken = True
        yield
        self._broken = False

    def _apply(self, commit: Commit) -> None:
        if any("metaData" in action or "protocol" in action for action in commit.actions):
            raise TableChangedError("the table's schema, protocol or properties changed")
        added = (action["add"]["path"] for action in commit.actions if "add" in action)
        if (problem := path_outside(added)) is not None:  # by RESTORE of a shallow clone
            raise EngineRefusedError(problem)
        before = {file_id(file.add): number for number, file in self.files.items()}
        after = LogState(files={one: self.files[number].add for one, number in before.items()})
        after.apply(commit)
        self.transactions |= after.transactions
        removed = {one[0]: number for one, number in before.items() if one not in after.files}
        new = [add for identity, add in after.files.items() if identity not in before]
        # Rows leave the index before others enter it, since a key can move from file to file.
        gone, returned = {}, []
        for add in new:
            number = removed.get(add["path"])
            if number is not None:
                file = self.files[number]
                vector = removed_rows(self.objects, add, file.rows)
            if number is None or file.vector - vector:  # rows came back (RESTORE)
                returned.append(add)
                continue
            del removed[add["path"]]
            gone[number] = vector - file.vector
            self.replace(number, LiveFile(add, file.rows, vector))
        self._forget(gone, list(removed.values()))
        for number in removed.values():
            self.replace(number, None)
        for add in returned:
            self._add_file(add)
        self._at(commit.version)

    def _forget(self, gone: Mapping[int, BitMap64], removed: Sequence[int]) -> None:
        """Take the rows of files, and all rows of removed files, out of the index."""
        if self._index is None:
            return
        slots, numbers = self._index.in_files([*gone, *removed])
        out = np.isin(numbers, np.array(removed, np.int32))
        rows = self._index.row[slots]
        for number, vector in gone.items():
            of_file = numbers == number
            out[of_file] = np.isin(rows[of_file], positions(vector))
        self._index.file[slots[out]] = NO_FILE

    def _at(self, version: int) -> None:
        self.version = version
        self._identities |= self.log.identities([version])
        for old in list(self._identities)[:-_VERIFIED]:
            del self._identities[old]

    def _add_file(self, add: Action) -> None:
        """Add a data file, and its live rows to the index."""
        rows = file_rows(self.objects, add)
        number = self.add(LiveFile(add, rows, removed_rows(self.objects, add, rows)))
        if self._index is not None:
            self._index_file(self._index, number)

    # -- the index ------------------------------------------------------------------------------

    def build_index(self, limit: int | None) -> None:
        """Build the index, without which no rows are changed.

        Raises:
            EngineRefusedError: the index exceeds its limit.
            ConfigurationError: two rows have one key.
        """
        assert self.layout is not None
        rows = sum(file.live_rows for file in self.files.values())
        begin = logged = time.monotonic()
        _require_within(limit, rows * BYTES_PER_KEY)
        if rows >= _LARGE:
            _log.info(
                "building the index of keys", table=self.name, rows=rows, files=len(self.files)
            )
        index = RowIndex(self.name, self.schema, self.layout)
        for number in self.files:
            self._index_file(index, number)
            if rows >= _LARGE and time.monotonic() - logged > _PROGRESS_INTERVAL:
                logged = time.monotonic()
                _log.info(
                    "building the index of keys", table=self.name, indexed=len(index), of=rows
                )
        if rows >= _LARGE:
            _log.info(
                "built the index of keys",
                table=self.name,
                keys=len(index),
                bytes=index.nbytes,
                seconds=round(time.monotonic() - begin, 1),
            )
        _require_within(limit, index.nbytes)
        self._index = index

    def _index_file(self, index: RowIndex, number: int) -> None:
        file = self.files[number]
        rows = read_data_file(self.objects, file.add, index.columns, self.stored_schema)
        index.add_file(number, rows, file.live_positions())

    # -- own commits ----------------------------------------------------------------------------

    def with_vectors(
        self, files: Iterable[LiveFile], *, data_change: bool
    ) -> list[LiveFile | None]:
        """Write an object with the vectors of files, which their ``add`` then names.

        Returns:
            None for a file without a live row.
        """
        vectors, written = VectorFile(), list[LiveFile | None]()
        for file in files:
            if not file.live_rows:
                written.append(None)
                continue
            if file.vector:
                vector = vectors.add(file.vector)
                add = with_vector(file.add, vector, file.rows, data_change=data_change)
                file = replace(file, add=add)
            written.append(file)
        if content := vectors.content():
            self.objects.put(vectors.name, content)
        return written

    def commit(
        self,
        operation: str,
        actions: Iterable[Action],
        replaced: Replaced,
        update: Callable[[], None],
    ) -> None:
        """Put the log's next entry, then apply it.

        Args:
            replaced: the files that the actions replace or remove.
            update: adds the files that they add, and changes the index.

        Raises:
            VersionExistsError: another writer has committed since :meth:`refresh`.
        """
        self.log.put(self.version + 1, operation, actions)
        with self._whole():
            self._at(self.version + 1)
            for number, file in replaced:
                self.replace(number, file)
            update()

    def add(self, file: LiveFile) -> int:
        """Add a live file; returns its number, which is used once."""
        number = next(self._numbers)
        self.files[number] = file
        return number

    def replace(self, number: int, file: LiveFile | None) -> None:
        """Give a file another vector, or remove it."""
        if file is not None:
            self.files[number] = file
        else:
            self.cache.drop(self.files.pop(number).add["path"])


def _require_within(limit: int | None, size: int) -> None:
    if limit is not None and size > limit:
        raise EngineRefusedError(f"index_bytes is {size:,}, limit {limit:,}")


def _taken(group: Sequence[tuple[pa.Table, Integers]]) -> pa.Table:
    """Rows of tables at positions: one ``take`` is faster than one of each by a factor of six."""
    starts = np.cumsum([0, *(len(rows) for rows, _ in group[:-1])])
    positions = [at + start for (_, at), start in zip(group, starts, strict=True)]
    return pa.concat_tables([rows for rows, _ in group]).take(pa.array(np.concatenate(positions)))
