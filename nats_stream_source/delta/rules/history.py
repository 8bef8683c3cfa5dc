"""SCD type 2: one row for each version of a key, from the set of its events.

**Rules.** The events of a key in the order of their sequences, each sequence once:

- An upsert without an open row opens a row at its sequence.
- An upsert whose tracked columns equal those of the open row goes on with it: the row keeps its
  start and takes the event's values.
- Another upsert closes the open row at its sequence, and opens one.
- A delete closes the open row at its sequence. Without an open row it shows nothing, and still
  closes the row of an event before it that comes in later.

**From rows back to events.** The rows are a pure function of the events, so a batch is merged in
three steps: the events of its keys are read back from the rows and the state table, those of the
batch are added, and the rows are computed again. A row gives back its first event (the start, with
the row's values) and, if no row starts where it ends, a delete. That is all unless other events
took part in the row, or a delete closed no row: the state table has these (all events of a row that
several made, and such deletes). It has an event before a row is committed that hides it, and never
loses one, so rows that are older than the state give back the same events. In short: whatever is
read is a set of events that took place, and a repeat adds the rest.

**Bounds of reconcile.** In a history of a bucket, ``reconcile`` ends and starts rows at a sequence
that had no entry. If an entry of the key gets this sequence, it counts in place of the bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.delta.rules.layout import (
    DELETE,
    END,
    ENTRY_SEQUENCE,
    SEQUENCE,
    START,
    TIME,
    VALID_FROM,
    VALID_TO,
    Layout,
)
from nats_stream_source.delta.rules.rows import (
    Booleans,
    Integers,
    Reader,
    RowChanges,
    dense_groups,
    greater,
    key_codes,
    one_per_sequence,
    positions_in,
    same_rows,
    sequence_values,
)

# Where an event comes from, in the order in which one of several equal events is taken.
_STATE, _START, _BATCH, _END = range(4)


def history_changes(
    events: pa.Table, layout: Layout, tracked: Sequence[str], rows: Reader, state: Reader
) -> RowChanges:
    """The changes of a table with one row per version by valid events."""
    keys = list(layout.keys)
    values = [name for name in events.column_names if name not in (SEQUENCE, DELETE, TIME)]
    since = _first(events.select([*keys, SEQUENCE]), keys)
    times = [VALID_FROM, VALID_TO] if layout.times else []
    slots = rows.of_keys(since)
    known_rows = rows.read(slots, [*values, START, END, *times])
    chosen = pc.is_valid(known_rows[START])
    known_rows, slots = known_rows.filter(chosen), slots[np.asarray(chosen.to_numpy(), bool)]
    # Events of the state before the first row that is read belong to rows that are not.
    starts = known_rows.select([*keys, START]).rename_columns([*keys, SEQUENCE])
    begun = _first(pa.concat_tables([starts, since.cast(starts.schema)]), keys)
    state_slots = state.of_keys(begun)
    state_events = state.read(state_slots, events.column_names)
    later = _from(state_events, begun, keys)
    state_slots, state_events = state_slots[later], state_events.filter(pa.array(later))
    known, source = _known_events(events, known_rows, state_events, layout)
    known, source, groups, keyed = _in_order(known, source, layout)
    which, contradicted = one_per_sequence(known, groups, values)
    has_state = np.bincount(groups, source == _STATE) > 0
    known, source, codes = known.take(pa.array(which)), source[which], keyed[which]
    versions, hidden = _versions(known, codes, tracked, values, times)
    # A state event that counts no longer is replaced, since it would be read back instead.
    recorded = known.filter(pa.array((hidden | has_state) & (source != _STATE)))
    at = np.append(state_slots, -1)[positions_in(recorded, state_events, [*keys, SEQUENCE])]
    of_state = RowChanges(recorded, at, slots[:0])
    return _difference(versions, known_rows, slots, layout, of_state, len(contradicted))


def _first(sequences: pa.Table, keys: Sequence[str]) -> pa.Table:
    """The least sequence of each key."""
    codes, parts = key_codes(sequences, keys), sequence_values(sequences, [SEQUENCE])
    order = np.lexsort((*parts[::-1], codes))
    return sequences.take(pa.array(order[np.diff(codes[order], prepend=-1) != 0]))


def _from(events: pa.Table, sequences: pa.Table, keys: Sequence[str]) -> Booleans:
    """Whether each event has the sequence of its key or a later one."""
    at = pa.array(positions_in(events, sequences, keys))
    own = events.select([SEQUENCE])
    both = pa.concat_tables([own, sequences.select([SEQUENCE]).cast(own.schema).take(at)])
    parts, count = sequence_values(both, [SEQUENCE]), len(events)
    return ~greater([part[count:] for part in parts], [part[:count] for part in parts])


def _known_events(
    events: pa.Table, rows: pa.Table, state: pa.Table, layout: Layout
) -> tuple[pa.Table, Integers]:
    """All events that are known of the keys, with the table's types, and where each is from."""
    closed = rows.filter(pc.is_valid(rows[END]))
    fields = []
    for field in events.schema:
        name = {SEQUENCE: START, TIME: VALID_FROM}.get(field.name, field.name)
        fields.append(field if name == DELETE else rows.schema.field(name).with_name(field.name))
    schema = pa.schema(fields)

    def given_back(of: pa.Table, sequence: str, time: str, delete: bool) -> pa.Table:
        names = {SEQUENCE: sequence, TIME: time}
        columns = []
        for field in schema:
            name = field.name
            if name == DELETE:
                columns.append(pa.repeat(pa.scalar(delete), len(of)))
            elif delete and name not in names and name not in layout.keys:
                columns.append(pa.nulls(len(of), field.type))
            else:
                columns.append(of[names.get(name, name)])
        return pa.table(columns, schema=schema)

    parts = [
        state.cast(schema),
        given_back(rows, START, VALID_FROM, delete=False),
        events.cast(schema),
        given_back(closed, END, VALID_TO, delete=True),
    ]
    return pa.concat_tables(parts), np.repeat(np.arange(4), [len(part) for part in parts])


def _in_order(
    known: pa.Table, source: Integers, layout: Layout
) -> tuple[pa.Table, Integers, Integers, Integers]:
    """The events by key and sequence, with their source, key and sequence, and key as numbers.

    A row's start gives back an event only if the state does not have that of the sequence, and an
    end only if no row starts there. An end counts beside an upsert of the state: another writer has
    merged a delete with its sequence, before the state got the upsert.
    """
    codes = key_codes(known, layout.keys)
    parts = sequence_values(known, layout.order)
    groups = dense_groups([codes, *parts])
    in_state = np.bincount(groups, source == _STATE) > 0
    starts = np.bincount(groups, source == _START) > 0
    kept = ~((source == _START) & in_state[groups])
    deletes = np.asarray(known[DELETE].to_numpy(), bool)
    deleted = np.bincount(groups, (source == _STATE) & deletes) > 0
    kept &= ~((source == _END) & (deleted | starts)[groups])
    if layout.sequence == ENTRY_SEQUENCE:
        entries = np.isin(source, (_STATE, _BATCH))
        kept &= entries | ~_made(known, source) | (np.bincount(groups, entries) == 0)[groups]
    position = np.flatnonzero(kept)
    position = position[np.lexsort((source[position], groups[position]))]
    groups = groups[position]
    groups = np.cumsum(np.diff(groups, prepend=groups[:1]) != 0)
    return known.take(pa.array(position)), source[position], groups, codes[position]


def _made(known: pa.Table, source: Integers) -> Booleans:
    """Whether ``reconcile`` may have made a bound: its row has the revision of another entry."""
    made = source == _END
    if "revision" in known.column_names:
        sequence = pc.struct_field(known[SEQUENCE], "revision")
        own = pc.fill_null(pc.equal(known["revision"], sequence), False)
        made |= (source == _START) & ~np.asarray(own.to_numpy(), bool)
    return np.asarray(made, bool)


def _versions(
    known: pa.Table,
    codes: Integers,
    tracked: Sequence[str],
    values: Sequence[str],
    times: Sequence[str],
) -> tuple[pa.Table, np.ndarray]:
    """The rows of events in order, and the events that the rows do not show."""
    count = len(known)
    deletes = np.asarray(known[DELETE].to_numpy(), bool)
    unopened = np.ones(count, bool)  # whether the key has no open row before the event
    unopened[1:] = (codes[1:] != codes[:-1]) | deletes[:-1]
    same = np.zeros(count, bool)
    same[1:] = same_rows(known.slice(1), known.slice(0, max(count - 1, 0)), tracked)
    opens = ~deletes & (unopened | ~same)
    boundary = np.flatnonzero(opens | deletes)
    first = np.flatnonzero(opens)
    end = np.append(boundary, count)[np.searchsorted(boundary, first) + 1]
    closed = end < count
    closed[closed] = codes[end[closed]] == codes[first[closed]]
    ends = pa.array(np.where(closed, end, 0), mask=~closed)
    last = known.take(pa.array(end - 1))
    rows = last.select(list(values))
    rows = rows.append_column(START, known[SEQUENCE].take(pa.array(first)))
    rows = rows.append_column(END, known[SEQUENCE].take(ends))
    for name, which in zip(times, (pa.array(first), ends), strict=False):
        rows = rows.append_column(name, known[TIME].take(which))
    hidden = deletes & unopened
    several = end - first > 1
    steps = np.zeros(count + 1, np.int64)
    np.add.at(steps, first[several], 1)
    np.add.at(steps, end[several], -1)
    return rows, hidden | (np.cumsum(steps[:-1]) > 0)


def _difference(
    versions: pa.Table,
    rows: pa.Table,
    slots: Integers,
    layout: Layout,
    of_state: RowChanges,
    contradictions: int,
) -> RowChanges:
    """The changes from the table's rows to the versions."""
    before = positions_in(versions, rows, layout.identity)
    old = rows.take(pa.array(np.maximum(before, 0), mask=before < 0))
    changed = (before < 0) | ~same_rows(versions, old, versions.column_names)
    removed = np.ones(len(rows), bool)
    removed[before[before >= 0]] = False
    replaced = np.full(len(versions), -1, np.int64)
    replaced[before >= 0] = slots[before[before >= 0]]
    return RowChanges(
        versions.filter(pa.array(changed)),
        replaced[changed],
        slots[removed],
        of_state,
        contradictions,
    )
