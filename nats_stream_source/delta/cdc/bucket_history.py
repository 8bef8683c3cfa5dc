"""The history of a bucket's entries, for :func:`nats_stream_source.delta.reconcile`.

The open rows are those whose keys had a value when the query read them. A key that is missing in
the bucket gets a delete, which is an event like each other one: a PUT of the key that the query
merges at the same time has a greater sequence, and opens a row after it.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from nats_stream_source.delta.cdc.layout import (
    DELETE,
    END,
    ENTRY_SEQUENCE,
    SEQUENCE,
    START,
    TIME,
    Layout,
)
from nats_stream_source.delta.newest import ORDER_COLUMNS
from nats_stream_source.errors import ConfigurationError


def require_entries(table: str, layout: Layout) -> None:
    """Raise ConfigurationError unless the table is the history of a bucket's entries."""
    keys = layout.keys in (("key",), ("bucket", "key"))
    if layout.scd_type != 2 or layout.sequence != ENTRY_SEQUENCE or not keys:
        raise ConfigurationError(
            f"could not reconcile table {table!r}: it has keys {list(layout.keys)!r} and a "
            f"sequence of type {layout.sequence}, expected those of a bucket's entries; reconcile "
            f"a table that was created without keys and sequence_by"
        )


def open_row_columns(columns: list[str]) -> list[str]:
    """The columns that :func:`open_rows` requires."""
    order = [name for name in ORDER_COLUMNS if name in columns]
    bucket = [name for name in ("bucket",) if name in columns]
    return ["key", *bucket, START, END, *(order if len(order) == len(ORDER_COLUMNS) else [])]


def open_rows(rows: pa.Table, bucket: str) -> pa.Table:
    """The open rows of a bucket: key, stream_created and revision of their last entry."""
    rows = rows.filter(pc.is_null(rows[END]))
    if "bucket" in rows.column_names:
        rows = rows.filter(pc.equal(rows["bucket"], bucket))
    if ORDER_COLUMNS[0] not in rows.column_names:
        # The entry that opened the row; later ones of it are not known without the column.
        for name in ORDER_COLUMNS:
            rows = rows.append_column(name, pc.struct_field(rows[START], name))
    return rows.select(["key", *ORDER_COLUMNS]).drop_null()


def closing_events(missing: pa.Table, bucket: str, layout: Layout, state: StructType) -> pa.Table:
    """The deletes of missing keys.

    Args:
        missing: see :func:`nats_stream_source.delta.missing_keys.missing_table`.
        bucket: of the keys.
        layout: of the table.
        state: the columns of its state table.
    """
    count, columns = len(missing), []
    schema = to_arrow_schema(state, timezone="UTC")
    for field in schema:
        if field.name == SEQUENCE:
            parts = [missing[name].combine_chunks() for name in ORDER_COLUMNS]
            columns.append(pa.StructArray.from_arrays(parts, list(ORDER_COLUMNS)).cast(field.type))
        elif field.name == DELETE:
            columns.append(pa.repeat(True, count))
        elif field.name == TIME:
            columns.append(missing["created"])
        elif field.name in layout.keys:
            columns.append(missing["key"] if field.name == "key" else pa.repeat(bucket, count))
        else:
            columns.append(pa.nulls(count, field.type))
    return pa.table(columns, schema=schema)
