"""The Delta table that holds a bucket: how it is found, made and checked.

**Columns.** The table has the columns of the batch, without ``delta`` and ``initial``: those two
say how an entry was delivered, not what it is, and differ when it is read again. With marked
deletes it has one more, ``deleted BOOLEAN``. Columns that only the table has are the user's own:
nothing here writes them.

**Identity.** One row a key; where the table has a ``bucket``, one row a bucket and key, so several
buckets can share a table.

**Names.** A table is given as a path or as a name. What contains a slash or a backslash is a path
or URI, anything else (and anything with a backquote) a name in the catalog.
"""

from __future__ import annotations

from typing import Literal, get_args

from delta.tables import DeltaTable
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql.types import BooleanType, StructField, StructType

from nats_stream_source.errors import ConfigurationError

Deletes = Literal["remove", "mark"]

REQUIRED = ("key", "revision", "operation", "stream_created")
DELIVERY = ("delta", "initial")
DELETED = "deleted"


def check_deletes(deletes: str) -> None:
    """Raise ConfigurationError unless ``deletes`` is ``"remove"`` or ``"mark"``."""
    if deletes not in get_args(Deletes):
        raise ConfigurationError(f"deletes={deletes!r}: it is 'remove' or 'mark'")


def is_path(table: str) -> bool:
    """Whether ``table`` is a path or URI, and not a name in the catalog."""
    return ("/" in table or "\\" in table) and "`" not in table


def find(spark: SparkSession, table: str) -> DeltaTable | None:
    """The table, or None where there is none yet."""
    if is_path(table):
        return DeltaTable.forPath(spark, table) if DeltaTable.isDeltaTable(spark, table) else None
    try:
        return DeltaTable.forName(spark, table)
    except AnalysisException:
        # The error's class differs between catalogs. A table that exists and is not Delta's must
        # still be an error, and not be taken for missing.
        if spark.catalog.tableExists(table):
            raise
        return None


def create(spark: SparkSession, table: str, batch: StructType, deletes: Deletes) -> DeltaTable:
    """Make the empty table for batches of this schema; the table itself if it exists by now."""
    builder = DeltaTable.createIfNotExists(spark)
    builder = builder.location(table) if is_path(table) else builder.tableName(table)
    return builder.addColumns(table_schema(batch, deletes)).execute()


def table_schema(batch: StructType, deletes: Deletes) -> StructType:
    """The columns of a table for batches of this schema; all of them may be null."""
    fields = [
        StructField(field.name, field.dataType, True, field.metadata)
        for field in batch.fields
        if field.name not in DELIVERY
    ]
    if deletes == "mark":
        fields.append(StructField(DELETED, BooleanType(), True))
    return StructType(fields)


def identity(columns: list[str]) -> list[str]:
    """The columns that say which row an entry belongs to."""
    return ["bucket", "key"] if "bucket" in columns else ["key"]


def check_batch(batch: list[str], deletes: Deletes) -> None:
    """Raise ConfigurationError when a batch with these columns cannot be merged."""
    for column in REQUIRED:
        if column not in batch:
            raise ConfigurationError(
                f"the batch has no column '{column}': keep {_listed(REQUIRED)} as the source "
                f"delivers them"
            )
    if deletes == "mark" and DELETED in batch:
        raise ConfigurationError(
            f"the batch has its own column '{DELETED}', which deletes='mark' writes: rename it"
        )


def check_table(
    table: str, columns: list[str], deletes: Deletes, batch: list[str] | None = None
) -> None:
    """Raise ConfigurationError when this table cannot take such a batch, or be reconciled.

    A table is made for one way of treating deletes and keeps it: marks among removed rows would
    not cover what was removed before, and removals would leave old marks standing.
    """
    for column in REQUIRED:
        if column not in columns:
            raise ConfigurationError(
                f"the table {table!r} has no column '{column}': it was not made for the entries "
                f"of a bucket; it needs {_listed(REQUIRED)}"
            )
    if deletes == "mark" and DELETED not in columns:
        raise ConfigurationError(
            f"the table {table!r} has no column '{DELETED}', so its deletes are removed: use "
            f"deletes='remove', or replay the bucket into a new table"
        )
    if deletes == "remove" and DELETED in columns and DELETED not in (batch or ()):
        raise ConfigurationError(
            f"the table {table!r} has a column '{DELETED}', so its deletes are marked: use "
            f"deletes='mark', or replay the bucket into a new table"
        )
    if batch is None:
        return
    if "bucket" in columns and "bucket" not in batch:
        raise ConfigurationError(
            f"the table {table!r} tells rows apart by 'bucket' and 'key', and the batch has no "
            f"column 'bucket': keep it"
        )
    for column in batch:
        if column not in columns and column not in DELIVERY:
            raise ConfigurationError(
                f"the table {table!r} has no column '{column}': drop it from the batch, or add it "
                f"to the table (ALTER TABLE … ADD COLUMN)"
            )


def quoted(column: str) -> str:
    """The column's name as SQL has it, whatever characters are in it."""
    return "`" + column.replace("`", "``") + "`"


def _listed(columns: tuple[str, ...]) -> str:
    return ", ".join(f"'{column}'" for column in columns)
