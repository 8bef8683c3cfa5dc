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

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.delta.rules.comparison import positions_in, same_values
from nats_stream_source.delta.rules.events import with_order
from nats_stream_source.delta.rules.latest import with_marks
from nats_stream_source.delta.rules.layout import (
    DELETE,
    DELETED_COLUMN,
    END,
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
from nats_stream_source.delta.rules.reading import Integers, Reader, RowChanges


def reconciled_changes(events: pa.Table, layout: Layout, rows: Reader) -> RowChanges:
    """The changes of the rows that events with ``__REPLACES`` name.

    Args:
        events: one of each key.
        layout: of the table.
        rows: reads the table.
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
    none = events[:0]
    if marks:
        return RowChanges(with_marks(upserts, deletes, layout), slots, slots[:0], none)
    upserts = upserts.filter(pa.array(~deletes))
    return RowChanges(upserts, slots[~deletes], slots[deletes], none)


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
        events[:0],
    )
