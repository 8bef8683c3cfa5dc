"""Merges of events by the driver's process: the state table first, then the table.

The rows and the state of the events' keys are read, :mod:`nats_stream_source.delta.cdc` computes
the changes, and each table gets one commit. The state is read after the table's version and written
before its next one. If another writer commits that one first, all of it begins again with the newer
version, so the last committed version always has the events of every writer.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from nats_stream_source.delta.cdc.changes import Reader, RowChanges
from nats_stream_source.delta.cdc.events import Events
from nats_stream_source.delta.cdc.history import events_that_count
from nats_stream_source.delta.cdc.latest import greater_deletes
from nats_stream_source.delta.cdc.layout import Layout
from nats_stream_source.delta.cdc.merge_events import changes_of
from nats_stream_source.delta.cdc.tables import RowTable
from nats_stream_source.delta.merge_result import MergeResult
from nats_stream_source.delta.upkeep import Upkeep


def merge_collected(
    events: pa.Table,
    batch: Events,
    table: RowTable,
    state: RowTable | None,
    upkeep: Upkeep | None,
) -> MergeResult:
    """Merge events; returns what has changed in the table.

    Args:
        events: those of the batch that decide; see :mod:`nats_stream_source.delta.cdc.events`.
        batch: the batch.
        table: the table.
        state: its state table, if its layout has one.
        upkeep: of both tables.
    """
    layout, tracked = batch.layout, batch.tracked
    if state is not None:
        state.add_columns(layout.state_schema(batch.schema).fields)
    table.add_columns(batch.columns)

    def select(read_rows: Reader) -> RowChanges:
        changes = changes_of(
            events, layout, tracked, read_rows, state.read_rows if state else _nothing
        )
        if state is not None and len(changes.state):
            state.change_rows(lambda read: _recorded(changes.state, layout, read), upkeep)
        return changes

    return table.change_rows(select, upkeep)


def _recorded(rows: pa.Table, layout: Layout, read: Reader) -> RowChanges:
    """The changes of the state table, where another writer can have recorded events meanwhile."""
    counting = greater_deletes if layout.scd_type == 1 else events_that_count
    rows = counting(rows, layout, read)
    return RowChanges(rows, rows[:0], rows[:0], 0)


def _nothing(keys: pa.Table, columns: Sequence[str]) -> pa.Table:
    raise AssertionError("a table with marked deletes does not have a state table")
