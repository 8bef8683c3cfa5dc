"""Collect the newest entry of each key of a batch in the driver, for engine ``"delta-rs"``.

The executors reduce each partition to the newest entry of each key (``mapInArrow``), so no shuffle
takes place and the driver receives at most one row per key and partition. The driver reduces once
more. The batch is read once.

**Limits.** A partition that exceeds a limit stops reading and returns one row that reports it,
instead of rows that the driver might not have the memory for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql.types import BooleanType, StructField, StructType

from nats_stream_source.delta.limits import LimitCheck
from nats_stream_source.delta.newest import NewestPerKey, invalid_entries, newest_per_key
from nats_stream_source.delta.table import (
    DELETED_COLUMN,
    DELIVERY_COLUMNS,
    Deletes,
    EngineRefusedError,
    invalid_entries_error,
)

# A name that does not occur in user tables.
_EXCEEDED = "_nats_stream_source_exceeded"


def collect_newest(batch: DataFrame, keys: list[str], limits: LimitCheck) -> pa.Table:
    """The newest entry of each key, without the columns of the delivery.

    Args:
        batch: it is read once.
        keys: columns that identify the key.
        limits: ``batch_rows`` and ``batch_bytes`` apply to each partition and to the result.

    Raises:
        EngineRefusedError: a column has a type that Arrow lacks, or a limit is exceeded.
    """
    entries, enforced = batch.drop(*DELIVERY_COLUMNS), limits.enforced
    nullable = [StructField(field.name, field.dataType, True) for field in entries.schema.fields]
    schema = StructType([*nullable, StructField(_EXCEEDED, BooleanType(), True)])
    collected = entries.mapInArrow(
        _reduction(keys, enforced.batch_rows, enforced.batch_bytes), schema
    ).toArrow()
    if collected[_EXCEEDED].null_count < collected.num_rows:
        raise EngineRefusedError(
            f"a partition of the batch has more than {enforced.batch_rows} keys "
            f"or {enforced.batch_bytes} bytes"
        )
    newest = newest_per_key(collected.drop_columns([_EXCEEDED]), keys)
    limits.validate("batch_rows", newest.num_rows)
    limits.validate("batch_bytes", newest.nbytes)
    return newest


def entries_to_merge(newest: pa.Table, keys: list[str], deletes: Deletes) -> pa.Table:
    """The newest entries with the column ``deleted``, if deletes are marked.

    Raises:
        ConfigurationError: an entry cannot be ordered or applied.
    """
    if invalid := invalid_entries(newest, keys):
        raise invalid_entries_error(invalid, keys)
    if deletes == "remove":
        return newest
    return newest.append_column(DELETED_COLUMN, pc.not_equal(newest["operation"], "PUT"))


def _reduction(
    keys: list[str], max_rows: int | None, max_bytes: int | None
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def reduce(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        newest: NewestPerKey | None = None
        for batch in batches:
            if newest is None:
                newest = NewestPerKey(batch.schema, keys, max_rows=max_rows, max_bytes=max_bytes)
            if not newest.add(batch):
                break
        if newest is None:
            return
        table = newest.table()
        if table is None:
            columns = {field.name: pa.nulls(1, field.type) for field in newest.schema}
            report = pa.RecordBatch.from_pydict({**columns, _EXCEEDED: [True]})
            yield report
            return
        flags = pa.nulls(table.num_rows, pa.bool_())
        yield from table.append_column(_EXCEEDED, flags).to_batches()

    return reduce
