"""A table with deletion vectors that one process merges into, without Spark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql.types import (
    BinaryType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from nats_stream_source.delta import Deletes, Upkeep
from nats_stream_source.delta.driver.engine import DriverEngine, opened_table
from nats_stream_source.delta.driver.merge_on_read.indexed_table import IndexedTable
from nats_stream_source.delta.driver.merge_on_read.table import MergeOnReadTable
from nats_stream_source.delta.driver.objects import TableObjects
from nats_stream_source.delta.limits import NO_LIMITS, AutoLimits, LimitCheck
from nats_stream_source.delta.location import TableLocation
from nats_stream_source.delta.table import TableChangedError
from tests.integration.delta.merge_model import Entry

BATCH = StructType(
    [
        StructField("bucket", StringType()),
        StructField("key", StringType()),
        StructField("value", BinaryType()),
        StructField("revision", LongType()),
        StructField("created", TimestampType()),
        StructField("operation", StringType()),
        StructField("stream_created", TimestampType()),
    ]
)
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
    """The newest entry of each key, as the driver collects them."""
    newest = {entry.key: entry for entry in sorted(entries, key=lambda entry: entry.order)}
    names = ARROW.names
    return pa.table(
        {name: [getattr(entry, name) for entry in newest.values()] for name in names}, ARROW
    )


class InProcessTable:
    """Merges into the table of a path as ``merge_changes`` does; created by the first batch."""

    def __init__(
        self,
        path: Path | str,
        deletes: Deletes = "remove",
        upkeep: Upkeep | None = None,
        limits: AutoLimits = NO_LIMITS,
        storage_options: dict[str, str] | None = None,
    ) -> None:
        self.path = str(path)
        self.deletes: Deletes = deletes
        self.upkeep = upkeep
        self.limits = limits
        self.opened = opened_table(TableLocation(self.path, "delta-rs", storage_options))

    def table(self) -> MergeOnReadTable:
        engine = DriverEngine(self.opened, LimitCheck(self.limits), True)
        table = engine.find_or_create(BATCH, self.deletes, self.upkeep)
        assert isinstance(table, MergeOnReadTable)
        return table

    def merge(self, *entries: Entry) -> int:
        """Merge a batch; returns the number of rows that changed."""

        def once() -> int:
            changed = self.table().merge_entries(arrow(entries), self.deletes).changed
            if changed:
                self.opened.after_commit(self.upkeep)
            return changed

        try:
            return once()
        except TableChangedError:
            return once()

    def crash(self) -> None:
        """Drop all state, as a process that ends."""
        self.opened.upkeep.wait()
        self.opened = opened_table(self.opened_location())

    def reopen(self) -> None:
        """Open the table as another process does: its rows are only in their files."""
        self.crash()
        self.opened.open(None, LimitCheck(self.limits))

    def opened_location(self) -> TableLocation:
        storage = self.opened.storage
        return TableLocation(storage.name, "delta-rs", storage.storage_options)

    @property
    def state(self) -> IndexedTable:
        assert self.opened.table is not None
        return self.opened.table


def index_of(table: IndexedTable) -> dict[bytes, tuple[str, int, int, int]]:
    """File, row and order of each key's row."""
    slots, index = table.index.live(), table.index
    files = [table.files[number].add["path"] for number in index.file[slots].tolist()]
    columns = (index.row[slots], index.created[slots], index.revision[slots])
    values = zip(files, *(column.tolist() for column in columns), strict=True)
    return dict(zip(index.identities(slots).to_pylist(), values, strict=True))


def rebuilt(path: Path | str, storage_options: dict[str, str] | None = None) -> IndexedTable:
    """The state of the newest version, from the table alone."""
    objects = TableObjects.at(str(path), storage_options)
    newest = DeltaTable(path, storage_options=storage_options)
    return IndexedTable(objects, newest, str(path), LimitCheck(NO_LIMITS))


def model_rows(rows: dict[str, Entry]) -> dict[str, tuple[int, datetime]]:
    return {key: (entry.revision, entry.stream_created) for key, entry in rows.items()}


def table_rows(found: list[dict[str, Any]]) -> dict[str, tuple[int, datetime]]:
    """The order of each key's row; fails for two rows of one key."""
    assert len({row["key"] for row in found}) == len(found)
    return {
        row["key"]: (row["revision"], row["stream_created"].astimezone(timezone.utc))
        for row in found
    }


Change = Callable[[], None]
