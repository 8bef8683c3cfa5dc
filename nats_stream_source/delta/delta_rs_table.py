"""``engine="delta-rs"``: Delta tables that the package ``deltalake`` changes, in the driver.

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

import json
from collections.abc import Callable, Mapping
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, QueryBuilder, Schema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import FileSelector, PyFileSystem
from pyspark.sql.types import StructType

from nats_stream_source.delta.conflicts import first_line, retry_conflicts
from nats_stream_source.delta.delta_rs_features import (
    is_unsupported,
    unsupported_feature,
    unsupported_type,
)
from nats_stream_source.delta.engine import DeltaRsRefusedError, TableLocation
from nats_stream_source.delta.maintenance import (
    MaintenanceResult,
    Upkeep,
    maintain_by_delta_rs,
)
from nats_stream_source.delta.newest import invalid_entries
from nats_stream_source.delta.table import (
    DELETED_COLUMN,
    Deletes,
    check_table,
    invalid_entries_error,
    key_columns,
    mark_values,
    not_a_table_error,
    quote,
    table_schema,
)
from nats_stream_source.errors import TableError

# A row with a null in its order is older than each entry.
_NEWER = (
    "NOT coalesce(t.stream_created > s.stream_created OR "
    "(t.stream_created = s.stream_created AND t.revision >= s.revision), false)"
)
_T = TypeVar("_T")


class DeltaRsTable:
    """A table that delta-rs changes.

    Args:
        name: path or URI as the user gave it, for errors.
        uri: path or URI for delta-rs.
        storage_options: options of delta-rs for the object store.
    """

    def __init__(
        self, name: str, uri: str, storage_options: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.live_bytes = 0
        """Size of the data files of the version that was opened last."""
        self._found: DeltaTable | None = None
        self._uri = uri
        self._storage_options = dict(storage_options) if storage_options else None

    def __repr__(self) -> str:
        return f"<DeltaRsTable {self.name!r}>"

    @classmethod
    def at(cls, location: TableLocation) -> DeltaRsTable:
        """The table of this location, which may not exist yet."""
        return cls(location.name, location.uri, location.storage_options)

    def find(self) -> StructType | None:
        """The table's columns, or None if it does not exist.

        Raises:
            DeltaRsRefusedError: delta-rs does not support the table.
        """
        target = self._named("open", self._open)
        if target is None:
            return None
        problem = unsupported_feature(target) or unsupported_type(schema_of(target))
        if problem is not None:
            raise DeltaRsRefusedError(problem)
        self.live_bytes = live_bytes(target)
        self._found = target
        return schema_of(target)

    def find_or_create(
        self, batch: StructType, deletes: Deletes, properties: Mapping[str, str] | None = None
    ) -> StructType:
        """The columns of the table; of an empty one for these batches if it does not exist.

        Args:
            batch: the columns of the batch.
            deletes: ``"remove"`` or ``"mark"``.
            properties: of a table that is created.

        Raises:
            DeltaRsRefusedError: delta-rs does not support the table, or a column's type.
            ConfigurationError: the directory has files and is not a Delta table.
        """
        found = self.find()
        if found is not None:
            return found
        schema = table_schema(batch, deletes)
        problem = unsupported_type(schema)
        if problem is not None:
            raise DeltaRsRefusedError(problem)

        def create() -> None:
            # Of two processes that create the table, one has a conflict, and finds it then.
            if self._open() is None:
                self._check_empty()
                DeltaTable.create(
                    self._uri,
                    Schema.from_json(schema.json()),
                    mode="ignore",
                    configuration=dict(properties or {}),
                    storage_options=self._storage_options,
                )

        self._changed("create", create)
        return schema

    def merge(
        self, entries: pa.Table, batch: StructType, deletes: Deletes
    ) -> tuple[DeltaTable, int]:
        """Merge the newest entry of each key; see :func:`nats_stream_source.delta.merge`.

        Returns the table after the merge, and its version before.

        Args:
            entries: one per key, without the columns of the delivery.
            batch: the columns of the batch.
            deletes: ``"remove"`` or ``"mark"``.
        """
        return self._changed("merge the batch into", lambda: self._merge(entries, batch, deletes))

    def maintain(self, upkeep: Upkeep) -> MaintenanceResult:
        """Compact and VACUUM the table; see :func:`nats_stream_source.delta.maintain`."""
        return maintain_by_delta_rs(self._named("open", self._required), upkeep, self.name)

    def rows(self, bucket: str, deletes: Deletes) -> pa.Table:
        """The rows of the bucket's keys, without marked ones: key, stream_created, revision."""
        target = self._named("open", self._required)
        conditions = [f"{column} IS NOT NULL" for column in ("key", "stream_created", "revision")]
        if "bucket" in schema_of(target).names:
            conditions.append(f"bucket = {_literal(bucket)}")
        if deletes == "mark":
            conditions.append(f"NOT coalesce({DELETED_COLUMN}, false)")
        query = f"SELECT key, stream_created, revision FROM t WHERE {' AND '.join(conditions)}"
        return self._named(
            "read", lambda: pa.table(QueryBuilder().register("t", target).execute(query))
        )

    def remove_or_mark(self, missing: pa.Table, bucket: str, deletes: Deletes) -> int:
        """Remove or mark the rows of missing keys that are unchanged; returns their number.

        Args:
            missing: see :func:`nats_stream_source.delta.missing_keys.missing_table`.
            bucket: its rows only, if the table has a column ``bucket``.
            deletes: ``"remove"`` or ``"mark"``.
        """
        return self._changed("reconcile", lambda: self._remove_or_mark(missing, bucket, deletes))

    def _merge(
        self, entries: pa.Table, batch: StructType, deletes: Deletes
    ) -> tuple[DeltaTable, int]:
        target = self._required()
        before = target.version()
        schema = schema_of(target)
        check_table(self.name, schema, deletes, batch)
        keys = key_columns(schema.names)
        invalid = invalid_entries(entries, keys)
        if invalid:
            raise invalid_entries_error(invalid, keys)
        if deletes == "mark":
            deleted = pc.not_equal(entries["operation"], "PUT")
            entries = entries.append_column(DELETED_COLUMN, deleted)
        source = _cast(entries, target)
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
        merger.execute()
        return target, before

    def _remove_or_mark(self, missing: pa.Table, bucket: str, deletes: Deletes) -> int:
        target = self._required()
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

    def _required(self) -> DeltaTable:
        # The first attempt of a change uses the version that `find` has looked at.
        target, self._found = self._found or self._open(), None
        if target is None:
            raise TableError(
                f"could not open table {self.name!r}: it no longer exists; create it again or "
                f"restart the query"
            )
        return target

    def _open(self) -> DeltaTable | None:
        try:
            return DeltaTable(self._uri, storage_options=self._storage_options)
        except TableNotFoundError:
            return None

    def _check_empty(self) -> None:
        try:
            handler = DeltaStorageHandler(self._uri, self._storage_options)
        except TableNotFoundError:  # a local directory that does not exist
            return
        selector = FileSelector("", recursive=True, allow_not_found=True)
        if PyFileSystem(handler).get_file_info(selector):
            raise not_a_table_error(self.name)

    def _changed(self, what: str, work: Callable[[], _T]) -> _T:
        def commit() -> _T:
            try:
                return work()
            except CommitFailedError as error:
                if is_unsupported(str(error)):
                    raise DeltaRsRefusedError(first_line(error)) from error
                raise

        return self._named(what, lambda: retry_conflicts(commit, self.name, (CommitFailedError,)))

    def _named(self, what: str, work: Callable[[], _T]) -> _T:
        """``work()``, with a named error for each failure of delta-rs and of its storage."""
        try:
            return work()
        except (DeltaError, OSError) as error:
            raise TableError(
                f"could not {what} table {self.name!r}: {first_line(error)}; the table is unchanged"
            ) from error


def schema_of(target: DeltaTable) -> StructType:
    """The table's columns as Spark's types; both have the same JSON."""
    return StructType.fromJson(json.loads(target.schema().to_json()))


def live_bytes(target: DeltaTable) -> int:
    """The size of the data files of this version, in bytes."""
    sizes = pa.table(target.get_add_actions(flatten=True))["size_bytes"]
    return int(pc.sum(sizes).as_py() or 0)


def _cast(entries: pa.Table, target: DeltaTable) -> pa.Table:
    """The entries with the table's types: Spark's timestamps have the session's time zone."""
    types = pa.schema(target.schema().to_arrow())
    for index, column in enumerate(entries.column_names):
        wanted = types.field(column).type
        if entries.field(index).type != wanted:
            entries = entries.set_column(index, column, entries.column(index).cast(wanted))
    return entries


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
