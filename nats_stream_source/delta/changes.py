"""The MERGE: one batch of entries into the Delta table that holds their bucket.

**Order.** Of two entries of a key the newer one is that with the greater ``(stream_created,
revision)``: a bucket that was made anew numbers its revisions from 1 again, and only its
``stream_created`` tells. Every step below compares by this order and by nothing else, not by the
place of a row in its batch nor by the number of the batch. Therefore a batch can be merged any
number of times, and batches can overlap: what is in the table already is not newer than itself.

**Steps.** 1. The newest entry of each key in the batch. 2. Of these, the ones that are newer than
the table's row or have no row there. 3. MERGE them, where there are any.
Step 2 is what makes a repeated batch cost a look at the table's keys and no more; Delta's MERGE
alone would write every file anew in which a key of the batch stands, also to change nothing. It
looks at an earlier snapshot than the MERGE does, so the MERGE compares again.

**Persist.** What step 1 finds is looked at twice: to count the changes, then to merge them. A range
of a bucket that is read twice may lack, the second time, revisions that were superseded meanwhile;
so the outcome of step 1 is persisted, and the batch is read once. Not that of step 2: it depends on
the table, and Spark computes a persisted frame anew when a table in it has changed.

**Removed or marked.** A removed row leaves no trace of its revision. An older PUT of the same key
that is merged later (a replay from an earlier sequence) finds no row and is taken for new; the
replay is right again once it has passed the marker, if the bucket still holds it. A mark keeps the
marker's revision, so nothing older gets past it. This is why a marker without a row inserts a
mark, and why it inserts nothing where rows are removed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import and_, or_

from delta.tables import DeltaTable
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from nats_stream_source.delta.table import (
    DELETED,
    DELIVERY,
    Deletes,
    check_batch,
    check_deletes,
    check_table,
    create,
    find,
    identity,
    quoted,
)
from nats_stream_source.errors import ConfigurationError

_RANK = "_nats_stream_source_rank"  # no column of a user's
_OPERATIONS = ("PUT", "DEL", "PURGE")


def merge_changes(table: str, *, deletes: Deletes = "remove") -> Callable[[DataFrame, int], None]:
    """A function for ``foreachBatch`` that keeps a Delta table equal to a bucket.

    ``df.writeStream.foreachBatch(merge_changes("/lake/fleet")).start()``

    Args:
        table: path, URI or name of the table, see :func:`merge`.
        deletes: ``"remove"`` or ``"mark"``, see :func:`merge`.

    Raises:
        ConfigurationError: ``deletes`` is something else. What the function itself raises ends
            the query; see :func:`merge`.
    """
    check_deletes(deletes)

    def merge_batch(batch: DataFrame, batch_id: int) -> None:
        merge(batch, table, deletes=deletes)

    return merge_batch


def merge(batch: DataFrame, table: str, *, deletes: Deletes = "remove") -> None:
    """Merge one batch of entries into a Delta table, one row a key.

    The table is made on the first batch, also on an empty one. Merging a batch again changes
    nothing and makes no new version of the table. The batch is read once.

    Args:
        batch: entries as ``nats_kv`` delivers them, with any columns added, parsed or dropped;
            ``key``, ``revision``, ``operation`` and ``stream_created`` must be there, unchanged.
        table: a path or URI if it contains a slash or backslash (``./fleet``), else a name in the
            catalog of the batch's session.
        deletes: what DEL and PURGE do to the key's row: ``"remove"`` deletes it; ``"mark"``
            replaces it by the marker's own columns with ``deleted`` true.

    Raises:
        ConfigurationError: a needed column is missing in the batch or the table, the table lacks a
            column of the batch or was made for other ``deletes``, or an entry has no key,
            revision, operation or ``stream_created``.
        ConcurrentAppendException and the like, of ``delta.exceptions``: another writer changed the
            same files meanwhile; merge again.
    """
    check_deletes(deletes)
    check_batch(batch.columns, deletes)
    spark = batch.sparkSession
    target = find(spark, table) or create(spark, table, batch.schema, deletes)
    rows = target.toDF()
    check_table(table, rows.columns, deletes, batch.columns)
    entries = batch.drop(*DELIVERY)
    if deletes == "mark":
        entries = entries.withColumn(DELETED, F.col("operation") != "PUT")
    keys = identity(rows.columns)
    newest = _newest(entries, keys).persist()
    try:
        changes = _changes(newest, rows, keys)
        counted = changes.agg(
            F.count(F.lit(1)).alias("changes"), F.count_if(_unusable(keys)).alias("unusable")
        ).first()
        assert counted is not None  # an aggregate without GROUP BY has one row
        if counted.unusable:
            raise ConfigurationError(
                f"{counted.unusable} entries of the batch have a null in one of "
                f"{', '.join(_needed(keys))}, or an operation other than {', '.join(_OPERATIONS)}: "
                f"keep these columns as the source delivers them"
            )
        if counted.changes:
            _apply(target, changes, keys, deletes)
    finally:
        newest.unpersist()


def _needed(keys: list[str]) -> list[str]:
    return [*keys, "stream_created", "revision", "operation"]


def _unusable(keys: list[str]) -> Column:
    nulls = reduce(or_, (F.col(column).isNull() for column in _needed(keys)))
    return nulls | ~F.col("operation").isin(*_OPERATIONS)


def _newest(entries: DataFrame, keys: list[str]) -> DataFrame:
    # Nulls come first, so that an entry without an order is seen and reported, not passed over.
    newest_first = Window.partitionBy(*keys).orderBy(
        F.desc_nulls_first("stream_created"), F.desc_nulls_first("revision")
    )
    return (
        entries.withColumn(_RANK, F.row_number().over(newest_first))
        .where(F.col(_RANK) == 1)
        .drop(_RANK)
    )


def _newer(entry: str, row: str) -> Column:
    """Whether the entry is newer than the row; a row without an order is older than any entry."""
    created, revision = F.col(f"{entry}stream_created"), F.col(f"{entry}revision")
    row_created, row_revision = F.col(f"{row}stream_created"), F.col(f"{row}revision")
    not_newer = (row_created > created) | ((row_created == created) & (row_revision >= revision))
    return ~F.coalesce(not_newer, F.lit(False))


def _changes(newest: DataFrame, rows: DataFrame, keys: list[str]) -> DataFrame:
    """The entries that are newer than the table's row of their key or have no row.

    Those that cannot be used are among them, to be counted.
    """
    known = rows.select(
        *(F.col(column).alias(f"_row_{column}") for column in [*keys, "stream_created", "revision"])
    )
    same = reduce(and_, (F.col(column) == F.col(f"_row_{column}") for column in keys))
    settled = same & ~_newer("", "_row_") & ~_unusable(keys)
    return newest.join(known, settled, "left_anti")


def _apply(target: DeltaTable, changes: DataFrame, keys: list[str], deletes: Deletes) -> None:
    columns: dict[str, str | Column] = {
        quoted(column): F.col(f"s.{quoted(column)}") for column in changes.columns
    }
    same = reduce(and_, (F.col(f"t.{column}") == F.col(f"s.{column}") for column in keys))
    newer, put = _newer("s.", "t."), F.col("s.operation") == "PUT"
    merging = target.alias("t").merge(changes.alias("s"), same)
    if deletes == "remove":
        merging = (
            merging.whenMatchedDelete(newer & ~put)
            .whenMatchedUpdate(newer, columns)
            .whenNotMatchedInsert(put, columns)
        )
    else:
        merging = merging.whenMatchedUpdate(newer, columns).whenNotMatchedInsert(values=columns)
    merging.execute()
