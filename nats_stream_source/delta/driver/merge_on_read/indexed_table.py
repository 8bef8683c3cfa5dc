"""One version of a table in the driver's memory: its live files, and the row of each key.

:class:`IndexedTable` is built from the log and the key and order columns of the data files, so a
restart needs only the table. It changes with each own commit, and :meth:`IndexedTable.refresh`
applies the commits of other writers: files that were added, removed or got another vector change
the index. Another schema, protocol or set of properties, and a table that was deleted and created
again, raise :class:`TableChangedError`, and the table must be opened again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable
from pyroaring import BitMap64

from nats_stream_source.delta.cdc.layout import Layout
from nats_stream_source.delta.driver.data_files import (
    read_data_file,
    removed_rows,
)
from nats_stream_source.delta.driver.deletion_vectors import VectorFile
from nats_stream_source.delta.driver.delta_log import (
    Action,
    Commit,
    DeltaLog,
    apply,
    live_rows,
    removal,
    with_vector,
)
from nats_stream_source.delta.driver.live_files import (
    LiveFile,
    LiveFiles,
    positions,
)
from nats_stream_source.delta.driver.merge_on_read.key_index import Integers
from nats_stream_source.delta.driver.merge_on_read.row_cache import LARGEST_FILE, RowCache
from nats_stream_source.delta.driver.merge_on_read.row_index import (
    BYTES_PER_KEY,
    NO_FILE,
    Found,
    RowIndex,
)
from nats_stream_source.delta.driver.objects import TableObjects
from nats_stream_source.delta.driver.storage import schema_of
from nats_stream_source.delta.limits import LimitCheck
from nats_stream_source.delta.table import TableChangedError
from nats_stream_source.logs import field_logger

_LARGE = 1_000_000  # rows; building the index of such a table is logged
_CHECKPOINT = 100  # commits, where the table does not have the property
_PROGRESS_INTERVAL = 2.0  # seconds

_log = field_logger(__name__)

Replaced = list[tuple[int, "LiveFile | None"]]
"""Files by number, with another vector or removed."""


class IndexedTable:
    """See the module. A thread that calls a method holds ``lock``.

    Args:
        objects: of the table's directory.
        target: the version to begin with.
        name: path or URI as the user gave it, for errors.
        limits: of the index.

    Raises:
        EngineRefusedError: the index exceeds its limit.
        ConfigurationError: two rows have one key.
        DamagedLogError, VectorError, OSError: a file is missing or damaged, or the store failed.
    """

    def __init__(
        self,
        objects: TableObjects,
        target: DeltaTable,
        name: str,
        limits: LimitCheck,
    ) -> None:
        self.lock = threading.RLock()
        self.objects = objects
        self.log = DeltaLog(objects)
        self.name = name
        self.schema = pa.schema(target.schema().to_arrow())
        self.table_id = str(target.metadata().id)
        self.layout = Layout.of(target.metadata().configuration)
        self.index = RowIndex(name, self.schema, self.layout)
        self._cache = RowCache()
        self.spark_schema = schema_of(target)
        self.partition_columns = tuple(target.metadata().partition_columns)
        properties = target.metadata().configuration
        self.checkpoint_commits = int(properties.get("delta.checkpointInterval", _CHECKPOINT))
        self.version = target.version()
        self._broken = False
        self.files = LiveFiles()
        self._identity = self.log.identity(self.version)
        self._build(limits)

    # -- rows -----------------------------------------------------------------------------------

    def rows_of(self, keys: pa.Table, columns: Sequence[str]) -> pa.Table:
        """Columns of the rows of these keys, in a table with a layout."""
        return self.read_rows(self.index.of_keys(keys), columns)

    def read_rows(self, slots: Integers, columns: Sequence[str]) -> pa.Table:
        """Columns of the rows of these slots; nulls for the slot -1."""
        schema = pa.schema([self.schema.field(name) for name in columns])
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

    def _rows_in(self, add: Action, columns: Sequence[str]) -> pa.Table:
        """Columns of all rows of a data file."""
        rows = self._cache.get(add["path"])
        if rows is None:
            if not self.index.several or add["size"] > LARGEST_FILE:
                return read_data_file(self.objects, add, columns, self.schema)
            rows = read_data_file(self.objects, add, self.schema.names, self.schema)
            self._cache.put(add["path"], rows)
        return rows.select(list(columns))

    def kept_rows(self, add: Action) -> pa.Table | None:
        """All rows of a data file, removed ones included; None if they are not in memory."""
        return self._cache.get(add["path"])

    # -- the newest version ---------------------------------------------------------------------

    def refresh(self) -> None:
        """Apply the commits of other writers.

        Raises:
            TableChangedError: the table must be opened again.
        """
        if self._broken:
            raise TableChangedError("a change of the table failed midway")
        if self.log.identity(self.version) != self._identity:
            raise TableChangedError("the table was deleted and created again")
        for commit in self.log.commits_after(self.version):
            with self._whole():
                self._apply(commit)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """If a change of the state fails midway, the table must be opened again."""
        self._broken = True
        yield
        self._broken = False

    def _apply(self, commit: Commit) -> None:
        if any("metaData" in action or "protocol" in action for action in commit.actions):
            raise TableChangedError("the table's schema, protocol or properties changed")
        before = self.files.identities()
        files = {identity: self.files[number].add for identity, number in before.items()}
        apply(files, commit.actions)
        removed = {path: number for (path, v), number in before.items() if (path, v) not in files}
        new = [add for identity, add in files.items() if identity not in before]
        # Rows leave the index before others enter it, since a key can move from file to file.
        returned = []
        for add in new:
            number = removed.pop(add["path"], None)
            if number is None or not self._remove_rows(number, add):
                returned.append(add)
        for number in removed.values():
            self._drop(number)
        for add in returned:
            self._add_file(add)
        self._at(commit.version)

    def _remove_rows(self, number: int, add: Action) -> bool:
        """Apply another vector of a file; false, and drop the file, if rows came back (RESTORE)."""
        file = self.files[number]
        vector = removed_rows(self.objects, add, file.rows)
        if file.vector - vector:
            self._drop(number)
            return False
        rows = positions(vector - file.vector)
        slots = self.index.in_file(number)
        self.index.file[slots[np.isin(self.index.row[slots], rows)]] = NO_FILE
        self.files.replace(number, LiveFile(add, file.rows, vector))
        return True

    def _drop(self, number: int) -> None:
        self._replace(number, None)
        self.index.file[self.index.in_file(number)] = NO_FILE

    def _at(self, version: int) -> None:
        self.version = version
        self._identity = self.log.identity(version)

    def _build(self, limits: LimitCheck) -> None:
        adds = list(self.log.files(self.version).values())
        rows = sum(live_rows(add) for add in adds)
        limits.validate("index_bytes", rows * BYTES_PER_KEY)
        begin = logged = time.monotonic()
        if rows >= _LARGE:
            _log.info("building the index of keys", table=self.name, rows=rows, files=len(adds))
        for add in adds:
            self._add_file(add)
            if time.monotonic() - logged > _PROGRESS_INTERVAL:
                logged = time.monotonic()
                _log.info(
                    "building the index of keys", table=self.name, indexed=len(self.index), of=rows
                )
        if rows >= _LARGE:
            seconds = round(time.monotonic() - begin, 1)
            keys, size = len(self.index), self.index.nbytes
            _log.info(
                "built the index of keys", table=self.name, keys=keys, bytes=size, seconds=seconds
            )
        limits.validate("index_bytes", self.index.nbytes)

    def _add_file(self, add: Action) -> None:
        """Add the live rows of a data file to the index."""
        rows = read_data_file(self.objects, add, self.index.columns, self.schema)
        file = LiveFile(add, rows.num_rows, removed_rows(self.objects, add, rows.num_rows))
        self.index.add_file(self.files.add(file), rows, file.live_positions())

    def add_written(self, file: LiveFile, rows: pa.Table, found: Found) -> None:
        """Add a file that a commit has written.

        Args:
            rows: its rows, with the table's columns.
            found: their identities.
        """
        if file.add["size"] <= LARGEST_FILE:
            self._cache.put(file.add["path"], rows)
        self.index.add(self.files.add(file), rows, np.arange(file.rows), found)

    # -- own commits ----------------------------------------------------------------------------

    def removals(
        self, rows: Iterable[tuple[int, BitMap64]], *, data_change: bool
    ) -> tuple[list[Action], Replaced]:
        """The actions that remove rows of files, by number, and the files as they are then.

        Writes the object with the new vectors.
        """
        actions: list[Action] = []
        replaced: Replaced = []
        vectors = VectorFile()
        for number, removed in rows:
            file = self.files[number]
            vector = file.vector | removed
            actions.append(removal(file.add, data_change=data_change))
            if len(vector) == file.rows:
                replaced.append((number, None))
                continue
            add = with_vector(file.add, vectors.add(vector), file.rows, data_change=data_change)
            actions.append({"add": add})
            replaced.append((number, LiveFile(add, file.rows, vector)))
        if content := vectors.content():
            self.objects.put(vectors.name, content)
        return actions, replaced

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
                self._replace(number, file)
            update()

    def _replace(self, number: int, file: LiveFile | None) -> None:
        """Give a file another vector, or remove it."""
        if file is None:
            self._cache.drop(self.files[number].add["path"])
        self.files.replace(number, file)


def _taken(group: Sequence[tuple[pa.Table, Integers]]) -> pa.Table:
    """Rows of tables at positions: one ``take`` is faster than one of each by a factor of six."""
    starts = np.cumsum([0, *(len(rows) for rows, _ in group[:-1])])
    positions = [at + start for (_, at), start in zip(group, starts, strict=True)]
    return pa.concat_tables([rows for rows, _ in group]).take(pa.array(np.concatenate(positions)))
