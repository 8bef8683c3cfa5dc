"""What a merge has changed: the figures that operators watch, also as metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.delta.upkeep import MaintenanceResult
from nats_stream_source.metrics.table import (
    CHANGED_BYTES,
    COMPACTED,
    COMPACTIONS,
    CONTRADICTIONS,
    FILES,
    FRESHNESS,
    INDEX_BYTES,
    INDEX_KEYS,
    MERGED_ROWS,
    MERGES,
    NEWEST,
    VACUUMED,
    WRITTEN_BYTES,
)

if TYPE_CHECKING:
    from nats_stream_source.metrics.recorder import Recorder


@dataclass(frozen=True, slots=True)
class MergeResult:
    """What a merge has changed, and the table after it.

    Attributes:
        engine: ``"driver"`` or ``"spark"``.
        inserted, updated, deleted: number of rows. A marked row is an inserted or updated one.
        newest: ``created`` of the newest entry that was merged; None if nothing changed or the
            batch lacks the column.
        changed_bytes: size of the inserted and updated rows in Arrow; None if unknown.
        written_bytes: size of all objects of the table that were written since the last result,
            compaction included; None if unknown.
        files: number of live data files; None if unknown.
        index_keys, index_bytes: size of the index of keys; 0 for an engine without it.
        maintained: the upkeep that has ended since the last result.
        contradictions: how many sequences had events with different values.
    """

    engine: str
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    newest: datetime | None = None
    changed_bytes: int | None = None
    written_bytes: int | None = None
    files: int | None = None
    index_keys: int = 0
    index_bytes: int = 0
    maintained: MaintenanceResult = field(default_factory=MaintenanceResult)
    contradictions: int = 0

    def __add__(self, later: MergeResult) -> MergeResult:
        """The result of two commits of one batch, or of two batches."""
        newest = [time for time in (self.newest, later.newest) if time is not None]
        return replace(
            later,
            inserted=self.inserted + later.inserted,
            updated=self.updated + later.updated,
            deleted=self.deleted + later.deleted,
            newest=max(newest, default=None),
            changed_bytes=_sum(self.changed_bytes, later.changed_bytes),
            written_bytes=_sum(self.written_bytes, later.written_bytes),
            maintained=self.maintained + later.maintained,
            contradictions=self.contradictions + later.contradictions,
        )

    @property
    def changed(self) -> int:
        """The number of rows that changed."""
        return self.inserted + self.updated + self.deleted


def newest_created(entries: pa.Table) -> datetime | None:
    """``created`` of the newest entry; None without entries or without such a column of times."""
    if "created" not in entries.column_names:
        return None
    column = entries["created"]
    if not pa.types.is_timestamp(column.type):
        return None
    micros = pc.max(column.cast(pa.timestamp("us", tz="UTC"), safe=False)).value
    return None if micros is None else datetime.fromtimestamp(micros / 1e6, timezone.utc)


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def merge_metrics(active: Recorder, table: str, result: MergeResult) -> Callable[[str], None]:
    """Return a function that records a merge which has just ended for a query by its label."""
    now = time.time()

    def record(query: str) -> None:
        active.add(MERGES, 1, query, table, result.engine)
        for change in ("inserted", "updated", "deleted"):
            active.add(MERGED_ROWS, getattr(result, change), query, table, change)
        if result.newest is not None:
            newest = result.newest.timestamp()
            active.observe(FRESHNESS, max(0.0, now - newest), query, table)
            active.set(NEWEST, newest, query, table)
        done = result.maintained
        for metric, amount in (
            (CONTRADICTIONS, result.contradictions),
            (CHANGED_BYTES, result.changed_bytes),
            (WRITTEN_BYTES, result.written_bytes),
            (COMPACTED, done.compacted),
            (COMPACTIONS, done.written),
            (VACUUMED, done.deleted),
        ):
            if amount is not None:
                active.add(metric, amount, query, table)
        if result.files is not None:
            active.set(FILES, result.files, query, table)
        if result.engine == "driver":
            active.set(INDEX_KEYS, result.index_keys, query, table)
            active.set(INDEX_BYTES, result.index_bytes, query, table)

    return record
