"""A table that one process merges into, without Spark."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from nats_stream_source.delta.driver.engine import DriverEngine
from nats_stream_source.delta.driver.index import NO_FILE
from nats_stream_source.delta.driver.snapshot import Snapshot
from nats_stream_source.delta.driver.storage import TableStorage
from nats_stream_source.delta.driver.table import DriverTable
from nats_stream_source.delta.merge_result import MergeResult
from nats_stream_source.delta.rules.events import EventBatch, EventShape, EventTable
from nats_stream_source.delta.rules.layout import Deletes, Layout
from nats_stream_source.delta.tables import TableChangedError
from nats_stream_source.delta.upkeep import Upkeep
from tests.integration.delta.merge_model import Entry, Model
from tests.support.delta import rows_of

both_writers = pytest.mark.parametrize("vectors", [True, False])
ARROW = pa.schema(
    [
        ("bucket", pa.string()),
        ("key", pa.string()),
        ("value", pa.binary()),
        ("revision", pa.int64()),
        ("created", pa.timestamp("us", "UTC")),
        ("operation", pa.string()),
        ("stream_created", pa.timestamp("us", "UTC")),
    ]
)


def arrow(entries: Sequence[Entry]) -> pa.Table:
    """Entries with the columns of ``nats_kv`` that a table stores."""
    return pa.table({name: [getattr(e, name) for e in entries] for name in ARROW.names}, ARROW)


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
        storage = TableStorage(self.path, self.path, storage_options)
        self._started = partial(DriverEngine, storage, vectors, limit)
        self.engine = self._started()

    def merge(self, *entries: Entry) -> int:
        """Merge a batch of entries; returns the number of rows that changed."""
        return self.result(*entries).changed

    def result(self, *entries: Entry) -> MergeResult:
        return self.merge_rows(arrow(entries))

    def merge_rows(self, rows: pa.Table) -> MergeResult:
        layout = Layout.of_entries(rows.schema.names, self.deletes)
        return self.merge_events(rows, EventShape(rows.schema, layout, computed=True))

    def merge_events(self, rows: pa.Table, shape: EventShape) -> MergeResult:
        batch = EventBatch(shape, EventTable(rows))
        try:
            return self.engine.merge(batch, self.upkeep)
        except TableChangedError:
            return self.engine.merge(batch, self.upkeep)

    def crash(self) -> None:
        """Drop all state, as a process that ends."""
        self.engine.wait()
        self.engine = self._started()

    def reopen(self) -> None:
        """Open the table as another process does: its rows are only in their files."""
        self.crash()
        self.engine.table.indexed()

    @property
    def state(self) -> Snapshot:
        assert self.engine.table.snapshot is not None
        return self.engine.table.snapshot


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


def model_rows(rows: dict[str, Entry]) -> dict[str, tuple[int, datetime]]:
    return {key: (entry.revision, entry.stream_created) for key, entry in rows.items()}


def table_rows(found: list[dict[str, Any]]) -> dict[str, tuple[int, datetime]]:
    """The order of each key's row; fails for two rows of one key."""
    assert len({row["key"] for row in found}) == len(found)
    return {
        row["key"]: (row["revision"], row["stream_created"].astimezone(timezone.utc))
        for row in found
    }


def expect(
    table: Path | str, *batches: Sequence[Entry], storage_options: dict[str, str] | None = None
) -> None:
    """The rows of the newest version are those of the batches, without deleted keys."""
    model = Model("remove")
    for batch in batches:
        model.merge(batch)
    found = rows_of(DeltaTable(table, storage_options=storage_options))
    assert table_rows(found) == model_rows(model.rows)
