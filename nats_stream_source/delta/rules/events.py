"""The events of a batch: its rows with the columns by which the rule orders and applies them.

- ``__SEQUENCE``: the sequence, unless the row has it in columns of its own
- ``__DELETE``: whether the event deletes its key; a condition that is null does not
- ``__TIME``: with versions of a bucket's entries, the time of the entry
- ``__UNAVAILABLE``: the columns whose value the row keeps, if the rules name a column of them
- ``__REPLACES``: for ``reconcile``, the order of the one row that the event may change

Where these follow from a bucket's entries, they are computed here; else the rows have them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.delta.rules.arguments import ChangeRules, is_entries
from nats_stream_source.delta.rules.layout import (
    DELETE,
    DELIVERY_COLUMNS,
    EVENT_COLUMNS,
    ORDER_COLUMNS,
    REQUIRED_COLUMNS,
    SEQUENCE,
    TIME,
    Layout,
    entry_keys,
)
from nats_stream_source.delta.schema import conform, sql_type, stored_field

_ENTRY_COLUMNS = (*REQUIRED_COLUMNS, "created", *DELIVERY_COLUMNS)


@dataclass(frozen=True, slots=True)
class EventShape:
    """The columns of a batch's rows, and how its events change a table.

    Attributes:
        rows: the columns of the rows as they are given.
        layout: of the table.
        tracked: with SCD type 2, the columns whose changes make a version.
        untracked: the columns that do not; None if the rules name those that do.
        computed: whether the event columns are computed from those of a bucket's entries.
        target: the columns of an event with the types of a table; None before the table is known.
    """

    rows: pa.Schema
    layout: Layout
    tracked: tuple[str, ...] = ()
    untracked: frozenset[str] | None = None
    computed: bool = False
    target: pa.Schema | None = None

    @property
    def schema(self) -> pa.Schema:
        """The columns of an event."""
        if not self.computed:
            return self.rows
        own = [pa.field(DELETE, pa.bool_())]
        if SEQUENCE in self.layout.order:
            parts = [stored_field(self.rows.field(name)) for name in ORDER_COLUMNS]
            own.append(pa.field(SEQUENCE, pa.struct(parts)))
        if self.layout.times:
            own.append(stored_field(self.rows.field("created")).with_name(TIME))
        return pa.schema([*self.rows, *own])

    def fitted(self, table: pa.Schema, state: pa.Schema | None) -> EventShape:
        """The shape of the events with the columns and types of a table.

        With SCD type 2, an event has a null for each column of an earlier batch that its batch
        lacks: its version is computed from it again and again, and must not depend on its batch.

        Args:
            table: its columns, with those of the events.
            state: the columns of its state table, which has those of earlier batches; None if the
                table is new.
        """
        layout, given = self.layout, self.rows.names
        names = [name for name in table.names if name not in layout.reserved()]
        earlier = state.names if state is not None and layout.scd_type == 2 else ()
        added = [name for name in names if name in earlier and name not in given]
        fields = [table.field(name) for name in names if name in given or name in added]
        own = [stored_field(field) for field in self.schema if field.name in EVENT_COLUMNS]
        known = [name for name in self.tracked if name in names]
        more = [n for n in added if self.untracked is not None and n not in self.untracked]
        return replace(self, tracked=(*known, *more), target=pa.schema([*fields, *own]))

    def events(self, rows: pa.Table, table: str) -> pa.Table:
        """The events of rows of this shape.

        Args:
            rows: as they are given.
            table: path or name, for errors.

        Raises:
            ConfigurationError: a part of a value is null that is NOT NULL in the table.
        """
        if self.computed:
            rows = _with_event_columns(rows, self.layout)
        return rows if self.target is None else conform(rows, self.target, table)


def event_shape(
    rows: pa.Schema,
    rules: ChangeRules,
    columns: Sequence[str],
    order: tuple[str, ...],
    in_sequence: Iterable[str] = ORDER_COLUMNS,
    *,
    computed: bool = True,
) -> EventShape:
    """The shape of a batch's events, by the rules.

    Args:
        rows: the selected columns, with those of the events unless these are computed.
        rules: how the events change the table.
        columns: of the batch.
        order: the columns of an event with its sequence.
        in_sequence: the columns of the batch that are a part of the sequence.
        computed: whether the event columns are computed from those of a bucket's entries.

    Raises:
        ConfigurationError: the table cannot have these events.
    """
    selected, entries = rules.selected(columns), is_entries(columns)
    if rules.of_entries(columns):
        layout = Layout.of_entries(selected, rules.deletes)
    else:
        keys = rules.keys or entry_keys(selected)
        times = rules.stored_as_scd_type == 2 and entries and "created" in columns
        layout = Layout(rules.stored_as_scd_type, keys, "", order, rules.deletes, times)
    shape = EventShape(rows, layout, rules.track_history_column_list or (), computed=computed)
    layout.validate_events(shape.schema, selected)
    if not layout.entries:
        kinds = (sql_type(shape.schema.field(name).type) for name in order)
        shape = replace(shape, layout=replace(layout, sequence=", ".join(kinds)))
    if rules.stored_as_scd_type == 2 and not rules.track_history_column_list:
        # Each entry has its own of these columns, so that each put would be a version.
        untracked = {*layout.keys, *in_sequence, *(_ENTRY_COLUMNS if entries else ())}
        untracked.update(rules.track_history_except_column_list or ())
        tracked = tuple(name for name in selected if name not in untracked)
        shape = replace(shape, tracked=tracked, untracked=frozenset(untracked))
    return shape


class EventSource(Protocol):
    """The rows of a batch, wherever they are."""

    def parts(self, shape: EventShape) -> Iterator[pa.Table]:
        """The rows whose events decide, in one table or several; all events of a key are in one.

        The rows have the columns of ``shape.rows``. Each part is held in memory.
        """


@dataclass(frozen=True, slots=True)
class EventTable:
    """Rows in memory as an :class:`EventSource`."""

    rows: pa.Table

    def parts(self, shape: EventShape) -> Iterator[pa.Table]:
        """All rows at once."""
        yield self.rows


@dataclass(frozen=True, slots=True)
class EventBatch:
    """A batch: the shape of its events, and their source.

    Attributes:
        reconciles: whether these are the differences of a table from its bucket.
    """

    shape: EventShape
    source: EventSource
    reconciles: bool = False


def _with_event_columns(entries: pa.Table, layout: Layout) -> pa.Table:
    deletes = pc.fill_null(pc.not_equal(entries["operation"], "PUT"), False)
    events = entries.append_column(DELETE, deletes)
    if SEQUENCE in layout.order:
        order = [entries[name].combine_chunks() for name in ORDER_COLUMNS]
        sequence = pa.StructArray.from_arrays(order, list(ORDER_COLUMNS))
        events = events.append_column(SEQUENCE, sequence)
    return events.append_column(TIME, entries["created"]) if layout.times else events
