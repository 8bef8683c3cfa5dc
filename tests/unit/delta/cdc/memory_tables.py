"""A table and its state table in memory, which events are merged into without an engine."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from nats_stream_source.delta.cdc.changes import RowChanges
from nats_stream_source.delta.cdc.layout import DELETE, END, SEQUENCE, START, Layout
from nats_stream_source.delta.cdc.merge_events import changes_of
from tests.support.cdc.events import Event

_VALUES = [
    ("key", pa.string()),
    ("seq", pa.int64()),
    ("a", pa.int64()),
    ("b", pa.string()),
]
EVENTS = pa.schema([*_VALUES, (SEQUENCE, pa.int64()), (DELETE, pa.bool_())])


class MemoryTable:
    """Rows by their identity."""

    def __init__(self, schema: pa.Schema, identity: Sequence[str]) -> None:
        self.schema, self.identity = schema, identity
        self.rows: dict[tuple[Any, ...], dict[str, Any]] = {}

    def read(self, keys: pa.Table, columns: Sequence[str]) -> pa.Table:
        wanted = set(keys["key"].to_pylist())
        rows = [row for row in self.rows.values() if row["key"] in wanted]
        if SEQUENCE in keys.column_names:
            since = {row["key"]: row[SEQUENCE] for row in keys.to_pylist()}
            rows = self._since(rows, since)
        random.shuffle(rows)  # an engine has no order either
        return pa.Table.from_pylist(rows, self.schema).select(list(columns))

    def _since(self, rows: list[dict[str, Any]], since: dict[str, int]) -> list[dict[str, Any]]:
        """Leave out the rows that a reader can leave out."""
        start = self.identity[-1]
        first: dict[str, int] = {}
        for row in rows:
            if row[start] < since[row["key"]]:
                first[row["key"]] = max(first.get(row["key"], row[start]), row[start])
        return [row for row in rows if row[start] >= first.get(row["key"], since[row["key"]])]

    def upsert(self, rows: pa.Table) -> None:
        for row in rows.to_pylist():
            self.rows[self._identity(row)] = row

    def remove(self, rows: pa.Table) -> None:
        for row in rows.to_pylist():
            self.rows.pop(self._identity(row), None)

    def _identity(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in self.identity)


class MemoryTables:
    """See the module."""

    def __init__(self, scd_type: int, tracked: str = "ab") -> None:
        self.tracked = tuple(tracked)
        self.layout = Layout(scd_type, ("key",), "bigint", (SEQUENCE,), "remove", times=False)
        state = self.layout.state("id")
        if scd_type == 2:
            table = pa.schema([*_VALUES, (START, pa.int64()), (END, pa.int64())])
            self.state = MemoryTable(EVENTS, state.identity)
        else:
            table = pa.schema([*_VALUES, (SEQUENCE, pa.int64())])
            columns = [("key", pa.string()), (SEQUENCE, pa.int64())]
            self.state = MemoryTable(pa.schema(columns), state.identity)
        self.table = MemoryTable(table, self.layout.identity)

    def changes(self, events: Iterable[Event]) -> RowChanges:
        rows = [
            {**event._asdict(), SEQUENCE: event.seq, DELETE: event.op == "D"} for event in events
        ]
        return changes_of(
            pa.Table.from_pylist(rows, EVENTS),
            self.layout,
            self.tracked,
            self.table.read,
            self.state.read,
        )

    def merge(self, events: Iterable[Event], *, crash: bool = False) -> RowChanges:
        """Merge a batch.

        Args:
            crash: whether the process ends after the commit of the state.
        """
        changes = self.changes(events)
        self.state.upsert(changes.state)
        if not crash:
            self.table.remove(changes.removed)
            self.table.upsert(changes.upserts)
        return changes

    def rows(self) -> list[tuple[Any, ...]]:
        bounds = (START, END) if self.layout.scd_type == 2 else ()
        columns = ("key", *bounds, "seq", "a", "b")
        rows = (tuple(row[name] for name in columns) for row in self.table.rows.values())
        return sorted(rows, key=lambda row: row[:2])
