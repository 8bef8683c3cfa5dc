"""The event columns of a bucket's entries: computed by Spark, or from collected entries.

The sequence, the delete flag and the time of an entry are columns of its own. As expressions of
Spark they are analysed and compiled again for each batch, so the driver's engine computes them from
the Arrow columns of the entries.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import BooleanType, StructField, StructType

from nats_stream_source.delta.cdc.layout import DELETE, SEQUENCE, TIME
from nats_stream_source.delta.newest import ORDER_COLUMNS

PUT = "operation <> 'PUT'"
"""The condition of an entry that deletes its key."""

_CREATED = "created"


def entry_columns(times: bool) -> tuple[str, ...]:
    """The columns of an entry from which its event columns are computed.

    Args:
        times: whether the events have the time of the entry.
    """
    return (*ORDER_COLUMNS, "operation", *((_CREATED,) if times else ()))


def event_columns(times: bool) -> list[Column]:
    """The event columns as expressions."""
    deletes = F.coalesce(F.expr(PUT), F.lit(False)).alias(DELETE)
    time = [F.col(_CREATED).alias(TIME)] if times else []
    return [F.struct(*ORDER_COLUMNS).alias(SEQUENCE), deletes, *time]


def event_fields(entries: StructType, times: bool) -> list[StructField]:
    """The types of the event columns."""
    sequence = StructType([entries[name] for name in ORDER_COLUMNS])
    time = [StructField(TIME, entries[_CREATED].dataType)] if times else []
    return [StructField(SEQUENCE, sequence), StructField(DELETE, BooleanType()), *time]


def with_event_columns(entries: pa.Table, times: bool) -> pa.Table:
    """The entries with their event columns."""
    entries = entries.combine_chunks()
    order = [entries[name].combine_chunks() for name in ORDER_COLUMNS]
    sequence = pa.StructArray.from_arrays(order, list(ORDER_COLUMNS))
    deletes = pc.fill_null(pc.not_equal(entries["operation"], "PUT"), False)
    events = entries.append_column(SEQUENCE, sequence).append_column(DELETE, deletes)
    return events.append_column(TIME, entries[_CREATED]) if times else events
