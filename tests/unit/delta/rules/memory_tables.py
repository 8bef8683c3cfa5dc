"""A table and its state table in memory, which events are merged into without an engine."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from nats_stream_source.delta.rules.changes import changes_of
from nats_stream_source.delta.rules.layout import (
    DELETE,
    END,
    SEQUENCE,
    START,
    UNAVAILABLE,
    Layout,
)
from nats_stream_source.delta.rules.rows import DecidingEvents, Integers, RowChanges
from tests.support.cdc.events import Event

_KEY = pa.string()
_VALUES = [pa.field("seq", pa.int64()), pa.field("a", pa.int64()), pa.field("b", pa.string())]


class MemoryTable:
    """Rows by slot, as a reader of the rule; a removed row leaves None.

    Attributes:
        columns_read: which columns of rows were read.
    """

    def __init__(self, schema: pa.Schema, layout: Layout) -> None:
        self.schema, self.layout = schema, layout
        self.slots: list[dict[str, Any] | None] = []
        self.columns_read: set[str] = set()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for row in self.slots if row is not None]

    def find(self, keys: pa.Table) -> Integers:
        at = {row["key"]: slot for slot, row in enumerate(self.slots) if row is not None}
        return np.array([at.get(key, -1) for key in keys["key"].to_pylist()], np.int64)

    def of_keys(self, keys: pa.Table) -> Integers:
        wanted = set(keys["key"].to_pylist())
        found = [n for n, row in enumerate(self.slots) if row is not None and row["key"] in wanted]
        if SEQUENCE in keys.column_names:
            found = self._since(found, {row["key"]: row[SEQUENCE] for row in keys.to_pylist()})
        random.shuffle(found)  # an executor has no order either
        return np.array(found, np.int64)

    def read(self, slots: Integers, columns: Sequence[str]) -> pa.Table:
        self.columns_read |= set(columns) if len(slots) else set()
        rows = [(self.slots[slot] if slot >= 0 else None) or {} for slot in slots.tolist()]
        return pa.Table.from_pylist(rows, self.schema).select(list(columns))

    def apply(self, changes: RowChanges) -> None:
        for slot in changes.removed.tolist():
            self.slots[slot] = None
        upserts = changes.upserts.to_pylist()
        for row, slot in zip(upserts, changes.replaced.tolist(), strict=True):
            old = self.slots[slot] if slot >= 0 else None
            if slot >= 0:
                self.slots[slot] = None
            self.slots.append({**(old or {}), **row})
        identities = [tuple(row[name] for name in self.layout.identity) for row in self.rows]
        assert len(set(identities)) == len(identities)

    def _since(self, slots: list[int], since: dict[str, int]) -> list[int]:
        """Leave out the rows that a reader can leave out."""
        start = self.layout.identity[-1]
        rows = [(slot, row) for slot in slots if (row := self.slots[slot]) is not None]
        first: dict[str, int] = {}
        for _, row in rows:
            if row[start] < since[row["key"]]:
                first[row["key"]] = max(first.get(row["key"], row[start]), row[start])
        kept = [(n, r) for n, r in rows if r[start] >= first.get(r["key"], since[r["key"]])]
        if random.random() < 0.5:
            return [n for n, row in kept]
        last = END if END in self.schema.names else SEQUENCE
        return [n for n, row in kept if (end := row[last]) is None or end >= since[row["key"]]]


def row_of(event: Event, *lacks: str) -> dict[str, Any]:
    """The row of an event in a batch, and the names of the values that it lacks."""
    own = {SEQUENCE: event.seq, DELETE: event.op == "D", UNAVAILABLE: list(lacks)}
    return {**event._asdict(), **own}


class MemoryTables:
    """See the module; if ``unavailable``, events name the values that they lack."""

    def __init__(
        self, scd_type: int, tracked: str = "ab", key: pa.DataType = _KEY, unavailable: bool = False
    ) -> None:
        self.tracked = tuple(tracked)
        values = [pa.field("key", key), *_VALUES]
        sequence = pa.field(SEQUENCE, pa.int64())
        lacks = [pa.field(UNAVAILABLE, pa.list_(pa.string()))] * unavailable
        self.events = pa.schema([*values, sequence, (DELETE, pa.bool_()), *lacks])
        self.layout = Layout(scd_type, ("key",), "bigint", (SEQUENCE,), "remove", times=False)
        state = self.layout.state("id")
        if scd_type == 2:
            table = pa.schema([*values, (START, pa.int64()), (END, pa.int64())])
            self.state = MemoryTable(self.events, state)
        else:
            table = pa.schema([*values, sequence])
            self.state = MemoryTable(pa.schema([values[0], sequence]), state)
        self.table = MemoryTable(table, self.layout)

    def merge(self, events: Iterable[Event | dict[str, Any]], *, crash: bool = False) -> RowChanges:
        """Merge a batch of events, or of their rows, reduced in two partitions.

        Args:
            crash: whether the process ends after the commit of the state.
        """
        rows = [row_of(one) if isinstance(one, Event) else one for one in events]
        parts = []
        for part in (rows[::2], rows[1::2]):
            deciding = DecidingEvents(self.events, self.layout)
            deciding.add(pa.RecordBatch.from_pylist(part, self.events))
            parts.append(deciding.table())
        batch = pa.concat_tables(parts)
        changes = changes_of(batch, self.layout, self.tracked, self.table, self.state)
        assert changes.state is not None
        self.state.apply(changes.state)
        if not crash:
            self.table.apply(changes)
        return changes

    def rows(self) -> list[tuple[Any, ...]]:
        bounds = (START, END) if self.layout.scd_type == 2 else ()
        columns = ("key", *bounds, "seq", "a", "b")
        rows = (tuple(row[name] for name in columns) for row in self.table.rows)
        return sorted(rows, key=lambda row: row[:2])
