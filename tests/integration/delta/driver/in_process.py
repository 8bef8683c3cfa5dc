"""A table that one process merges into, without Spark."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from nats_stream_source.delta.driver.engine import DriverEngine, opened_table
from nats_stream_source.delta.driver.snapshot import Snapshot
from nats_stream_source.delta.driver.storage import TableStorage
from nats_stream_source.delta.limits import IndexLimit
from nats_stream_source.delta.merge_result import MergeResult
from nats_stream_source.delta.rules.events import EventBatch, EventShape, EventTable
from nats_stream_source.delta.rules.layout import Deletes, Layout
from nats_stream_source.delta.tables import TableChangedError
from nats_stream_source.delta.upkeep import Upkeep
from tests.integration.delta.merge_model import Entry

NO_LIMIT = IndexLimit()
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
        limit: IndexLimit = NO_LIMIT,
        storage_options: dict[str, str] | None = None,
        vectors: bool | None = None,
    ) -> None:
        self.path = str(path)
        self.deletes: Deletes = deletes
        self.upkeep = upkeep
        self.limit = limit
        self.vectors = vectors
        self.storage_options = storage_options
        self.opened = opened_table(self.path, self.path, storage_options)

    def engine(self) -> DriverEngine:
        return DriverEngine(self.opened, self.vectors, self.limit)

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
            return self.engine().merge(batch, self.upkeep)
        except TableChangedError:
            return self.engine().merge(batch, self.upkeep)

    def crash(self) -> None:
        """Drop all state, as a process that ends."""
        self.opened.wait()
        self.opened = opened_table(self.path, self.path, self.storage_options)

    def reopen(self) -> None:
        """Open the table as another process does: its rows are only in their files."""
        self.crash()
        self.opened.open(None, self.limit)

    @property
    def state(self) -> Snapshot:
        assert self.opened.snapshot is not None
        return self.opened.snapshot


def index_of(table: Snapshot) -> dict[bytes, tuple[Any, ...]]:
    """File, row and order of the row of each identity."""
    slots, index = table.index.live(), table.index
    files = [table.files[number].add["path"] for number in index.file[slots].tolist()]
    columns: list[Any] = [index.row[slots], *(part[slots] for part in index.order)]
    values = zip(files, *(column.tolist() for column in columns), strict=True)
    return dict(zip(index.identities(slots).to_pylist(), values, strict=True))


def rebuilt(path: Path | str, storage_options: dict[str, str] | None = None) -> Snapshot:
    """The state of the newest version, from the table alone."""
    storage = TableStorage(str(path), str(path), storage_options)
    newest = DeltaTable(path, storage_options=storage_options)
    return Snapshot(storage, newest, IndexLimit())


def model_rows(rows: dict[str, Entry]) -> dict[str, tuple[int, datetime]]:
    return {key: (entry.revision, entry.stream_created) for key, entry in rows.items()}


def table_rows(found: list[dict[str, Any]]) -> dict[str, tuple[int, datetime]]:
    """The order of each key's row; fails for two rows of one key."""
    assert len({row["key"] for row in found}) == len(found)
    return {
        row["key"]: (row["revision"], row["stream_created"].astimezone(timezone.utc))
        for row in found
    }
