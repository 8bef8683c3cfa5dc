"""Values that an event does not have, since its source left them unchanged.

Such an event has the names of these columns in a list. Its value is that of the last event of the
key before it that has one: an earlier event of the batch, else the row of the table. It is null
after a delete, and where the key does not have a row. So the events of a key must reach the table
in their order; a repeat of earlier events is harmless, since they are older than the row.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.delta.rules.layout import DELETE, EVENT_COLUMNS, UNAVAILABLE, Layout
from nats_stream_source.delta.rules.order import Booleans, has_null, key_codes, sequence_values
from nats_stream_source.delta.rules.reading import Integers, Reader
from nats_stream_source.logs import field_logger

_log = field_logger(__name__)


def with_kept_values(events: pa.Table, layout: Layout, reader: Reader) -> pa.Table:
    """The events with the values that their rows keep, without the column of the names.

    Args:
        events: of a batch; of each key at least the events that lack values, and the newest other.
        layout: of the table.
        reader: reads the table.
    """
    lists = events[UNAVAILABLE].combine_chunks()
    events = events.drop_columns([UNAVAILABLE])
    lacking, named = pc.list_parent_indices(lists), pc.list_flatten(lists)
    keys = list(layout.keys)
    own = {*keys, *layout.order, *EVENT_COLUMNS}
    columns = [name for name in events.column_names if name in named.unique().to_pylist()]
    columns = [name for name in columns if name not in own]
    if not columns:
        return events
    lacks = events.take(lacking.unique()).select(keys)
    distinct = np.unique(key_codes(lacks, keys), return_index=True)[1]
    slots = reader.of_keys(lacks.take(pa.array(distinct)))
    rows = reader.read(slots, list(dict.fromkeys([*layout.identified, *columns])))
    deletes = np.asarray(events[DELETE].to_numpy(), bool)
    history = _History(rows, events, layout)
    unknown = 0
    for name in columns:
        has = np.ones(len(rows) + len(events), bool)
        has[len(rows) + lacking.filter(pc.equal(named, name)).to_numpy()] = False
        has[len(rows) :] |= deletes
        sources = history.last(has)[len(rows) :]
        unknown += int(np.sum((sources < 0) & history.is_last[len(rows) :]))
        kind = rows.schema.field(name).type
        values = pc.if_else(pa.array(deletes), pa.scalar(None, kind), events[name].cast(kind))
        united = pa.chunked_array([*rows[name].chunks, *values.chunks], kind)
        column = united.take(pa.array(sources, mask=sources < 0))
        events = events.set_column(events.column_names.index(name), name, column)
    if unknown:
        _log.warning(
            "values that events do not have are not in the table, null instead",
            values=unknown,
            columns=columns,
        )
    return events


class _History:
    """The rows and events of each key in their order, a row before an event with its sequence.

    Attributes:
        is_last: whether each row and event is the last of its key.
    """

    def __init__(self, rows: pa.Table, events: pa.Table, layout: Layout) -> None:
        names = list(dict.fromkeys([*layout.keys, *layout.order]))
        schema = rows.select(names).schema
        both = pa.concat_tables([rows.select(names), events.select(names).cast(schema)])
        codes = key_codes(both, layout.keys)
        parts = sequence_values(both, layout.order)
        is_event = np.arange(len(both)) >= len(rows)
        # A row with a null in its sequence is older than each event.
        ordered = ~has_null(both, layout.order)
        self._order: Integers = np.lexsort((is_event, *parts[::-1], ordered, codes))
        numbers = np.arange(len(both))
        first = np.diff(codes[self._order], prepend=-1) != 0
        self._start: Integers = np.maximum.accumulate(np.where(first, numbers, 0))
        self.is_last: Booleans = np.empty(len(both), bool)
        self.is_last[self._order] = np.append(first[1:], True)

    def last(self, has: Booleans) -> Integers:
        """For each row and event, the last one up to it that has a value; -1 for none."""
        numbers = np.arange(len(has))
        last = np.maximum.accumulate(np.where(has[self._order], numbers, -1))
        found = np.empty(len(has), np.int64)
        found[self._order] = np.where(last >= self._start, self._order[last], -1)
        return found
