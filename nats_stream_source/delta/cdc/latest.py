"""SCD type 1: the event of each key with the greatest sequence; after a delete, no row.

A row has its sequence, and the state table the greatest sequence of a key's deletes. The row
that results is that of the greatest of both and of the batch's events. It depends on the set of a
key's events only, not on their order and batches.

A delete is recorded before its row is removed. If the process ends in between, the next batch with
an event of the key removes the row, since the recorded delete is greater.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.delta.cdc.changes import Reader, RowChanges
from nats_stream_source.delta.cdc.comparison import (
    Booleans,
    Integers,
    dense_groups,
    one_per_sequence,
    positions_in,
    same_rows,
    winner,
)
from nats_stream_source.delta.cdc.layout import DELETE, EVENT_COLUMNS, Layout
from nats_stream_source.delta.newest import (
    greater,
    has_null,
    key_codes,
    newest_per_key,
    sequence_values,
)
from nats_stream_source.delta.table import DELETED_COLUMN, MARK_COLUMNS, REQUIRED_COLUMNS


def latest_changes(
    events: pa.Table, layout: Layout, read_rows: Reader, read_state: Reader
) -> RowChanges:
    """The changes of a table with one row per key.

    Args:
        events: with the columns of :mod:`nats_stream_source.delta.cdc.events`, none of their keys
            and sequences null.
        layout: of the table.
        read_rows: reads the table.
        read_state: reads the state table; not called with marked deletes.
    """
    keys, marked = list(layout.keys), layout.deletes == "mark"
    identified = list(dict.fromkeys([*keys, *layout.order]))
    values = [name for name in events.column_names if name not in EVENT_COLUMNS]
    events, contradicted = _newest(events, layout, values)
    flags = [DELETED_COLUMN] if marked else []
    rows = read_rows(events.select(keys), [*identified, *flags])
    state = events.select(identified)[:0]
    if not marked:
        state = read_state(events.select(keys), identified)
    sequences = _Sequences(events, rows, state, layout)
    deletes = np.asarray(events[DELETE].to_numpy(), bool)
    row_deleted = np.zeros(len(events), bool)
    if marked:
        flags_of = np.asarray(pc.fill_null(rows[DELETED_COLUMN], False).to_numpy(), bool)
        row_deleted[sequences.row >= 0] = flags_of[sequences.row[sequences.row >= 0]]
    newer, tied = sequences.newer_than_row, sequences.equals_row
    over_state = sequences.newer_than_state
    puts = ~deletes & newer & over_state
    # A delete counts before an upsert with its sequence.
    removing = deletes & over_state & (newer | (tied & ~row_deleted))
    contradicted |= removing & tied
    contradicted |= ~deletes & (sequences.equals_state | (tied & row_deleted))
    compared = np.flatnonzero(~deletes & tied & ~row_deleted & over_state)
    if len(compared):
        wins, different = _compare(events.take(pa.array(compared)), read_rows, keys, values)
        puts[compared[wins]] = True
        contradicted[compared[different]] = True
    contradictions = int(contradicted.sum())
    written = puts | (removing if marked else False)
    upserts = events.filter(pa.array(written)).drop_columns([DELETE])
    if marked:
        upserts = _marked(upserts, deletes[written], layout)
        return RowChanges(upserts, upserts.select(keys)[:0], state, contradictions)
    gone = sequences.row_exists & ~written & (removing | sequences.row_is_deleted)
    return RowChanges(
        upserts,
        events.filter(pa.array(gone)).select(keys),
        events.filter(pa.array(removing)).select(identified),
        contradictions,
    )


def greater_deletes(deletes: pa.Table, layout: Layout, read_state: Reader) -> pa.Table:
    """The deletes that are greater than those that the state table has of their keys."""
    state = read_state(deletes.select(list(layout.keys)), deletes.column_names)
    sequences = _Sequences(deletes, state, state[:0], layout)
    return deletes.filter(pa.array(sequences.newer_than_row))


class _Sequences:
    """The sequence of each event compared with those of its key's row and recorded delete.

    Attributes:
        row: the position of the key's row, -1 for none.
    """

    def __init__(self, events: pa.Table, rows: pa.Table, state: pa.Table, layout: Layout) -> None:
        names = list(dict.fromkeys([*layout.keys, *layout.order]))
        schema = rows.select(names).schema
        both = pa.concat_tables(
            [
                events.select(names).cast(schema),
                rows.select(names),
                state.select(names).cast(schema),
            ]
        )
        codes = key_codes(both, layout.keys)
        self._parts: list[Integers] = sequence_values(both, layout.order)
        self._events = np.arange(len(events))
        self.row: Integers = self._positions(codes, len(events), len(rows))
        self._state: Integers = self._positions(codes, len(events) + len(rows), len(state))
        self._row_at = np.where(self.row >= 0, self.row + len(events), 0)
        self._state_at = np.where(self._state >= 0, self._state + len(events) + len(rows), 0)
        # A row with a null in its sequence is older than each event.
        unordered: Booleans = has_null(both, layout.order)
        self.row_exists: Booleans = self.row >= 0
        self._row_ordered: Booleans = self.row_exists & ~unordered[self._row_at]

    def _positions(self, codes: Integers, start: int, count: int) -> Integers:
        at = np.full(int(codes.max(initial=-1)) + 1, -1)
        at[codes[start : start + count]] = np.arange(count)
        found: Integers = at[codes[: len(self._events)]]
        return found

    @property
    def newer_than_row(self) -> Booleans:
        """Whether the event is newer than the row, or the key does not have one."""
        return ~self._row_ordered | self._greater(self._events, self._row_at)

    @property
    def equals_row(self) -> Booleans:
        """Whether the row has the event's sequence."""
        return self._row_ordered & self._equal(self._events, self._row_at)

    @property
    def newer_than_state(self) -> Booleans:
        """Whether the event is newer than the recorded delete, or there is not one."""
        return (self._state < 0) | self._greater(self._events, self._state_at)

    @property
    def equals_state(self) -> Booleans:
        """Whether the recorded delete has the event's sequence."""
        return (self._state >= 0) & self._equal(self._events, self._state_at)

    @property
    def row_is_deleted(self) -> Booleans:
        """Whether the recorded delete is not older than the row."""
        older = self._greater(self._row_at, self._state_at)
        return (self._state >= 0) & ~(self._row_ordered & older)

    def _greater(self, one: Integers, other: Integers) -> Booleans:
        return greater([part[one] for part in self._parts], [part[other] for part in self._parts])

    def _equal(self, one: Integers, other: Integers) -> Booleans:
        equal = np.ones(len(one), bool)
        for part in self._parts:
            equal &= part[one] == part[other]
        return equal


def _newest(events: pa.Table, layout: Layout, values: list[str]) -> tuple[pa.Table, Booleans]:
    """The newest event of each key, and whether others with its sequence contradict it."""
    events = newest_per_key(events, layout.keys, layout.order, ties=True)
    codes = dense_groups([key_codes(events, layout.keys)])
    order = np.argsort(codes, kind="stable")
    events = events.take(pa.array(order))
    which, groups = one_per_sequence(events, codes[order], values)
    contradicted = np.zeros(len(which), bool)
    contradicted[groups] = True
    return events.take(pa.array(which)), contradicted


def _compare(
    events: pa.Table, read_rows: Reader, keys: list[str], values: list[str]
) -> tuple[Integers, Integers]:
    """Which events count before the row with their sequence, and which differ from it."""
    rows = read_rows(events.select(keys), values)
    at = positions_in(events, rows, keys)
    rows = rows.take(pa.array(at))
    different = np.flatnonzero(~same_rows(events, rows, values))
    flags = pa.array([False, False])
    wins = []
    for position in different:
        one = rows.slice(position, 1)
        other = events.select(values).slice(position, 1).cast(one.schema)
        if winner(pa.concat_tables([one, other]).append_column(DELETE, flags), values) == 1:
            wins.append(position)
    return np.array(wins, np.int64), different


def _marked(upserts: pa.Table, deletes: Booleans, layout: Layout) -> pa.Table:
    """The rows with the column ``deleted``, and only the mark's own columns in a deleted one."""
    kept = {*layout.keys, *layout.order}
    if all(name in upserts.column_names for name in REQUIRED_COLUMNS):
        kept.update(MARK_COLUMNS)
    flags = pa.array(deletes)
    for index, name in enumerate(upserts.column_names):
        if name not in kept:
            column = upserts[name]
            nulls = pa.scalar(None, column.type)
            upserts = upserts.set_column(index, name, pc.if_else(flags, nulls, column))
    return upserts.append_column(DELETED_COLUMN, flags)
