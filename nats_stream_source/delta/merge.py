"""Merge one batch of entries into the Delta table that follows their bucket.

**Order.** Of two entries of a key, the newer one has the greater ``(stream_created, revision)``.
The revisions of a re-created bucket start at 1 again, so only ``stream_created`` distinguishes its
entries from those of the earlier bucket. Every step below compares by this order only, not by the
position of a row in the batch nor by the number of the batch. Therefore a batch can be merged any
number of times, and batches can overlap: an entry that the table already contains is not newer than
itself.

**Steps.** 1. Select the newest entry of each key in the batch. 2. Of these, select the entries that
are newer than the table's row or whose key is not in the table. 3. MERGE the selected entries, if
there are any.
Step 2 limits the cost of a repeated batch to one scan of the table's keys. Delta's MERGE alone
would rewrite every file that contains a key of the batch, even if no row changes. Step 2 reads an
earlier snapshot than the MERGE does, so the MERGE compares again.

**Persist.** The result of step 1 is used twice: to count the changes and to merge them. A range of
a bucket that is read twice can lack, the second time, revisions that were superseded in between.
Therefore the result of step 1 is persisted, and the batch is read once. The result of step 2 is not
persisted: it depends on the table, and Spark recomputes a persisted DataFrame when one of its
tables has changed.

**Removed or marked.** A removed row leaves no record of its revision. If an older PUT of the same
key is merged later (a replay from an earlier sequence), no row of the key is found and the PUT is
inserted. The replay corrects this when it reaches the marker, if the bucket still has the marker. A
marked row keeps the marker's revision, so older entries are not merged over it. For the same reason
a marker whose key is not in the table inserts a marked row with ``deletes="mark"``, and inserts
nothing with ``deletes="remove"``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import and_, or_

from delta.tables import DeltaTable
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from nats_stream_source.delta.table import (
    DELETED_COLUMN,
    DELIVERY_COLUMNS,
    Deletes,
    check_batch,
    check_deletes,
    check_table,
    create_table,
    find_table,
    key_columns,
    quote,
)
from nats_stream_source.errors import ConfigurationError

# A name that does not occur in user tables.
_RANK_COLUMN = "_nats_stream_source_rank"
_OPERATIONS = ("PUT", "DEL", "PURGE")


def merge_changes(table: str, *, deletes: Deletes = "remove") -> Callable[[DataFrame, int], None]:
    """Return a function for ``foreachBatch`` that keeps a Delta table equal to a bucket.

    ``df.writeStream.foreachBatch(merge_changes("/lake/fleet")).start()``

    Args:
        table: path, URI or name of the table, see :func:`merge`.
        deletes: ``"remove"`` or ``"mark"``, see :func:`merge`.

    Raises:
        ConfigurationError: ``deletes`` has another value. The errors of the returned function,
            which end the query, are those of :func:`merge`.
    """
    check_deletes(deletes)

    def merge_batch(batch: DataFrame, batch_id: int) -> None:
        merge(batch, table, deletes=deletes)

    return merge_batch


def merge(batch: DataFrame, table: str, *, deletes: Deletes = "remove") -> None:
    """Merge one batch of entries into a Delta table with one row per key.

    The first batch creates the table, even if the batch is empty. Merging a batch again changes
    nothing and does not create a new table version. The batch is read once.

    Args:
        batch: entries as ``nats_kv`` delivers them. Columns may be added, parsed or dropped, except
            ``key``, ``revision``, ``operation`` and ``stream_created``, which must be unchanged.
        table: a path or URI if it contains a slash or backslash (``./fleet``), else a name in the
            catalog of the batch's session.
        deletes: the effect of DEL and PURGE on the key's row. ``"remove"`` deletes the row;
            ``"mark"`` replaces it by the marker's own columns with ``deleted`` true.

    Raises:
        ConfigurationError: a required column is missing in the batch or the table, the table lacks
            a column of the batch or was created for other ``deletes``, or the key, revision,
            operation or ``stream_created`` of an entry is null.
        ConcurrentAppendException and the other conflicts of ``delta.exceptions``: another writer
            changed the same files during the merge; merge again.
    """
    check_deletes(deletes)
    check_batch(batch.columns, deletes)
    spark = batch.sparkSession
    target = find_table(spark, table) or create_table(spark, table, batch.schema, deletes)
    rows = target.toDF()
    check_table(table, rows.columns, deletes, batch.columns)
    entries = batch.drop(*DELIVERY_COLUMNS)
    if deletes == "mark":
        entries = entries.withColumn(DELETED_COLUMN, F.col("operation") != "PUT")
    keys = key_columns(rows.columns)
    newest = _newest_per_key(entries, keys).persist()
    try:
        changes = _select_changes(newest, rows, keys)
        counts = changes.agg(
            F.count(F.lit(1)).alias("changes"), F.count_if(_is_invalid(keys)).alias("invalid")
        ).first()
        assert counts is not None  # an aggregate without GROUP BY has one row
        if counts.invalid:
            raise ConfigurationError(
                f"could not merge the batch: {counts.invalid} entries have a null in one of "
                f"{', '.join(_required_columns(keys))}, or an operation other than "
                f"{', '.join(_OPERATIONS)}; keep these columns as the source delivers them"
            )
        if counts.changes:
            _execute_merge(target, changes, keys, deletes)
    finally:
        newest.unpersist()


def _required_columns(keys: list[str]) -> list[str]:
    return [*keys, "stream_created", "revision", "operation"]


def _is_invalid(keys: list[str]) -> Column:
    nulls = reduce(or_, (F.col(column).isNull() for column in _required_columns(keys)))
    return nulls | ~F.col("operation").isin(*_OPERATIONS)


def _newest_per_key(entries: DataFrame, keys: list[str]) -> DataFrame:
    # Nulls first: an entry with a null in its order is then selected and reported as invalid.
    newest_first = Window.partitionBy(*keys).orderBy(
        F.desc_nulls_first("stream_created"), F.desc_nulls_first("revision")
    )
    return (
        entries.withColumn(_RANK_COLUMN, F.row_number().over(newest_first))
        .where(F.col(_RANK_COLUMN) == 1)
        .drop(_RANK_COLUMN)
    )


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


def _select_changes(newest: DataFrame, rows: DataFrame, keys: list[str]) -> DataFrame:
    """The entries that are newer than the table's row of their key, or whose key has no row.

    The result includes the invalid entries, which are then counted.
    """
    table_rows = rows.select(
        *(F.col(column).alias(f"_row_{column}") for column in [*keys, "stream_created", "revision"])
    )
    same_key = reduce(and_, (F.col(column) == F.col(f"_row_{column}") for column in keys))
    unchanged = same_key & ~_is_newer("", "_row_") & ~_is_invalid(keys)
    return newest.join(table_rows, unchanged, "left_anti")


def _execute_merge(
    target: DeltaTable, changes: DataFrame, keys: list[str], deletes: Deletes
) -> None:
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
    builder.execute()
