"""The Delta table that follows a bucket: how it is looked up, created and validated.

**Columns.** The table has the columns of the batch except ``delta`` and ``initial``, which describe
the delivery of an entry and differ when the entry is read again. With marked deletes the table also
has the column ``deleted BOOLEAN``. Other columns of the table belong to the user and are never
written.

**Names of columns.** Delta Lake compares names without case, whatever the session's
``spark.sql.caseSensitive``. :mod:`stored_columns` has what else a table does not store.

**Identity.** One row per key. If the table has a column ``bucket``, one row per bucket and key, so
several buckets can share a table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from pyspark.sql.types import BooleanType, NullType, StructField, StructType

from nats_stream_source.delta.merge_result import MergeResult
from nats_stream_source.delta.stored_columns import (
    require_entry_types,
    require_exact_keys,
    stored_field,
)
from nats_stream_source.delta.upkeep import MaintenanceResult, Upkeep
from nats_stream_source.errors import ConfigurationError
from nats_stream_source.wire.headers import OPERATIONS

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

Deletes = Literal["remove", "mark"]

REQUIRED_COLUMNS = ("key", "revision", "operation", "stream_created")
DELIVERY_COLUMNS = ("delta", "initial")
DELETED_COLUMN = "deleted"
OWN_PREFIX = "_nats_stream_source_"
"""How the names of columns begin that exist only while a batch is merged."""
# Columns that Delta Lake 4.4 or deltalake 1.6.6 has while it merges or reads.
_NAMES_OF_ENGINES = (
    *("_source_row_present_", "_target_row_present_", "_row_dropped_"),
    *("__delta_internal_is_row_deleted", "__delta_rs_source", "__delta_rs_target"),
    "__delta_rs_operation",
)
MARK_COLUMNS = ("stream_created", "revision", "created", "operation")
"""The columns of a marked row that are the marker's own."""


class Table(Protocol):
    """A Delta table and what changes it: the driver's process, or Spark.

    Each change is one commit, or none if no row changes. A commit that conflicts with another
    writer's is made again; all methods raise TableConflictError if each attempt had a conflict, and
    TableError if the engine or its storage failed, with the table unchanged.
    """

    @property
    def schema(self) -> StructType:
        """The table's columns."""

    def merge(self, batch: DataFrame, deletes: Deletes, upkeep: Upkeep | None) -> MergeResult:
        """Merge a batch, then do the upkeep that is due; returns what has changed.

        Columns that the table lacks are added by a commit before.
        See :func:`nats_stream_source.delta.merge`.

        Raises:
            EngineRefusedError: this engine cannot merge the batch; the table is unchanged.
            ConfigurationError: the batch or the table is invalid.
        """

    def rows(self, bucket: str, deletes: Deletes) -> pa.Table:
        """The rows of the bucket's keys, without marked ones: key, stream_created, revision."""

    def remove_or_mark(self, missing: pa.Table, bucket: str, deletes: Deletes) -> int:
        """Remove or mark the rows of missing keys that are unchanged; returns their number.

        Args:
            missing: see :func:`nats_stream_source.delta.missing_keys.missing_table`.
            bucket: its rows only, if the table has a column ``bucket``.
            deletes: ``"remove"`` or ``"mark"``.
        """

    def maintain(self, upkeep: Upkeep) -> MaintenanceResult:
        """Compact and VACUUM the table; see :func:`nats_stream_source.delta.maintain`."""


class TableEngine(Protocol):
    """Finds the one table of a location."""

    def find(self) -> Table | None:
        """The table, or None if it does not exist.

        Raises:
            EngineRefusedError: this engine cannot change the table.
        """

    def find_or_create(self, batch: StructType, deletes: Deletes, upkeep: Upkeep | None) -> Table:
        """The table; an empty one for batches of this schema if it does not exist.

        Args:
            batch: the columns of the batch.
            deletes: ``"remove"`` or ``"mark"``.
            upkeep: the properties of a table that is created; None for Delta's own.

        Raises:
            EngineRefusedError: this engine cannot change the table, or a column's type.
            ConfigurationError: the directory has files and is not a Delta table.
        """


class EngineRefusedError(Exception):
    """An engine cannot change the table, or a limit excludes it; Spark takes over."""


class TableChangedError(Exception):
    """The table is not the one that an engine has opened; its change begins again."""


def validate_deletes(deletes: str) -> None:
    """Raise ConfigurationError unless ``deletes`` is ``"remove"`` or ``"mark"``."""
    if deletes not in get_args(Deletes):
        raise ConfigurationError(
            f"invalid argument: deletes is {deletes!r}, expected 'remove' or 'mark'"
        )


def table_schema(batch: StructType, deletes: Deletes) -> StructType:
    """The columns of a table for batches of this schema; all of them are nullable.

    A column without a type (VOID) is not one of them.
    """
    fields = [
        stored_field(field)
        for field in batch.fields
        if field.name not in DELIVERY_COLUMNS and not isinstance(field.dataType, NullType)
    ]
    if deletes == "mark":
        fields.append(StructField(DELETED_COLUMN, BooleanType(), True))
    return StructType(fields)


def key_columns(columns: list[str]) -> list[str]:
    """The columns that identify the row of an entry."""
    return ["bucket", "key"] if "bucket" in columns else ["key"]


def validate_batch(batch: list[str], deletes: Deletes) -> None:
    """Raise ConfigurationError if a batch with these columns cannot be merged."""
    for column in REQUIRED_COLUMNS:
        if column not in batch:
            raise ConfigurationError(
                f"could not merge the batch: it has no column '{column}'; keep "
                f"{_join_quoted(REQUIRED_COLUMNS)} as the source delivers them"
            )
    own = next((name for name in batch if name.lower() == DELETED_COLUMN), None)
    if deletes == "mark" and own is not None:
        raise ConfigurationError(
            f"could not merge the batch: it has its own column '{own}', which "
            f"deletes='mark' writes; rename the column"
        )


def validate_names(columns: list[str]) -> None:
    """Raise ConfigurationError if a table cannot have columns of these names side by side."""
    seen: dict[str, str] = {}
    for name in columns:
        other = seen.setdefault(name.lower(), name)
        if other is not name:
            raise ConfigurationError(
                f"could not merge the batch: it has the columns {other!r} and {name!r}, whose "
                f"names Delta Lake does not distinguish; rename or drop one of them"
            )
        if name.lower() in _NAMES_OF_ENGINES:
            raise ConfigurationError(
                f"could not merge the batch: it has a column {name!r}, and Delta Lake or delta-rs "
                f"has a column of this name while it merges; rename the column"
            )
        if name.lower().startswith(OWN_PREFIX):
            raise ConfigurationError(
                f"could not merge the batch: it has a column {name!r}, and names that begin with "
                f"{OWN_PREFIX!r} are reserved; rename the column"
            )


def verify_table(
    table: str, schema: StructType, deletes: Deletes, batch: StructType | None = None
) -> None:
    """Raise ConfigurationError if a batch cannot be merged into the table, or it be reconciled.

    A table is created for one value of ``deletes`` and keeps it. Marks added to a table of removed
    rows would not cover the rows removed before; removals in a table of marked rows would leave the
    old marks.

    Args:
        table: path or name, for the message.
        schema: the table's columns.
        deletes: the effect of DEL and PURGE that the caller requires.
        batch: the columns of the batch; None for :func:`reconcile`.
    """
    columns = schema.names
    batch_columns = batch.names if batch is not None else []
    for column in REQUIRED_COLUMNS:
        if column not in columns:
            raise ConfigurationError(
                f"could not use table {table!r}: the table has no column '{column}', "
                f"expected {_join_quoted(REQUIRED_COLUMNS)}; use a table created from a bucket"
            )
    require_exact_keys(table, schema, key_columns(columns))
    require_entry_types(table, schema)
    if deletes == "mark" and DELETED_COLUMN not in columns:
        raise ConfigurationError(
            f"could not use table {table!r} with deletes='mark': it has no column "
            f"'{DELETED_COLUMN}', so rows of deleted keys are removed from it; use "
            f"deletes='remove', or replay the bucket into a new table"
        )
    if deletes == "mark":
        require_markable(table, schema, ("bucket", "key", *MARK_COLUMNS, DELETED_COLUMN))
    if deletes == "remove" and DELETED_COLUMN in columns and DELETED_COLUMN not in batch_columns:
        raise ConfigurationError(
            f"could not use table {table!r} with deletes='remove': it has a column "
            f"'{DELETED_COLUMN}', so rows of deleted keys are marked in it; use deletes='mark', or "
            f"replay the bucket into a new table"
        )
    if batch is not None and "bucket" in columns and "bucket" not in batch_columns:
        raise ConfigurationError(
            f"could not merge the batch into table {table!r}: the batch has no column 'bucket', "
            f"and the table identifies rows by 'bucket' and 'key'; keep the column 'bucket'"
        )


def require_markable(table: str, schema: StructType, kept: Collection[str]) -> None:
    """Raise ConfigurationError if a marked row would have a null in a column that is NOT NULL.

    Args:
        table: path or name, for the message.
        schema: the table's columns.
        kept: the columns of a marked row that have values.
    """
    for field in schema.fields:
        if not field.nullable and field.name not in kept:
            raise ConfigurationError(
                f"could not use table {table!r} with deletes='mark': column {field.name!r} is NOT "
                f"NULL, and null in the row of a deleted key; drop NOT NULL from the column"
            )


def not_a_table_error(table: str) -> ConfigurationError:
    """The error for a path with files that are not a Delta table."""
    return ConfigurationError(
        f"could not create table {table!r}: the directory has files and is not a Delta table; "
        f"name a new directory"
    )


def invalid_entries_error(count: int, keys: list[str]) -> ConfigurationError:
    """The error for entries that cannot be ordered or applied."""
    return ConfigurationError(
        f"could not merge the batch: {count} entries have a null in one of "
        f"{', '.join(order_columns(keys))}, or an operation other than {', '.join(OPERATIONS)}; "
        f"keep these columns as the source delivers them"
    )


def order_columns(keys: list[str]) -> list[str]:
    """The columns that identify and order an entry; none of them is null in a valid entry."""
    return [*keys, "stream_created", "revision", "operation"]


def mark_values(columns: list[str], computed: Iterable[str] = ()) -> dict[str, str]:
    """The columns of a marked row as SQL: those of the mark ``s``, and null in all others.

    Args:
        columns: of the table.
        computed: those that the engine writes itself (generated and identity columns).
    """
    unchanged = {"bucket", "key", *computed}
    mark = {name: f"s.{name}" for name in MARK_COLUMNS}
    mark[DELETED_COLUMN] = "true"
    return {column: mark.get(column, "NULL") for column in columns if column not in unchanged}


def quote(column: str) -> str:
    """The column's name as a quoted SQL identifier, for any characters."""
    return "`" + column.replace("`", "``") + "`"


def without_delivery(batch: DataFrame) -> DataFrame:
    """A batch without the columns that describe the delivery of an entry."""
    # `drop` compares names without case: a column `Delta` of the user stays.
    names = [name for name in DELIVERY_COLUMNS if name in batch.columns]
    return batch.drop(*names) if names else batch  # `drop` of nothing is several calls to the JVM


def _join_quoted(columns: tuple[str, ...]) -> str:
    return ", ".join(f"'{column}'" for column in columns)
