"""Tables that one process merges entries or events of change data into, without Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from nats_stream_source.delta.driver.index import NO_FILE
from nats_stream_source.delta.driver.snapshot import Snapshot
from nats_stream_source.delta.driver.storage import TableStorage
from nats_stream_source.delta.driver.table import DriverTable
from nats_stream_source.delta.merge_result import MergeResult
from nats_stream_source.delta.rules.events import EventBatch, EventShape
from nats_stream_source.delta.rules.layout import DELETE, END, SEQUENCE, START, Deletes, Layout
from nats_stream_source.delta.tables import TableChangedError
from nats_stream_source.delta.upkeep import Upkeep
from tests.integration.delta.merge_model import Entry, Model, stored
from tests.support.cdc.events import Event
from tests.support.delta import ENTRIES, rows_of

both_writers = pytest.mark.parametrize("vectors", [True, False])


def arrow(entries: Sequence[Entry]) -> pa.Table:
    """Entries with the columns that a table stores."""
    return pa.table({name: [getattr(e, name) for e in entries] for name in ENTRIES.names}, ENTRIES)


class InProcessTable:
    """Merges into the table of a path as ``merge_changes`` does; created by the first batch."""

    def __init__(
        self,
        path: Path | str,
        deletes: Deletes = "remove",
        upkeep: Upkeep | None = None,
        limit: int | None = None,
        storage_options: dict[str, str] | None = None,
        vectors: bool | None = None,
    ) -> None:
        self.path = str(path)
        self.deletes: Deletes = deletes
        self.upkeep = upkeep
        self.options = storage_options
        storage = TableStorage(self.path, self.path, storage_options)
        self._started = partial(DriverTable, storage, vectors, limit)
        self.table = self._started()

    def merge(self, *entries: Entry) -> int:
        """Merge a batch of entries; returns the number of rows that changed."""
        return self.result(*entries).changed

    def result(self, *entries: Entry) -> MergeResult:
        return self.merge_rows(arrow(entries))

    def merge_rows(self, rows: pa.Table) -> MergeResult:
        layout = Layout.of_entries(rows.schema.names, self.deletes)
        return self.merge_events(rows, EventShape(rows.schema, layout, computed=True))

    def merge_events(self, rows: pa.Table, shape: EventShape) -> MergeResult:
        batch = EventBatch.in_memory(shape, rows)
        try:
            return self.table.merge(batch, self.upkeep)
        except TableChangedError:
            return self.table.merge(batch, self.upkeep)

    def crash(self) -> None:
        """Drop all state, as a process that ends."""
        self.table.wait()
        self.table = self._started()

    def reopen(self) -> None:
        """Open the table as another process does: its rows are only in their files."""
        self.crash()
        self.table.indexed()

    @property
    def found(self) -> DriverTable:
        """The table, which exists; not opened by a merge."""
        assert self.table.exists()
        return self.table

    @property
    def state(self) -> Snapshot:
        assert self.table.snapshot is not None
        return self.table.snapshot

    def verify_index(self) -> None:
        """The kept indexes of the table and its state equal those that are built from them."""
        self.table.wait()
        tables = {self.path: self.table, f"{self.path}__cdc_state": self.table.state()}
        for path, table in tables.items():
            if table.exists():
                snapshot = table.indexed()
                snapshot.refresh()
                assert index_of(snapshot) == index_of(rebuilt(path, self.options))


def index_of(table: Snapshot) -> dict[str, tuple[Any, ...]]:
    """File, row and order of the row of each identity, which the index finds by it."""
    index = table.index
    slots = np.flatnonzero(index.file != NO_FILE)
    assert table.layout is not None
    identities = table.read(slots, table.layout.identity)
    assert index.find(identities).tolist() == slots.tolist()
    files = [table.files[number].add["path"] for number in index.file[slots].tolist()]
    columns: list[Any] = [index.row[slots], *(part[slots] for part in index.order)]
    values = zip(files, *(column.tolist() for column in columns), strict=True)
    return dict(zip(map(repr, identities.to_pylist()), values, strict=True))


def rebuilt(path: Path | str, storage_options: dict[str, str] | None = None) -> Snapshot:
    """The state of the newest version, from the table alone."""
    return DriverTable(TableStorage(str(path), str(path), storage_options), None).indexed()


def expect(
    table: Path | str, *batches: Sequence[Entry], storage_options: dict[str, str] | None = None
) -> None:
    """The rows of the newest version are those of the batches, without deleted keys."""
    model = Model("remove")
    for batch in batches:
        model.merge(batch)
    assert stored(table, storage_options) == model.stored()


KINDS: dict[str, tuple[pa.DataType, Callable[[int], Any]]] = {
    "bigint": (pa.int64(), lambda seq: seq),
    "struct": (
        pa.struct([("lsn", pa.timestamp("us", "UTC")), ("seq", pa.int32())]),
        lambda seq: {"lsn": seq // 10, "seq": seq % 10},
    ),
    "string": (pa.string(), lambda seq: f"{seq:06}"),
}
"""Types of a sequence, and the value for a number: the index has the first two."""


class CdcTable:
    """A table of change data and its state table.

    Args:
        more: arguments of the table in this process.
    """

    def __init__(self, path: Path, scd_type: int, kind: str = "bigint", **more: Any) -> None:
        self.path, self.scd_type = path, scd_type
        self.kind, self.sequence = KINDS[kind]
        self.table = InProcessTable(path, **more)
        deletes = self.table.deletes
        self.layout = Layout(scd_type, ("key",), kind, (SEQUENCE,), deletes, times=False)
        values = [("key", pa.string()), ("seq", pa.int64()), ("a", pa.int64()), ("b", pa.string())]
        self.events = pa.schema([*values, (SEQUENCE, self.kind), (DELETE, pa.bool_())])

    def merge(self, events: Iterable[Event]) -> MergeResult:
        rows = [
            {**one._asdict(), SEQUENCE: self.sequence(one.seq), DELETE: one.op == "D"}
            for one in events
        ]
        tracked = ("a", "b") if self.scd_type == 2 else ()
        shape = EventShape(self.events, self.layout, tracked)
        return self.table.merge_events(pa.Table.from_pylist(rows, self.events), shape)

    def rows(self) -> list[tuple[Any, ...]]:
        """The rows as the model of the tests has them."""
        number = {repr(pa.scalar(self.sequence(n), self.kind).as_py()): n for n in range(100)}
        marks = self.layout.deletes == "mark"
        bounds = (START, END) if self.scd_type == 2 else ()
        names, rows = ("key", *bounds, "seq", "a", "b", *(["deleted"] * marks)), []
        for row in rows_of(DeltaTable(self.path)):
            for name in (START, END):
                row[name] = number.get(repr(row.get(name)))
            if marks:
                row["seq"] = number.get(repr(row[SEQUENCE]))
            rows.append(tuple(row[name] for name in names))
        return sorted(rows, key=lambda row: row[:2])
