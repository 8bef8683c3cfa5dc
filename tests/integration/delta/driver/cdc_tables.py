"""A table of change data and its state table that one process merges events into, without Spark."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from nats_stream_source.delta.merge_result import MergeResult
from nats_stream_source.delta.rules.events import EventShape
from nats_stream_source.delta.rules.layout import DELETE, END, SEQUENCE, START, Deletes, Layout
from nats_stream_source.delta.upkeep import Upkeep
from tests.integration.delta.driver.in_process import InProcessTable, index_of, rebuilt
from tests.support.cdc.events import Event
from tests.support.delta import rows_of

VALUES = pa.schema(
    [("key", pa.string()), ("seq", pa.int64()), ("a", pa.int64()), ("b", pa.string())]
)

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
    """See the module."""

    def __init__(
        self,
        path: Path,
        scd_type: int,
        kind: str = "bigint",
        *,
        deletes: Deletes = "remove",
        vectors: bool | None = None,
        upkeep: Upkeep | None = None,
    ) -> None:
        self.path, self.scd_type = path, scd_type
        self.kind, self.sequence = KINDS[kind]
        self.layout = Layout(scd_type, ("key",), kind, (SEQUENCE,), deletes, times=False)
        own = [pa.field(SEQUENCE, self.kind), pa.field(DELETE, pa.bool_())]
        self.events = pa.schema([*VALUES, *own])
        self.table = InProcessTable(path, deletes, upkeep, vectors=vectors)

    def merge(self, events: Iterable[Event]) -> MergeResult:
        rows = [
            {
                **{name: getattr(event, name) for name in VALUES.names},
                SEQUENCE: self.sequence(event.seq),
                DELETE: event.op == "D",
            }
            for event in events
        ]
        tracked = ("a", "b") if self.scd_type == 2 else ()
        shape = EventShape(self.events, self.layout, tracked)
        return self.table.merge_events(pa.Table.from_pylist(rows, self.events), shape)

    @property
    def state_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}__cdc_state")

    def versions(self) -> list[int]:
        paths = [path for path in (self.path, self.state_path) if path.exists()]
        return [DeltaTable(path).version() for path in paths]

    def rows(self) -> list[tuple[Any, ...]]:
        """The rows as the model of the tests has them."""
        number = {repr(pa.scalar(self.sequence(n), self.kind).as_py()): n for n in range(100)}
        of_kind = number.get if self.kind != pa.int64() else ast.literal_eval
        names = ["key", "seq", "a", "b"]
        if self.scd_type == 2:
            names[1:1] = [START, END]
        elif self.layout.deletes == "mark":
            names.append("deleted")
        rows = []
        for row in rows_of(DeltaTable(self.path)):
            for name in (START, END):
                row[name] = of_kind(repr(row.get(name)))
            if self.layout.deletes == "mark":
                row["seq"] = of_kind(repr(row[SEQUENCE]))
            rows.append(tuple(row[name] for name in names))
        return sorted(rows, key=lambda row: row[:2])

    def verify_index(self) -> None:
        """The kept indexes equal those that are built from the tables."""
        self.table.engine.wait()
        for table, path in (
            (self.table.engine.find(), self.path),
            (self.table.engine.find_state(), self.state_path),
        ):
            if table is not None:
                snapshot = table.indexed()
                snapshot.refresh()
                assert index_of(snapshot) == index_of(rebuilt(path))
