"""SCD type 1: the event of each key with the greatest sequence; after a delete, no row.

A row has its sequence, and the state table the greatest sequence of a key's deletes. The row
that results is that of the greatest of both and of the batch's events. It depends on the set of a
key's events only, not on their order and batches.

A delete is recorded before its row is removed. If the process ends in between, the next batch with
an event of the key removes the row, since the recorded delete is greater.

**Entries** have no state: a stream's order cannot be late. A PUT with the sequence of its row is
the same entry, so nothing is read or written for it.

**Values that an event does not have,** since its source left them unchanged: the event has the
names of these columns in a list. Its value is that of the last event of the key before it that has
one: an earlier event of the batch, else the row of the table. It is null after a delete, and where
the key does not have a row. So the events of a key must reach the table in their order; a repeat of
earlier events is harmless, since they are older than the row.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.delta.rules.layout import (
    DELETE,
    DELETED_COLUMN,
    EVENT_COLUMNS,
    MARK_COLUMNS,
    UNAVAILABLE,
    Layout,
)
from nats_stream_source.delta.rules.rows import (
    Booleans,
    Integers,
    Reader,
    RowChanges,
    compared,
    has_null,
    key_codes,
    newest_per_key,
    one_per_sequence,
    same_rows,
    sequence_values,
    winner,
)
from nats_stream_source.logs import field_logger


def latest_changes(
    events: pa.Table, layout: Layout, rows: Reader, state: Reader | None
) -> RowChanges:
    """The changes of a table with one row per key by valid events."""
    values = [name for name in events.column_names if name not in EVENT_COLUMNS]
    events, contradicted = _newest(events, layout, values)
    keys, order = events.select(list(layout.keys)), list(layout.order)
    slots = rows.find(keys)
    deletes = np.asarray(events[DELETE].to_numpy(), bool)
    of_rows = rows.read(slots, order)
    newer, tied = compared(events, of_rows, order)
    over_state = np.ones(len(events), bool)
    row_outdated = np.zeros(len(events), bool)
    if state is not None:
        state_slots = state.find(keys)
        recorded = state.read(state_slots, order)
        over_state, equals_state = compared(events, recorded, order)
        contradicted |= ~deletes & equals_state
        row_is_newer = compared(of_rows, recorded, order)[0] & ~has_null(of_rows, order)
        row_outdated = ~has_null(recorded, order) & ~row_is_newer
    # A delete counts before an upsert with its sequence.
    marked = _marked_rows(rows, slots, tied & (deletes | (not layout.entries)), layout)
    removing = deletes & over_state & (newer | (tied & ~marked))
    puts = ~deletes & newer & over_state
    if not layout.entries:
        contradicted |= (removing & tied) | (~deletes & tied & marked)
        same = np.flatnonzero(~deletes & tied & ~marked & over_state)
        wins, different = _compare(events.take(pa.array(same)), rows, slots[same], values)
        puts[same[wins]] = True
        contradicted[same[different]] = True
    written = puts | (removing if layout.deletes == "mark" else False)
    upserts = events.filter(pa.array(written)).drop_columns([DELETE])
    if layout.deletes == "mark":
        upserts = with_marks(upserts, deletes[written], layout)
    gone = (slots >= 0) & ~written & (removing | row_outdated)
    of_state = None
    if state is not None:
        recorded = events.filter(pa.array(removing)).select(layout.identified)
        of_state = RowChanges(recorded, state_slots[removing], slots[:0])
    return RowChanges(
        upserts, slots[written], slots[gone], of_state, contradictions=int(contradicted.sum())
    )


def _newest(events: pa.Table, layout: Layout, values: list[str]) -> tuple[pa.Table, Booleans]:
    """The newest event of each key, and whether others with its sequence contradict it."""
    count = int(key_codes(events, layout.keys).max(initial=-1)) + 1
    contradicted = np.zeros(count, bool)
    if count == len(events):  # one event of each key
        return events, contradicted
    events = newest_per_key(events, layout.keys, layout.order, ties=not layout.entries)
    codes = key_codes(events, layout.keys)
    order = np.argsort(codes, kind="stable")
    events = events.take(pa.array(order))
    which, groups = one_per_sequence(events, codes[order], values)
    contradicted[groups] = True
    return events.take(pa.array(which)), contradicted


def _marked_rows(rows: Reader, slots: Integers, asked: Booleans, layout: Layout) -> Booleans:
    """Whether the row of each event is marked, for those that are asked."""
    marked = np.zeros(len(slots), bool)
    if layout.deletes == "mark" and asked.any():
        flags = rows.read(slots[asked], [DELETED_COLUMN])[DELETED_COLUMN]
        marked[asked] = pc.fill_null(flags, False).to_numpy()
    return marked


def _compare(
    events: pa.Table, rows: Reader, slots: Integers, values: list[str]
) -> tuple[Integers, Integers]:
    """Which events count before the row with their sequence, and which differ from it."""
    if not len(slots):
        return slots, slots
    read = rows.read(slots, values)
    different = np.flatnonzero(~same_rows(events, read, values))
    flags = pa.array([False, False])
    wins = []
    for position in different:
        one = read.slice(position, 1)
        other = events.select(values).slice(position, 1).cast(one.schema)
        if winner(pa.concat_tables([one, other]).append_column(DELETE, flags), values) == 1:
            wins.append(position)
    return np.array(wins, np.int64), different


def with_marks(upserts: pa.Table, deletes: Booleans, layout: Layout) -> pa.Table:
    """The rows with the column ``deleted``, and only the mark's own columns in a deleted one."""
    flags = pa.array(deletes)
    kept = {*layout.keys, *layout.order, *(MARK_COLUMNS if layout.entries else ())}
    if deletes.any():
        for index, name in enumerate(upserts.column_names):
            if name not in kept:
                column = upserts[name]
                nulls = pa.scalar(None, column.type)
                upserts = upserts.set_column(index, name, pc.if_else(flags, nulls, column))
    return upserts.append_column(DELETED_COLUMN, flags)


_log = field_logger(__name__)


def with_kept_values(events: pa.Table, layout: Layout, reader: Reader) -> pa.Table:
    """The events with the values that their rows keep, without the column of the names.

    Args:
        events: of a batch; of each key at least the events that lack values, and the newest other.
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
