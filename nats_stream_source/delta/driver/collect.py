"""Collect the newest entry of each key of a batch, or its events, for engine ``"delta-rs"``.

**A batch of any size.** The executors reduce each partition to the newest entry of each key
(``mapInArrow``), so no shuffle takes place and the driver receives at most one row per key and
partition. The driver reduces once more. The batch is read once.

**A small batch.** The reduction is a second Python step of each task, which takes as long as all
the rest of a batch of some hundred rows. If the last batch was small, the driver therefore collects
the rows as they are, up to a limit. A batch that reaches the limit is read again, with the
reduction: the rows of the first attempt are dropped, since they can be a part of a batch. The limit
follows the size of the rows, so the memory of the driver stays bounded.

**Events of SCD type 2** all decide, so the executors only count them.

**Limits.** A partition that exceeds a limit stops reading and returns one row that reports it,
instead of rows that the driver might not have the memory for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql.types import LongType, StructField, StructType

from nats_stream_source.delta.cdc.columns import conformed, with_new_columns
from nats_stream_source.delta.cdc.events import Events
from nats_stream_source.delta.cdc.layout import UNAVAILABLE
from nats_stream_source.delta.cdc.merge_events import require_valid
from nats_stream_source.delta.cdc.tables import LayoutTable
from nats_stream_source.delta.limits import AutoLimits, LimitCheck
from nats_stream_source.delta.newest import AllRows, NewestPerKey, invalid_entries, newest_per_key
from nats_stream_source.delta.table import (
    DELETED_COLUMN,
    OWN_PREFIX,
    Deletes,
    EngineRefusedError,
    invalid_entries_error,
    key_columns,
    verify_table,
    without_delivery,
)

# A column that user tables do not have: in the first row of a partition, the rows that it has read.
_READ = OWN_PREFIX + "read"
_EXCEEDED = -1  # in place of the rows: a limit is exceeded

# Up to here the rows of a batch reach the driver faster than the executors start to reduce them.
_FEW_ROWS = 10_000
_FEW_BYTES = 8 << 20

_Reduction = Callable[[pa.Schema], "NewestPerKey | AllRows"]


class BatchCollector:
    """Collects the batches of one table, one after the other."""

    def __init__(self) -> None:
        self._few = 0  # rows up to which the next batch is collected as it is

    def __repr__(self) -> str:
        return f"<BatchCollector few={self._few}>"

    def newest(self, batch: DataFrame, keys: list[str], limits: LimitCheck) -> pa.Table:
        """The newest entry of each key.

        Args:
            batch: without the columns of the delivery; it is read once, or twice where it is much
                larger than the last one.
            keys: columns that identify the key.
            limits: ``batch_rows`` and ``batch_bytes`` apply to each partition and to the result.

        Raises:
            EngineRefusedError: a column has a type that Arrow lacks, or a limit is exceeded.
        """
        enforced = limits.enforced

        def reduction(schema: pa.Schema) -> NewestPerKey:
            rows, size = enforced.batch_rows, enforced.batch_bytes
            return NewestPerKey(schema, keys, max_rows=rows, max_bytes=size)

        collected, read = self._collect(batch, reduction, enforced)
        return self._within(newest_per_key(collected, keys), read, limits)

    def events(self, events: Events, limits: LimitCheck) -> pa.Table:
        """The events that decide: all, or with SCD type 1 those that are a key's last.

        Args:
            events: they are read as often as the batch of :meth:`newest`.
            limits: ``batch_rows`` and ``batch_bytes`` apply to each partition and to the result.

        Raises:
            EngineRefusedError: a column has a type that Arrow lacks, or a limit is exceeded.
            ConfigurationError: a key or sequence is null.
        """
        layout, enforced = events.layout, limits.enforced

        def reduction(schema: pa.Schema) -> NewestPerKey | AllRows:
            maximum = {"max_rows": enforced.batch_rows, "max_bytes": enforced.batch_bytes}
            if layout.scd_type == 2:
                return AllRows(schema, **maximum)
            # An event without some values takes them from the events before it.
            lists = UNAVAILABLE if UNAVAILABLE in schema.names else None
            return NewestPerKey(
                schema, layout.keys, order=layout.order, ties=True, lists=lists, **maximum
            )

        collected, read = self._collect(events.rows, reduction, enforced)
        collected = events.with_event_columns(collected)
        require_valid(collected, layout)
        return self._within(collected, read, limits)

    def _collect(
        self, frame: DataFrame, reduction: _Reduction, limits: AutoLimits
    ) -> tuple[pa.Table, int]:
        """The rows as they are or reduced, and how many were read."""
        collected = self._collect_few(frame)
        if collected is None:
            return _collect_reduced(frame, reduction, limits)
        return collected, collected.num_rows

    def _within(self, rows: pa.Table, read: int, limits: LimitCheck) -> pa.Table:
        limits.validate("batch_rows", rows.num_rows)
        limits.validate("batch_bytes", rows.nbytes)
        if rows.num_rows:
            few = min(_FEW_ROWS, _FEW_BYTES * rows.num_rows // max(1, rows.nbytes))
            self._few = few if read <= few else 0
        return rows

    def _collect_few(self, entries: DataFrame) -> pa.Table | None:
        """All rows as they are; None if the batch may have more than a small one has."""
        if not self._few:
            return None
        rows = entries.limit(self._few + 1).toArrow()
        return rows if rows.num_rows <= self._few else None


def _collect_reduced(
    entries: DataFrame, reduction: _Reduction, limits: AutoLimits
) -> tuple[pa.Table, int]:
    """The reduced rows of each partition, and the number of rows read for them."""
    names = entries.columns
    # `mapInArrow` resolves names as expressions: a dot is a field, a backquote an error.
    if any("." in name or "`" in name or name == "*" for name in names):
        entries = entries.toDF(*(f"{OWN_PREFIX}{number}" for number in range(len(names))))
    nullable = [StructField(field.name, field.dataType, True) for field in entries.schema.fields]
    schema = StructType([*nullable, StructField(_READ, LongType(), True)])
    collected = entries.mapInArrow(_reducing(reduction, names), schema).toArrow()
    collected = collected.rename_columns([*names, _READ])
    read = collected[_READ]
    if pc.any(pc.equal(read, _EXCEEDED)).as_py():
        raise EngineRefusedError(
            f"a partition of the batch has more than {limits.batch_rows} keys "
            f"or {limits.batch_bytes} bytes"
        )
    return collected.drop_columns([_READ]), pc.sum(read).as_py() or 0


def collect_entries(
    batch: DataFrame,
    table: LayoutTable,
    name: str,
    deletes: Deletes,
    collector: BatchCollector,
    limits: LimitCheck,
) -> tuple[pa.Table, StructType]:
    """The newest entry of each key, and the columns of the batch without those of the delivery.

    The table gets the columns that it lacks, once the entries are valid.

    Args:
        batch: as the user gave it.
        table: that the entries are merged into.
        name: of the table, for errors.
        deletes: ``"remove"`` or ``"mark"``.
        collector: of the table's batches.
        limits: of this change.
    """
    own = table.schema
    keys = key_columns(own.names)
    verify_table(name, own, deletes, batch.schema)
    batch = without_delivery(batch)
    schema = with_new_columns(name, own, batch.schema)
    newest = collector.newest(conformed(batch, schema), keys, limits)
    if schema is not own:
        require_valid_entries(newest, keys)
        table.add_columns(batch.schema.fields)
    return newest, batch.schema


def require_valid_entries(newest: pa.Table, keys: list[str]) -> None:
    """Raise ConfigurationError if an entry cannot be ordered or applied."""
    if invalid := invalid_entries(newest, keys):
        raise invalid_entries_error(invalid, keys)


def entries_to_merge(newest: pa.Table, keys: list[str], deletes: Deletes) -> pa.Table:
    """The newest entries with the column ``deleted``, if deletes are marked.

    Raises:
        ConfigurationError: an entry cannot be ordered or applied.
    """
    require_valid_entries(newest, keys)
    if deletes == "remove":
        return newest
    return newest.append_column(DELETED_COLUMN, pc.not_equal(newest["operation"], "PUT"))


def _reducing(
    reduction: _Reduction, names: list[str]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def reduce(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        newest: NewestPerKey | AllRows | None = None
        read = 0
        passed: list[str] = []
        for batch in batches:
            passed = batch.schema.names
            batch = batch.rename_columns(names)
            if newest is None:
                newest = reduction(batch.schema)
            read += batch.num_rows
            if not newest.add(batch):
                break
        if newest is None:
            return
        table = newest.table()
        if table is None:
            nulls = [pa.nulls(1, field.type) for field in newest.schema]
            yield pa.RecordBatch.from_arrays([*nulls, pa.array([_EXCEEDED])], [*passed, _READ])
            return
        counts = pa.array([read] + [None] * (table.num_rows - 1), pa.int64())[: table.num_rows]
        yield from table.rename_columns(passed).append_column(_READ, counts).to_batches()

    return reduce
