"""Merges into Delta tables by delta-rs's MERGE, which rewrites each data file with a changed row.

The session needs neither Delta's jars nor its settings. One MERGE by delta-rs costs milliseconds
where Spark's costs seconds, since it starts no Spark job. Its memory grows with the entries and
with the files of the table that it rewrites.

**A repeated batch.** delta-rs commits nothing if no row changes. A repeated batch therefore makes
no version, and the merge needs no step that selects the changes first.

**Each batch opens the table,** and each further attempt does. A handle that is kept longer does not
notice that the table was deleted and created again under its path, and would commit a version that
does not follow the previous one.

**Crash.** delta-rs writes data files first and then one file of the log. A process that ends before
the latter leaves data files that no version names; vacuum removes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, QueryBuilder
from pyspark.sql import DataFrame
from pyspark.sql.types import StructField, StructType

from nats_stream_source.delta.cdc.bucket_history import open_row_columns, open_rows
from nats_stream_source.delta.cdc.changes import Reader, RowChanges
from nats_stream_source.delta.cdc.columns import with_new_columns
from nats_stream_source.delta.cdc.comparison import positions_in
from nats_stream_source.delta.cdc.layout import Layout
from nats_stream_source.delta.driver.collect import (
    BatchCollector,
    collect_entries,
    entries_to_merge,
)
from nats_stream_source.delta.driver.data_files import stored_column
from nats_stream_source.delta.driver.new_columns import add_columns
from nats_stream_source.delta.driver.storage import TableStorage, file_sizes, schema_of
from nats_stream_source.delta.driver.upkeep import maintain_by_delta_rs, upkeep_after_commit
from nats_stream_source.delta.limits import LimitCheck
from nats_stream_source.delta.merge_result import MergeResult, newest_created
from nats_stream_source.delta.table import (
    DELETED_COLUMN,
    OWN_PREFIX,
    Deletes,
    TableChangedError,
    key_columns,
    mark_values,
    quote,
    verify_table,
)
from nats_stream_source.delta.upkeep import MaintenanceResult, Upkeep

_REMOVED = OWN_PREFIX + "removed"

# Otherwise delta-rs commits after another writer, too, if that has changed the state table only.
_NEXT_VERSION = CommitProperties(max_commit_retries=0)

# A row with a null in its order is older than each entry.
_NEWER = (
    "NOT coalesce(t.stream_created > s.stream_created OR "
    "(t.stream_created = s.stream_created AND t.revision >= s.revision), false)"
)


@dataclass(frozen=True, slots=True)
class _Merged:
    """A merge by delta-rs: the table after it, and what it reports."""

    target: DeltaTable
    version_before: int
    files_before: dict[str, int]
    counts: dict[str, Any]

    def result(self, entries: pa.Table) -> MergeResult:
        files = file_sizes(self.target)
        inserted, updated, deleted = (
            int(self.counts[f"num_target_rows_{one}"]) for one in ("inserted", "updated", "deleted")
        )
        changed = inserted + updated + deleted
        return MergeResult(
            "copy-on-write",
            inserted,
            updated,
            deleted,
            newest=newest_created(entries) if changed else None,
            # delta-rs does not report which of the entries it has written.
            changed_bytes=entries.nbytes if changed else 0,
            written_bytes=sum(
                size for name, size in files.items() if name not in self.files_before
            ),
            files=len(files),
        )


class CopyOnWriteTable:
    """A table that delta-rs changes.

    Args:
        target: the version that the first attempt of the first change uses.
        collector: of the query's batches.
        limits: of this change.
    """

    def __init__(
        self,
        storage: TableStorage,
        target: DeltaTable,
        collector: BatchCollector,
        limits: LimitCheck,
    ) -> None:
        self._storage = storage
        self._collector = collector
        self._found: DeltaTable | None = target
        self._limits = limits
        self.schema = schema_of(target)
        self.table_id = str(target.metadata().id)
        self._properties = dict(target.metadata().configuration)
        limits.validate("table_bytes", sum(file_sizes(target).values()))

    def merge(self, batch: DataFrame, deletes: Deletes, upkeep: Upkeep | None) -> MergeResult:
        """See :class:`nats_stream_source.delta.table.Table`."""
        name, collector = self._storage.name, self._collector
        newest, columns = collect_entries(batch, self, name, deletes, collector, self._limits)
        merged = self.merge_entries(newest, columns, deletes)
        result = merged.result(newest)
        if not upkeep:
            return result
        maintained = upkeep_after_commit(merged.target, upkeep, merged.version_before, name)
        return replace(result, maintained=maintained)

    def merge_entries(self, entries: pa.Table, batch: StructType, deletes: Deletes) -> _Merged:
        """Merge the newest entry of each key.

        Args:
            entries: one per key, without the columns of the delivery.
            batch: the columns of the batch.
        """
        return self._storage.changed(
            "merge the batch into", lambda: self._merge(entries, batch, deletes)
        )

    @property
    def layout(self) -> Layout | None:
        """See :class:`nats_stream_source.delta.cdc.tables.LayoutTable`."""
        return Layout.of(self._properties)

    def add_columns(self, columns: Sequence[StructField]) -> None:
        """See :class:`nats_stream_source.delta.cdc.tables.LayoutTable`."""
        new = with_new_columns(self._storage.name, self.schema, columns)
        if new is not self.schema:
            self._found = add_columns(self._storage, columns, new)
            self.schema = schema_of(self._found)

    def is_empty(self) -> bool:
        """See :class:`nats_stream_source.delta.cdc.tables.LayoutTable`."""
        return self._storage.named("read", lambda: not self._target().count())

    def read_rows(self, keys: pa.Table, columns: Sequence[str]) -> pa.Table:
        """See :class:`nats_stream_source.delta.cdc.tables.RowTable`."""
        return self._storage.named(
            "read", lambda: _rows_of(self._target(), self.layout, keys, columns)
        )

    def change_rows(
        self, select: Callable[[Reader], RowChanges], upkeep: Upkeep | None
    ) -> MergeResult:
        """See :class:`nats_stream_source.delta.cdc.tables.RowTable`."""

        def change() -> tuple[_Merged | None, RowChanges]:
            target = self._target()
            layout = self.layout
            changes = select(lambda keys, columns: _rows_of(target, layout, keys, columns))
            if changes.state_only:
                _commit_without_changes(target)
            name = self._storage.name
            return _apply(target, name, layout, changes) if len(changes) else None, changes

        merged, changes = self._storage.changed("merge the batch into", change)
        if merged is None:
            return MergeResult("copy-on-write", contradictions=changes.contradictions)
        result = merged.result(changes.upserts)
        result = replace(result, contradictions=changes.contradictions)
        if not upkeep:
            return result
        name, before = self._storage.name, merged.version_before
        return replace(result, maintained=upkeep_after_commit(merged.target, upkeep, before, name))

    def rows(self, bucket: str, deletes: Deletes) -> pa.Table:
        """See :class:`nats_stream_source.delta.table.Table`."""
        return self._storage.named("read", lambda: self._rows(bucket, deletes))

    def remove_or_mark(self, missing: pa.Table, bucket: str, deletes: Deletes) -> int:
        """See :class:`nats_stream_source.delta.table.Table`."""
        return self._storage.changed(
            "reconcile", lambda: self._remove_or_mark(missing, bucket, deletes)
        )

    def maintain(self, upkeep: Upkeep) -> MaintenanceResult:
        """See :class:`nats_stream_source.delta.table.Table`."""
        target = self._storage.named("open", self._target)
        return maintain_by_delta_rs(target, upkeep, self._storage.name)

    def _target(self) -> DeltaTable:
        target, self._found = self._found or self._storage.open_existing(), None
        return target

    def _rows(self, bucket: str, deletes: Deletes) -> pa.Table:
        target = self._target()
        if self.layout is not None:
            return open_rows(_read(target, open_row_columns(self.schema.names)), bucket)
        conditions = [f"{column} IS NOT NULL" for column in ("key", "stream_created", "revision")]
        if "bucket" in schema_of(target).names:
            conditions.append(f"bucket = {_literal(bucket)}")
        if deletes == "mark":
            conditions.append(f"NOT coalesce({DELETED_COLUMN}, false)")
        query = f"SELECT key, stream_created, revision FROM t WHERE {' AND '.join(conditions)}"
        return pa.table(QueryBuilder().register("t", target).execute(query))

    def _merge(self, entries: pa.Table, batch: StructType, deletes: Deletes) -> _Merged:
        target = self._target()
        before, files_before = target.version(), file_sizes(target)
        schema = schema_of(target)
        name = self._storage.name
        verify_table(name, schema, deletes, batch)
        stored = batch.fields
        if with_new_columns(name, schema, stored) is not schema:
            raise TableChangedError("another writer has removed columns of the table")
        keys = key_columns(schema.names)
        source = _cast(entries_to_merge(entries, keys, deletes), target, name)
        columns = {quote(column): f"s.{quote(column)}" for column in source.column_names}
        merger = target.merge(
            source,
            " AND ".join(f"t.{column} = s.{column}" for column in keys),
            source_alias="s",
            target_alias="t",
        )
        if deletes == "remove":
            merger = (
                merger.when_matched_delete(f"{_NEWER} AND s.operation <> 'PUT'")
                .when_matched_update(columns, _NEWER)
                .when_not_matched_insert(columns, "s.operation = 'PUT'")
            )
        else:
            merger = merger.when_matched_update(columns, _NEWER).when_not_matched_insert(columns)
        counts = merger.execute()
        return _Merged(target, before, files_before, counts)

    def _remove_or_mark(self, missing: pa.Table, bucket: str, deletes: Deletes) -> int:
        target = self._target()
        columns = schema_of(target).names
        conditions = [
            "t.key = s.key",
            "t.stream_created = s.was_created",
            "t.revision = s.was_revision",
        ]
        if "bucket" in columns:
            conditions.append(f"t.bucket = {_literal(bucket)}")
        merger = target.merge(missing, " AND ".join(conditions), source_alias="s", target_alias="t")
        if deletes == "remove":
            counts = merger.when_matched_delete().execute()
            return int(counts["num_target_rows_deleted"])
        assignments = {quote(column): value for column, value in mark_values(columns).items()}
        unmarked = f"NOT coalesce(t.{DELETED_COLUMN}, false)"
        counts = merger.when_matched_update(assignments, unmarked).execute()
        return int(counts["num_target_rows_updated"])


def _rows_of(
    target: DeltaTable, layout: Layout | None, keys: pa.Table, columns: Sequence[str]
) -> pa.Table:
    """Columns of the rows of these keys."""
    assert layout is not None
    names = list(dict.fromkeys([*layout.keys, *columns]))
    first = layout.keys[0]
    condition = "true"
    kind = keys[first].type
    if len(keys) and (pa.types.is_string(kind) or pa.types.is_integer(kind)):
        bounds = pc.min_max(keys[first])
        low, high = (
            _literal(value) if isinstance(value, str) else str(value)
            for value in (bounds["min"].as_py(), bounds["max"].as_py())
        )
        condition = f"{_identifier(first)} BETWEEN {low} AND {high}"
    rows = _read(target, names, condition)
    wanted = positions_in(rows, keys, layout.keys) >= 0
    return rows.filter(pa.array(wanted)).select(list(columns))


def _read(target: DeltaTable, columns: Sequence[str], condition: str = "true") -> pa.Table:
    """Columns of a version's rows, with the table's types."""
    selected = ", ".join(map(_identifier, columns))
    query = f"SELECT {selected} FROM t WHERE {condition}"
    types = pa.schema(target.schema().to_arrow())
    rows = pa.table(QueryBuilder().register("t", target).execute(query))
    return rows.cast(pa.schema([types.field(name) for name in columns]))


def _commit_without_changes(target: DeltaTable) -> None:
    """Commit a version with the same rows, as a MERGE of delta-rs without changes does not."""
    target.create_write_transaction([], "append", target.schema(), commit_properties=_NEXT_VERSION)


def _apply(target: DeltaTable, name: str, layout: Layout | None, changes: RowChanges) -> _Merged:
    """Upsert and remove rows in one MERGE."""
    assert layout is not None
    before, files = target.version(), file_sizes(target)
    upserts, removed = (_cast(of, target, name) for of in (changes.upserts, changes.removed))
    nulls = [
        removed[field.name]
        if field.name in removed.column_names
        else pa.nulls(len(removed), field.type)
        for field in upserts.schema
    ]
    flags = pa.array([False] * len(upserts) + [True] * len(removed))
    source = pa.concat_tables([upserts, pa.table(nulls, schema=upserts.schema)])
    columns = {quote(name): f"s.{quote(name)}" for name in upserts.column_names}
    counts = (
        target.merge(
            source.append_column(_REMOVED, flags),
            " AND ".join(f"t.{quote(name)} = s.{quote(name)}" for name in layout.identity),
            source_alias="s",
            target_alias="t",
            commit_properties=_NEXT_VERSION,
        )
        .when_matched_delete(f"s.{_REMOVED}")
        .when_matched_update(columns)
        .when_not_matched_insert(columns, f"NOT s.{_REMOVED}")
        .execute()
    )
    return _Merged(target, before, files, counts)


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _cast(entries: pa.Table, target: DeltaTable, table: str) -> pa.Table:
    """The entries with the table's types: Spark's timestamps have the session's time zone."""
    types = pa.schema(target.schema().to_arrow())
    for index, column in enumerate(entries.column_names):
        wanted = types.field(column).type
        if entries.field(index).type != wanted:
            cast = stored_column(entries, column, wanted, table)
            entries = entries.set_column(index, column, cast)
    return entries


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
