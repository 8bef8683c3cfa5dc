"""Merges into Delta tables by Spark's MERGE, of any size and any catalog.

**Steps of a merge.** 1. Select the newest entry of each key in the batch. 2. Of these, select the
entries that are newer than the table's row or whose key is not in the table. 3. MERGE the selected
entries, if there are any. Step 2 limits the cost of a repeated batch to one scan of the table's
keys. Delta's MERGE alone would rewrite every file that contains a key of the batch, even if no row
changes. Step 2 reads an earlier snapshot than the MERGE does, so the MERGE compares again.

**Persist.** The result of step 1 is used twice: to count the changes and to merge them. A range of
a bucket that is read twice can lack, the second time, revisions that were superseded in between.
Therefore the result of step 1 is persisted, and the batch is read once. The result of step 2 is not
persisted: it depends on the table, and Spark recomputes a persisted DataFrame when one of its
tables has changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from operator import and_, or_
from typing import TypeVar

import pyarrow as pa
from delta.tables import DeltaTable
from pyspark.sql import Column, DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import BinaryType, StructField, StructType, TimestampType

from nats_stream_source.delta.cdc.bucket_history import open_row_columns, open_rows
from nats_stream_source.delta.cdc.columns import (
    conformed,
    require_fields,
    with_new_columns,
)
from nats_stream_source.delta.cdc.layout import END, Layout
from nats_stream_source.delta.conflicts import retry_conflicts
from nats_stream_source.delta.merge_result import CREATED_COLUMN, MergeResult, created_time
from nats_stream_source.delta.newest import ORDER_COLUMNS
from nats_stream_source.delta.spark.conflicts import CONFLICTS
from nats_stream_source.delta.spark.new_columns import add_columns
from nats_stream_source.delta.spark.upkeep import (
    maintain_by_spark,
    newest_version,
    upkeep_after_spark_commit,
)
from nats_stream_source.delta.table import (
    DELETED_COLUMN,
    OWN_PREFIX,
    Deletes,
    invalid_entries_error,
    key_columns,
    mark_values,
    order_columns,
    quote,
    verify_table,
    without_delivery,
)
from nats_stream_source.delta.upkeep import MaintenanceResult, Upkeep
from nats_stream_source.errors import ConfigurationError
from nats_stream_source.wire.headers import OPERATIONS

_RANK_COLUMN = OWN_PREFIX + "rank"
_COMPUTED = {"delta.generationExpression", "delta.identity.step"}
_ROW = OWN_PREFIX + "row_"  # before the names of the table's columns
_T = TypeVar("_T")


class SparkTable:
    """A table that Spark's MERGE changes.

    Args:
        spark: the session of the table.
        name: path, URI or name as the user gave it.
        path: the path or URI for Spark; None for a name in the catalog.
        target: the newest version.
    """

    def __init__(
        self, spark: SparkSession, name: str, path: str | None, target: DeltaTable
    ) -> None:
        self._name = name
        self._path = path
        self._spark = spark
        self._target = target

    @property
    def target(self) -> DeltaTable:
        """The table for Delta's own functions."""
        return self._target

    @property
    def layout(self) -> Layout | None:
        """See :class:`nats_stream_source.delta.cdc.tables.LayoutTable`."""
        return Layout.of(self._detail().properties)

    @property
    def table_id(self) -> str:
        """See :class:`nats_stream_source.delta.cdc.tables.LayoutTable`."""
        return str(self._detail().id)

    def is_empty(self) -> bool:
        """See :class:`nats_stream_source.delta.cdc.tables.LayoutTable`."""
        return self._target.toDF().isEmpty()

    def version(self) -> int:
        """The newest version."""
        return newest_version(self._target)

    def _detail(self) -> Row:
        columns = ("id", "properties", "partitionColumns")
        detail = self._target.detail().select(*columns).head()
        assert detail is not None  # DESCRIBE DETAIL has one row
        return detail

    @property
    def schema(self) -> StructType:
        """The table's columns."""
        return self._target.toDF().schema

    def require_exact_partitions(self) -> None:
        """Raise ConfigurationError if Spark stores other values in a partition column."""
        schema = self.schema
        for name in self._detail().partitionColumns:
            if isinstance(schema[name].dataType, BinaryType):
                raise ConfigurationError(
                    f"could not use table {self._name!r}: the partition column {name!r} is a "
                    f"BINARY, whose bytes are stored as UTF-8 and lost where they are not; "
                    f"partition the table by another column"
                )

    def add_columns(self, columns: Sequence[StructField], of: SparkTable | None = None) -> None:
        """See :class:`nats_stream_source.delta.cdc.tables.LayoutTable`.

        Args:
            columns: to store.
            of: of a state table: the table beside it.
        """
        beside = None if of is None else of.target
        self._target = add_columns(
            self._spark, self._name, self._path, self._target, columns, of_table=beside
        )

    def merge(self, batch: DataFrame, deletes: Deletes, upkeep: Upkeep | None) -> MergeResult:
        """See :class:`nats_stream_source.delta.table.Table`."""
        own = self.schema
        verify_table(self._name, own, deletes, batch.schema)
        self.require_exact_partitions()
        batch = without_delivery(batch)
        schema = with_new_columns(self._name, own, batch.schema)
        require_fields(self._name, batch.schema, own)
        entries = conformed(batch, schema)
        if deletes == "mark":
            entries = entries.withColumn(DELETED_COLUMN, F.col("operation") != "PUT")
        keys = key_columns(schema.names)
        newest = newest_entries(entries, keys).persist()
        try:
            if schema is not own:
                if invalid := newest.where(_is_invalid(keys)).count():
                    raise invalid_entries_error(invalid, keys)
                self.add_columns(batch.schema.fields)
            result = self._retried(lambda: self._merge_newest(newest, keys, deletes))
        finally:
            newest.unpersist()
        if not (result.changed and upkeep):
            return result
        maintained = upkeep_after_spark_commit(self._spark, self._target, upkeep, self._name)
        return replace(result, maintained=maintained)

    def rows(self, bucket: str, deletes: Deletes) -> pa.Table:
        """See :class:`nats_stream_source.delta.table.Table`."""
        frame = self._target.toDF()
        if self.layout is not None:
            rows = frame.select(*map(quote, open_row_columns(frame.columns)))
            return open_rows(rows.where(F.col(END).isNull()).toArrow(), bucket)
        if "bucket" in frame.columns:
            frame = frame.where(F.col("bucket") == bucket)
        if deletes == "mark":
            frame = frame.where(~F.coalesce(F.col(DELETED_COLUMN), F.lit(False)))
        frame = frame.select("key", "stream_created", "revision")
        return frame.where(
            "key IS NOT NULL AND stream_created IS NOT NULL AND revision IS NOT NULL"
        ).toArrow()

    def remove_or_mark(self, missing: pa.Table, bucket: str, deletes: Deletes) -> int:
        """See :class:`nats_stream_source.delta.table.Table`."""
        return self._retried(lambda: self._remove_or_mark(missing, bucket, deletes))

    def maintain(self, upkeep: Upkeep) -> MaintenanceResult:
        """See :class:`nats_stream_source.delta.table.Table`."""
        return maintain_by_spark(self._spark, self._target, upkeep, self._name)

    def _computed(self) -> list[str]:
        """The generated and identity columns, whose metadata a DataFrame does not have."""
        if not hasattr(self._target, "_jdt"):  # over Spark Connect
            return []
        metadata = self._target._jdt.deltaLog().unsafeVolatileSnapshot().metadata()
        schema = StructType.fromJson(json.loads(metadata.schemaString()))
        return [field.name for field in schema.fields if _COMPUTED & field.metadata.keys()]

    def _retried(self, work: Callable[[], _T]) -> _T:
        return retry_conflicts(work, self._name, CONFLICTS)

    def _merge_newest(self, newest: DataFrame, keys: list[str], deletes: Deletes) -> MergeResult:
        changes = select_changes(newest, self._target.toDF(), keys)
        counts = changes.agg(
            F.count(F.lit(1)).alias("changes"),
            F.count_if(_is_invalid(keys)).alias("invalid"),
            max_created(newest.dtypes).alias("newest"),
        ).first()
        assert counts is not None  # an aggregate without GROUP BY has one row
        if counts.invalid:
            raise invalid_entries_error(counts.invalid, keys)
        if not counts.changes:
            return MergeResult("spark")
        merged = execute_merge(self._target, changes, keys, deletes)
        return merge_result(merged, counts.newest)

    def _remove_or_mark(self, missing: pa.Table, bucket: str, deletes: Deletes) -> int:
        columns = self.schema.names
        conditions = [
            F.col("t.key") == F.col("s.key"),
            F.col("t.stream_created") == F.col("s.was_created"),
            F.col("t.revision") == F.col("s.was_revision"),
        ]
        if "bucket" in columns:
            conditions.append(F.col("t.bucket") == F.lit(bucket))
        source = self._spark.createDataFrame(missing)
        builder = self._target.alias("t").merge(source.alias("s"), reduce(and_, conditions))
        if deletes == "remove":
            builder = builder.whenMatchedDelete()
        else:
            assignments: dict[str, str | Column] = {
                quote(column): F.expr(value)
                for column, value in mark_values(columns, self._computed()).items()
            }
            builder = builder.whenMatchedUpdate(
                ~F.coalesce(F.col(f"t.{DELETED_COLUMN}"), F.lit(False)), assignments
            )
        counts = builder.execute().first()
        assert counts is not None  # Delta's MERGE returns one row of counts
        return int(counts.num_affected_rows)


def newest_entries(entries: DataFrame, keys: list[str]) -> DataFrame:
    """The newest entry of each key, and all with a null in key or order, which are invalid."""
    newest_first = Window.partitionBy(*keys).orderBy(*map(F.desc, ORDER_COLUMNS))
    return (
        entries.withColumn(_RANK_COLUMN, F.row_number().over(newest_first))
        .where((F.col(_RANK_COLUMN) == 1) | _has_null([*keys, *ORDER_COLUMNS]))
        .drop(_RANK_COLUMN)
    )


def select_changes(newest: DataFrame, rows: DataFrame, keys: list[str]) -> DataFrame:
    """The entries that are newer than the table's row of their key, or whose key has no row.

    The result includes the invalid entries, which are then counted.
    """
    table_rows = rows.select(
        *(
            F.col(column).alias(f"{_ROW}{column}")
            for column in [*keys, "stream_created", "revision"]
        )
    )
    same_key = reduce(and_, (F.col(column) == F.col(f"{_ROW}{column}") for column in keys))
    unchanged = same_key & ~_is_newer("", _ROW) & ~_is_invalid(keys)
    return newest.join(table_rows, unchanged, "left_anti")


def execute_merge(target: DeltaTable, changes: DataFrame, keys: list[str], deletes: Deletes) -> Row:
    """MERGE the changes; a row that is not older than its entry stays. Returns Delta's counts."""
    columns: dict[str, str | Column] = {
        quote(column): F.col(f"s.{quote(column)}") for column in changes.columns
    }
    same_key = reduce(and_, (F.col(f"t.{column}") == F.col(f"s.{column}") for column in keys))
    newer, put = _is_newer("s.", "t."), F.col("s.operation") == "PUT"
    builder = target.alias("t").merge(changes.alias("s"), same_key)
    if deletes == "remove":
        builder = (
            builder.whenMatchedDelete(newer & ~put)
            .whenMatchedUpdate(newer, columns)
            .whenNotMatchedInsert(put, columns)
        )
    else:
        builder = builder.whenMatchedUpdate(newer, columns).whenNotMatchedInsert(values=columns)
    counts = builder.execute().first()
    assert counts is not None  # Delta's MERGE returns one row of counts
    return counts


def max_created(columns: Sequence[tuple[str, str]], prefix: str = "") -> Column:
    """The aggregate of rows that is ``created`` of the newest one, in microseconds.

    Args:
        columns: names and types; the aggregate is null if ``created`` is not one of their times.
        prefix: of the names in the rows.
    """
    timed = (CREATED_COLUMN, "timestamp") in columns
    created = F.col(prefix + CREATED_COLUMN) if timed else F.lit(None).cast(TimestampType())
    return F.unix_micros(F.max(created))


def merge_result(counts: Row, newest: int | None, contradictions: int = 0) -> MergeResult:
    """The result of a MERGE.

    Args:
        counts: of the MERGE, from Delta.
        newest: :func:`max_created` of the changes.
        contradictions: see :class:`MergeResult`.
    """
    return MergeResult(
        "spark",
        counts.num_inserted_rows,
        counts.num_updated_rows,
        counts.num_deleted_rows,
        newest=created_time(newest),
        contradictions=contradictions,
    )


def _is_invalid(keys: list[str]) -> Column:
    return _has_null(order_columns(keys)) | ~F.col("operation").isin(*OPERATIONS)


def _has_null(columns: list[str]) -> Column:
    return reduce(or_, (F.col(column).isNull() for column in columns))


def _is_newer(entry: str, row: str) -> Column:
    """Whether the entry is newer than the row; a row with a null in its order is older.

    Args:
        entry: the prefix of the entry's column names.
        row: the prefix of the row's column names.
    """
    created, revision = F.col(f"{entry}stream_created"), F.col(f"{entry}revision")
    row_created, row_revision = F.col(f"{row}stream_created"), F.col(f"{row}revision")
    not_newer = (row_created > created) | ((row_created == created) & (row_revision >= revision))
    return ~F.coalesce(not_newer, F.lit(False))
