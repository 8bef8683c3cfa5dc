"""The Delta table that follows a bucket: how it is looked up, created and validated.

**Columns.** The table has the columns of the batch except ``delta`` and ``initial``, which describe
the delivery of an entry and differ when the entry is read again. With marked deletes the table also
has the column ``deleted BOOLEAN``. Other columns of the table belong to the user and are never
written.

**Identity.** One row per key. If the table has a column ``bucket``, one row per bucket and key, so
several buckets can share a table.

**Names.** A table is given as a path or as a name. A value with a slash or a backslash is a path or
URI; any other value, and any value with a backquote, is a name in the catalog.
"""

from __future__ import annotations

from typing import Literal, get_args

from delta.tables import DeltaTable
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql.types import BooleanType, StructField, StructType

from nats_stream_source.errors import ConfigurationError

Deletes = Literal["remove", "mark"]

REQUIRED_COLUMNS = ("key", "revision", "operation", "stream_created")
DELIVERY_COLUMNS = ("delta", "initial")
DELETED_COLUMN = "deleted"


def check_deletes(deletes: str) -> None:
    """Raise ConfigurationError unless ``deletes`` is ``"remove"`` or ``"mark"``."""
    if deletes not in get_args(Deletes):
        raise ConfigurationError(
            f"invalid argument: deletes is {deletes!r}, expected 'remove' or 'mark'"
        )


def is_path(table: str) -> bool:
    """Whether ``table`` is a path or URI instead of a name in the catalog."""
    return ("/" in table or "\\" in table) and "`" not in table


def find_table(spark: SparkSession, table: str) -> DeltaTable | None:
    """The table, or None if it does not exist."""
    if is_path(table):
        return DeltaTable.forPath(spark, table) if DeltaTable.isDeltaTable(spark, table) else None
    try:
        return DeltaTable.forName(spark, table)
    except AnalysisException:
        # The class of the error differs between catalogs. A table that exists in another format
        # must still raise, not count as missing.
        if spark.catalog.tableExists(table):
            raise
        return None


def create_table(
    spark: SparkSession, table: str, batch: StructType, deletes: Deletes
) -> DeltaTable:
    """Create an empty table for batches of this schema, unless it exists; returns the table."""
    builder = DeltaTable.createIfNotExists(spark)
    builder = builder.location(table) if is_path(table) else builder.tableName(table)
    return builder.addColumns(table_schema(batch, deletes)).execute()


def table_schema(batch: StructType, deletes: Deletes) -> StructType:
    """The columns of a table for batches of this schema; all columns are nullable."""
    fields = [
        StructField(field.name, field.dataType, True, field.metadata)
        for field in batch.fields
        if field.name not in DELIVERY_COLUMNS
    ]
    if deletes == "mark":
        fields.append(StructField(DELETED_COLUMN, BooleanType(), True))
    return StructType(fields)


def key_columns(columns: list[str]) -> list[str]:
    """The columns that identify the row of an entry."""
    return ["bucket", "key"] if "bucket" in columns else ["key"]


def check_batch(batch: list[str], deletes: Deletes) -> None:
    """Raise ConfigurationError if a batch with these columns cannot be merged."""
    for column in REQUIRED_COLUMNS:
        if column not in batch:
            raise ConfigurationError(
                f"could not merge the batch: it has no column '{column}'; keep "
                f"{_join_quoted(REQUIRED_COLUMNS)} as the source delivers them"
            )
    if deletes == "mark" and DELETED_COLUMN in batch:
        raise ConfigurationError(
            f"could not merge the batch: it has its own column '{DELETED_COLUMN}', which "
            f"deletes='mark' writes; rename the column"
        )


def check_table(
    table: str, columns: list[str], deletes: Deletes, batch: list[str] | None = None
) -> None:
    """Raise ConfigurationError if a batch cannot be merged into the table, or it be reconciled.

    A table is created for one value of ``deletes`` and keeps it. Marks added to a table of removed
    rows would not cover the rows removed before; removals in a table of marked rows would leave the
    old marks.

    Args:
        table: path or name, for the message.
        columns: the table's columns.
        deletes: the effect of DEL and PURGE that the caller requires.
        batch: the columns of the batch; None for :func:`reconcile`.
    """
    for column in REQUIRED_COLUMNS:
        if column not in columns:
            raise ConfigurationError(
                f"could not use table {table!r}: the table has no column '{column}', "
                f"expected {_join_quoted(REQUIRED_COLUMNS)}; use a table created from a bucket"
            )
    if deletes == "mark" and DELETED_COLUMN not in columns:
        raise ConfigurationError(
            f"could not use table {table!r} with deletes='mark': it has no column "
            f"'{DELETED_COLUMN}', so rows of deleted keys are removed from it; use "
            f"deletes='remove', or replay the bucket into a new table"
        )
    if deletes == "remove" and DELETED_COLUMN in columns and DELETED_COLUMN not in (batch or ()):
        raise ConfigurationError(
            f"could not use table {table!r} with deletes='remove': it has a column "
            f"'{DELETED_COLUMN}', so rows of deleted keys are marked in it; use deletes='mark', or "
            f"replay the bucket into a new table"
        )
    if batch is None:
        return
    if "bucket" in columns and "bucket" not in batch:
        raise ConfigurationError(
            f"could not merge the batch into table {table!r}: the batch has no column 'bucket', "
            f"and the table identifies rows by 'bucket' and 'key'; keep the column 'bucket'"
        )
    for column in batch:
        if column not in columns and column not in DELIVERY_COLUMNS:
            raise ConfigurationError(
                f"could not merge the batch into table {table!r}: the table has no column "
                f"'{column}'; drop it from the batch, or add it to the table "
                f"(ALTER TABLE … ADD COLUMN)"
            )


def quote(column: str) -> str:
    """The column's name as a quoted SQL identifier, for any characters."""
    return "`" + column.replace("`", "``") + "`"


def _join_quoted(columns: tuple[str, ...]) -> str:
    return ", ".join(f"'{column}'" for column in columns)
