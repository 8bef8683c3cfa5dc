"""Merges into Delta tables by deletion vectors: a commit writes only the rows that changed.

**A commit.** 1. Look up the keys of the entries in the index, and select the entries that are
newer than their rows. 2. Write the new rows into one data file (one for each partition). 3. Add the
positions of the old rows to the deletion vector of each data file that has one of them, all vectors
of the commit in one object. 4. Put the log's next entry, which must not exist: ``remove`` (path,
old vector) and ``add`` (path, new vector) for each file with a removed row, and ``add`` for the new
ones. A process that ends before step 4 leaves objects that no version names; after it, the version
is complete.

**Other writers.** Each attempt begins with the commits that follow the known version. If another
writer takes the next version first, the merge begins again with its commit, bounded by
:mod:`nats_stream_source.delta.conflicts`.

**A repeated batch** has no entry that is newer than its row, and makes no version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from pyroaring import BitMap64
from pyspark.sql import DataFrame
from pyspark.sql.types import StructField, StructType

from nats_stream_source.delta.cdc.bucket_history import open_row_columns, open_rows
from nats_stream_source.delta.cdc.changes import Reader, RowChanges
from nats_stream_source.delta.cdc.columns import with_new_columns
from nats_stream_source.delta.cdc.layout import Layout
from nats_stream_source.delta.conflicts import retry_conflicts
from nats_stream_source.delta.driver.collect import collect_entries, entries_to_merge
from nats_stream_source.delta.driver.data_files import (
    partitions,
    stored_column,
    write_data_file,
)
from nats_stream_source.delta.driver.delta_log import VersionExistsError
from nats_stream_source.delta.driver.features import rewriting_problem
from nats_stream_source.delta.driver.live_files import LiveFile
from nats_stream_source.delta.driver.merge_on_read.indexed_table import IndexedTable
from nats_stream_source.delta.driver.merge_on_read.key_index import Integers
from nats_stream_source.delta.driver.merge_on_read.opened_table import OpenedTable
from nats_stream_source.delta.driver.merge_on_read.row_index import (
    NO_FILE,
    Found,
    order_values_nulls_first,
)
from nats_stream_source.delta.driver.merge_on_read.upkeep import delete_expired_vectors
from nats_stream_source.delta.driver.new_columns import add_columns
from nats_stream_source.delta.driver.storage import schema_of
from nats_stream_source.delta.driver.upkeep import maintain_by_delta_rs
from nats_stream_source.delta.limits import LimitCheck
from nats_stream_source.delta.merge_result import MergeResult, newest_created
from nats_stream_source.delta.newest import ORDER_COLUMNS
from nats_stream_source.delta.table import (
    DELETED_COLUMN,
    MARK_COLUMNS,
    Deletes,
    EngineRefusedError,
    key_columns,
)
from nats_stream_source.delta.upkeep import MaintenanceResult, Upkeep

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Changes:
    """The changes of a commit.

    Attributes:
        rows: the rows to write, with the table's columns.
        found: their identities in the index.
        slots: the slot of the row that each of them replaces, -1 for none.
        removed: the slots of the rows that are removed and not written again.
        newest: ``created`` of the newest entry that makes a change.
        state_only: see :attr:`nats_stream_source.delta.cdc.changes.RowChanges.state_only`.
    """

    rows: pa.Table
    found: Found
    slots: Integers
    removed: Integers
    newest: datetime | None = None
    contradictions: int = 0
    state_only: bool = False

    def __len__(self) -> int:
        return len(self.slots) + len(self.removed)

    def result(self) -> MergeResult:
        inserted = int((self.slots < 0).sum())
        return MergeResult(
            "merge-on-read",
            inserted,
            len(self.slots) - inserted,
            len(self.removed),
            newest=self.newest,
            changed_bytes=self.rows.nbytes,
            contradictions=self.contradictions,
        )


class MergeOnReadTable:
    """A table that deletion vectors change.

    Args:
        opened: keeps the table and its index from batch to batch.
        target: the newest version; None if ``opened`` has the table.
        limits: of this change.
    """

    def __init__(self, opened: OpenedTable, target: DeltaTable | None, limits: LimitCheck) -> None:
        self._opened = opened
        self._target = target
        self._limits = limits

    @property
    def layout(self) -> Layout | None:
        """See :class:`nats_stream_source.delta.cdc.tables.LayoutTable`."""
        if self._opened.table is not None:
            return self._opened.table.layout
        assert self._target is not None
        return Layout.of(self._target.metadata().configuration)

    @property
    def table_id(self) -> str:
        """See :class:`nats_stream_source.delta.cdc.tables.LayoutTable`."""
        if self._opened.table is not None:
            return self._opened.table.table_id
        assert self._target is not None
        return str(self._target.metadata().id)

    @property
    def schema(self) -> StructType:
        """The table's columns."""
        if self._opened.table is not None:
            return self._opened.table.spark_schema
        assert self._target is not None
        return schema_of(self._target)

    def merge(self, batch: DataFrame, deletes: Deletes, upkeep: Upkeep | None) -> MergeResult:
        """See :class:`nats_stream_source.delta.table.Table`."""
        name, collector = self._opened.storage.name, self._opened.collector
        newest, _ = collect_entries(batch, self, name, deletes, collector, self._limits)
        result = self._opened.result(self.merge_entries(newest, deletes))
        if result.changed:
            self._opened.after_commit(upkeep)
        return result

    def merge_entries(self, entries: pa.Table, deletes: Deletes) -> MergeResult:
        """Merge the newest entry of each key; returns what has changed.

        Args:
            entries: one per key, without the columns of the delivery.
        """
        entries = entries_to_merge(entries, key_columns(self.schema.names), deletes)

        def select(table: IndexedTable) -> _Changes:
            found = table.index.find(entries)
            slots = table.index.with_rows(found.slots)
            newer = table.index.newer(entries, slots)
            put = np.ones(len(slots), bool)
            if deletes == "remove":
                put = pc.equal(entries["operation"], "PUT").to_numpy()
            written = np.flatnonzero(newer & put)
            removes = newer & ~put & (slots >= 0)
            rows = _rows_of(table, entries.take(pa.array(written)), slots[written])
            newest = newest_created(entries.filter(pa.array((newer & put) | removes)))
            return _Changes(rows, found.take(written), slots[written], slots[removes], newest)

        return self._change("merge the batch into", select).result()

    def add_columns(self, columns: Sequence[StructField]) -> None:
        """See :class:`nats_stream_source.delta.cdc.tables.LayoutTable`."""
        own, storage = self.schema, self._opened.storage
        new = with_new_columns(storage.name, own, columns)
        if new is not own:
            # The index is built again: the kept rows have the former columns.
            self._opened.close()
            self._target = add_columns(storage, columns, new)

    def is_empty(self) -> bool:
        """See :class:`nats_stream_source.delta.cdc.tables.LayoutTable`."""

        def count(table: IndexedTable) -> bool:
            with table.lock:
                table.refresh()
                return not len(table.index.live())

        return self._run("read", count)

    def read_rows(self, keys: pa.Table, columns: Sequence[str]) -> pa.Table:
        """See :class:`nats_stream_source.delta.cdc.tables.RowTable`."""

        def read(table: IndexedTable) -> pa.Table:
            with table.lock:
                table.refresh()
                return table.rows_of(keys, columns)

        return self._run("read", read)

    def change_rows(
        self, select: Callable[[Reader], RowChanges], upkeep: Upkeep | None
    ) -> MergeResult:
        """See :class:`nats_stream_source.delta.cdc.tables.RowTable`."""

        def changes_of(table: IndexedTable) -> _Changes:
            changes = select(table.rows_of)
            index = table.index
            found = index.find(changes.upserts)
            slots = index.with_rows(found.slots)
            removed = index.with_rows(index.find(changes.removed).slots)
            rows = _rows_of(table, changes.upserts, slots)
            return _Changes(
                rows,
                found,
                slots,
                removed[removed >= 0],
                newest_created(changes.upserts),
                changes.contradictions,
                changes.state_only,
            )

        changes = self._change("merge the batch into", changes_of)
        result = self._opened.result(changes.result())
        if result.changed:
            self._opened.after_commit(upkeep)
        return result

    def rows(self, bucket: str, deletes: Deletes) -> pa.Table:
        """See :class:`nats_stream_source.delta.table.Table`."""
        return self._run("read", lambda table: _bucket_rows(table, bucket, deletes))

    def remove_or_mark(self, missing: pa.Table, bucket: str, deletes: Deletes) -> int:
        """See :class:`nats_stream_source.delta.table.Table`."""
        keys = {"bucket": pa.repeat(bucket, missing.num_rows), "key": missing["key"]}
        expected = pa.table(
            {
                **{name: keys[name] for name in key_columns(self.schema.names)},
                "stream_created": missing["was_created"],
                "revision": missing["was_revision"],
            }
        )

        def select(table: IndexedTable) -> _Changes:
            index, found = table.index, table.index.find(expected)
            slots = index.with_rows(found.slots)
            created, revision = order_values_nulls_first(expected)
            same = slots >= 0
            at = slots[same]
            same[same] = (index.created[at] == created[same]) & (
                index.revision[at] == revision[same]
            )
            none = np.empty(0, np.int64)
            if deletes == "remove":
                return _Changes(table.schema.empty_table(), found.take(none), none, slots[same])
            if same.any():
                marked = table.read_rows(slots[same], [DELETED_COLUMN])[DELETED_COLUMN]
                same[same] = ~pc.fill_null(marked, False).to_numpy()
            marked_at = np.flatnonzero(same)
            which = pa.array(marked_at)
            marks = {
                field.name: missing[field.name].take(which)
                if field.name in MARK_COLUMNS
                else pa.nulls(len(which), field.type)
                for field in table.schema
            }
            marks |= {name: keys[name].take(which) for name in index.keys}
            marks[DELETED_COLUMN] = pa.repeat(True, len(which))
            rows = _rows_of(table, pa.table(marks), slots[marked_at])
            return _Changes(rows, found.take(marked_at), slots[marked_at], none)

        return len(self._change("reconcile", select))

    def maintain(self, upkeep: Upkeep) -> MaintenanceResult:
        """See :class:`nats_stream_source.delta.table.Table`."""
        storage = self._opened.storage
        target = self._target or storage.open_existing()
        if (problem := rewriting_problem(target)) is not None:
            raise EngineRefusedError(problem)
        self._opened.int96_columns.require_known_range(target)
        result = maintain_by_delta_rs(target, upkeep, storage.name)

        def expire() -> int:
            return delete_expired_vectors(storage.open_existing(), storage.objects(), upkeep)

        return replace(result, deleted=result.deleted + storage.named("maintain", expire))

    def _change(self, what: str, select: Callable[[IndexedTable], _Changes]) -> _Changes:
        """Commit the changes that ``select`` returns for the newest version."""

        def attempt(table: IndexedTable) -> _Changes:
            with table.lock:
                table.refresh()
                changes = select(table)
                if len(changes) or changes.state_only:
                    _commit(table, changes)
            return changes

        def work(table: IndexedTable) -> _Changes:
            return retry_conflicts(lambda: attempt(table), table.name, (VersionExistsError,))

        return self._run(what, work)

    def _run(self, what: str, work: Callable[[IndexedTable], _T]) -> _T:
        """The result of ``work``; after a failure the table is opened again by the next change."""
        storage = self._opened.storage
        try:
            return storage.named(what, lambda: work(self._opened.open(self._target, self._limits)))
        except BaseException:
            self._opened.close()
            raise


def _bucket_rows(table: IndexedTable, bucket: str, deletes: Deletes) -> pa.Table:
    with table.lock:
        table.refresh()
        if table.layout is not None:
            names = open_row_columns(table.schema.names)
            return open_rows(table.read_rows(table.index.live(), names), bucket)
        columns = ["key", *ORDER_COLUMNS]
        columns += [name for name in ("bucket",) if name in table.schema.names]
        columns += [DELETED_COLUMN] if deletes == "mark" else []
        rows = table.read_rows(table.index.live(), columns)
    if "bucket" in columns:
        rows = rows.filter(pc.equal(rows["bucket"], bucket))
    if deletes == "mark":
        rows = rows.filter(pc.invert(pc.fill_null(rows[DELETED_COLUMN], False)))
    return rows.select(["key", *ORDER_COLUMNS]).drop_null()


def _rows_of(table: IndexedTable, entries: pa.Table, slots: Integers) -> pa.Table:
    """Entries as rows of the table: a column that entries lack keeps its value in the old row.

    Args:
        slots: of the rows that the entries replace, -1 for none.
    """
    columns = {
        name: stored_column(entries, name, table.schema.field(name).type, table.name)
        for name in entries.column_names
    }
    kept = [name for name in table.schema.names if name not in columns]
    if kept:
        old = table.read_rows(slots, kept)
        columns |= {name: old[name] for name in kept}
    return pa.table([columns[name] for name in table.schema.names], schema=table.schema)


def _commit(table: IndexedTable, changes: _Changes) -> None:
    rows = changes.rows
    stored = rows.drop_columns(list(table.partition_columns))
    written = [
        (write_data_file(table.objects, stored.take(at), values), at)
        for values, at in partitions(rows, table.partition_columns)
        if len(at)
    ]
    old = np.concatenate([changes.slots[changes.slots >= 0], changes.removed])
    numbers, old_rows = table.index.file[old], table.index.row[old]
    removed = (
        (number, BitMap64(old_rows[numbers == number])) for number in np.unique(numbers).tolist()
    )
    actions, replaced = table.removals(removed, data_change=True)
    actions += [{"add": add} for add, _ in written]

    def update() -> None:
        table.index.file[old] = NO_FILE
        for add, at in written:
            table.add_written(
                LiveFile(add, len(at), BitMap64()), rows.take(at), changes.found.take(at.to_numpy())
            )

    table.commit("MERGE", actions, replaced, update)
