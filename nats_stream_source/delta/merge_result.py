"""What a merge has changed: the figures that operators watch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.delta.upkeep import MaintenanceResult

CREATED_COLUMN = "created"
"""The time of an entry, unless the batch has dropped it."""


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
    if CREATED_COLUMN not in entries.column_names:
        return None
    column = entries[CREATED_COLUMN]
    if not pa.types.is_timestamp(column.type):
        return None
    micros = pc.max(column.cast(pa.timestamp("us", tz="UTC"), safe=False)).value
    return created_time(micros)


def created_time(micros: int | None) -> datetime | None:
    """The value of ``created`` with these microseconds since 1970."""
    return None if micros is None else datetime.fromtimestamp(micros / 1e6, timezone.utc)


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
