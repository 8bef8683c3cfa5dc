"""The changes of ``reconcile``: rows of keys that their bucket lacks, or has at an older revision.

The rules of :mod:`latest` and :mod:`history` do not fit an older revision: the greater sequence
wins there. So an event of ``reconcile`` names the row that was compared, by its order. It changes
this row and no other: a row that a query has merged meanwhile stays.

With SCD type 2 the open row ends at the sequence of the event, and an older value opens a row
there. That can be the sequence after the last one of the stream. If an entry of the key gets it,
the rule takes this entry, see :mod:`history`. A row that begins where it should end is removed: the
key was compared again before the stream had another message.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.delta.rules.events import EventBatch, EventShape
from nats_stream_source.delta.rules.latest import with_marks
from nats_stream_source.delta.rules.layout import (
    DELETE,
    DELETED_COLUMN,
    END,
    ENTRY_SEQUENCE,
    EVENT_COLUMNS,
    ORDER_COLUMNS,
    REPLACES,
    SEQUENCE,
    START,
    TIME,
    VALID_FROM,
    VALID_TO,
    Layout,
)
from nats_stream_source.delta.rules.rows import (
    Integers,
    Reader,
    RowChanges,
    Where,
    positions_in,
    same_values,
)
from nats_stream_source.delta.schema import sql_type
from nats_stream_source.errors import ConfigurationError


def require_entries(table: str, layout: Layout | None) -> Layout:
    """The layout of a table of entries or of their history.

    Raises:
        ConfigurationError: the table has other rows.
    """
    if layout is None:
        raise ConfigurationError(
            f"could not reconcile table {table!r}: it has no columns of a bucket's entries; use a "
            f"table created from a bucket"
        )
    history = layout.scd_type == 2 and layout.sequence == ENTRY_SEQUENCE
    if not layout.entries and not (history and layout.keys in (("key",), ("bucket", "key"))):
        raise ConfigurationError(
            f"could not reconcile table {table!r}: it has keys {list(layout.keys)!r} and a "
            f"sequence of type {layout.sequence}, expected those of a bucket's entries; reconcile "
            f"a table that was created without keys and sequence_by"
        )
    return layout


def open_rows_where(layout: Layout, bucket: str) -> Where:
    """Which rows of a table have a key of a bucket that had a value when they were written."""
    where: dict[str, tuple[object, ...]] = {}
    if "bucket" in layout.keys:
        where["bucket"] = (bucket,)
    if layout.scd_type == 2:
        where[END] = (None,)
    elif layout.deletes == "mark":
        where[DELETED_COLUMN] = (None, False)
    return where


def open_row_columns(columns: Sequence[str]) -> list[str]:
    """The columns that :func:`with_order` requires, of those of a table."""
    complete = all(name in columns for name in ORDER_COLUMNS)
    return ["key", *(ORDER_COLUMNS if complete else (START,))]


def with_order(rows: pa.Table) -> pa.Table:
    """Rows with ``stream_created`` and ``revision`` of the last entry of each.

    Args:
        rows: with the columns of :func:`open_row_columns`.
    """
    if all(name in rows.column_names for name in ORDER_COLUMNS):
        return rows
    # The entry that opened the row; later ones of it are not known without the columns.
    own = rows.drop_columns([name for name in ORDER_COLUMNS if name in rows.column_names])
    for name in ORDER_COLUMNS:
        own = own.append_column(name, pc.struct_field(rows[START], name))
    return own


def open_rows(rows: pa.Table) -> pa.Table:
    """The key and order of each row, see :func:`with_order`; rows with nulls are left out."""
    return with_order(rows).select(["key", *ORDER_COLUMNS]).drop_null()


def has_entries_only(layout: Layout, table: pa.Schema) -> bool:
    """Whether a row follows from its entry: it has the columns of ``nats_kv`` as they are read."""
    kinds = {field.name: sql_type(field.type) for field in table}
    own = layout.reserved()
    return all(name in own or _ENTRY.get(name) == kind for name, kind in kinds.items()) and all(
        name in kinds for name in ORDER_COLUMNS
    )


def differences_of(found: pa.Table, bucket: str, layout: Layout, table: pa.Schema) -> EventBatch:
    """The events that give rows of a table what their bucket has.

    Args:
        found: see :func:`nats_stream_source.delta.compare_with_bucket.difference_table`.
        table: its columns. A mark has null in those that ``nats_kv`` delivers, and keeps all
            others, which can be the user's own.
    """
    found = found.append_column("bucket", pa.array([bucket] * len(found), pa.string()))
    event = [DELETE, REPLACES]
    if layout.scd_type == 2:
        event += [SEQUENCE, *((TIME,) if layout.times else ())]
    rows = found.select([name for name in _ENTRY if name in table.names] + event)
    for name in ("value", "headers"):
        if name in table.names and rows[name].null_count == len(rows):
            nulls = pa.nulls(len(rows), table.field(name).type)
            rows = rows.set_column(rows.column_names.index(name), name, nulls)
    return EventBatch.in_memory(EventShape(rows.schema, layout), rows, reconciles=True)


_ENTRY = {
    "bucket": "string",
    "key": "string",
    "value": "binary",
    "revision": "bigint",
    "created": "timestamp",
    "operation": "string",
    "stream_created": "timestamp",
    "headers": "map<string,array<string>>",
}
"""The columns of an entry that ``reconcile`` knows, and their types."""


def reconciled_changes(events: pa.Table, layout: Layout, rows: Reader) -> RowChanges:
    """The changes of the rows that events with ``__REPLACES`` name.

    Args:
        events: one of each key.
    """
    history, marks = layout.scd_type == 2, layout.deletes == "mark"
    since = [*layout.keys, *((SEQUENCE,) if history else ())]
    slots = rows.of_keys(events.select(since))
    columns = [*layout.identified, *((DELETED_COLUMN,) if marks else ())]
    if history:
        columns = layout.table_schema(events.schema).names
    known = rows.read(slots, columns)
    names = [*layout.keys, *ORDER_COLUMNS]
    compared = pa.table(
        [*events.select(list(layout.keys)).columns, *events.select([REPLACES]).flatten().columns],
        names=names,
    )
    at = positions_in(with_order(known), compared, names)
    which = at >= 0
    if history:
        which &= np.asarray(pc.is_null(known[END]).to_numpy(), bool)
    elif marks:
        which &= ~np.asarray(pc.fill_null(known[DELETED_COLUMN], False).to_numpy(), bool)
    slots, known, events = slots[which], known.filter(pa.array(which)), events.take(at[which])
    deletes = np.asarray(events[DELETE].to_numpy(), bool)
    upserts = events.drop_columns([n for n in EVENT_COLUMNS if n in events.column_names])
    if history:
        return _versions(events, upserts, deletes, known, slots, layout)
    if marks:
        return RowChanges(with_marks(upserts, deletes, layout), slots, slots[:0])
    upserts = upserts.filter(pa.array(~deletes))
    return RowChanges(upserts, slots[~deletes], slots[deletes])


def _versions(
    events: pa.Table,
    opened: pa.Table,
    deletes: np.ndarray,
    known: pa.Table,
    slots: Integers,
    layout: Layout,
) -> RowChanges:
    empty = same_values(known[START], events[SEQUENCE])
    closed, times = known, {START: SEQUENCE, VALID_FROM: TIME}
    for start, end in ((START, END), *(((VALID_FROM, VALID_TO),) if layout.times else ())):
        at = events[times[start]]
        closed = closed.set_column(closed.column_names.index(end), end, at)
        opened = opened.append_column(start, at).append_column(end, pa.nulls(len(at), at.type))
    closed = closed.filter(pa.array(~empty))
    opened = opened.select(closed.column_names).filter(pa.array(~deletes))
    return RowChanges(
        pa.concat_tables([closed, opened.cast(closed.schema)]),
        np.concatenate([slots[~empty], np.where(empty, slots, -1)[~deletes]]),
        slots[empty & deletes],
    )
