"""The table of a follower: entries in, commits out.

A commit has the rows and the position after them
(:mod:`nats_stream_source.delta.driver.position`). The methods wait for the storage, so the follower
calls them in a thread, one at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.delta.compare_with_bucket import compare_with_bucket
from nats_stream_source.delta.conflicts import retry_conflicts
from nats_stream_source.delta.driver.position import PositionLog
from nats_stream_source.delta.driver.storage import TableStorage
from nats_stream_source.delta.driver.table import DriverTable
from nats_stream_source.delta.location import TableLocation
from nats_stream_source.delta.merge_result import MergeResult
from nats_stream_source.delta.rules.events import ChangeRules, EventBatch, event_shape
from nats_stream_source.delta.rules.reconciled import open_row_columns, open_rows
from nats_stream_source.delta.tables import EngineRefusedError, TableChangedError
from nats_stream_source.delta.upkeep import Upkeep
from nats_stream_source.errors import ConfigurationError
from nats_stream_source.jetstream.subjects import filter_pattern
from nats_stream_source.options import KvOptions
from nats_stream_source.rows.arrow import arrow_schema
from nats_stream_source.rows.offsets import Position

_T = TypeVar("_T")


class FollowedTable:
    """Merges the entries of one bucket into one table."""

    def __init__(
        self,
        location: TableLocation,
        rules: ChangeRules,
        options: KvOptions,
        position: PositionLog,
        upkeep: Upkeep | None,
    ) -> None:
        self.name = location.name
        self.position = position
        self._upkeep = upkeep
        storage = TableStorage(location.name, location.uri, location.storage_options)
        self._table = DriverTable(storage, position=position)
        self._options = options
        columns = arrow_schema("nats_kv", options.added_columns)
        selected = rules.selected(columns.names)
        self._columns = pa.schema([columns.field(name) for name in selected])
        self._shape = event_shape(self._columns, rules, columns.names)

    @property
    def keys(self) -> int:
        """The number of rows; 0 while the table is not open."""
        snapshot = self._table.snapshot
        return 0 if snapshot is None else sum(one.live_rows for one in [*snapshot.files.values()])

    def open(self) -> Position | None:
        """Open the table, or create it; returns its position, None if it does not have one."""
        # An empty merge verifies the layout, and creates the table.
        self._merge(EventBatch.in_memory(self._shape, self._columns.empty_table()))
        table = self._table
        self._changed(lambda: table.read(lambda _: self.position.read(table.opened())))
        return self.position.stored

    def refresh(self) -> None:
        """Read the commits of other writers; PositionVoidError after a RESTORE."""
        table = self._table
        self._changed(
            lambda: table.read(lambda _: self.position.actions(table.opened(), changed=False))
        )

    def merge(
        self, rows: pa.RecordBatch, position: Position | None, *, required: bool
    ) -> MergeResult:
        """Merge entries; one commit if they change a row.

        Args:
            rows: entries in their order.
            position: of the last one; None to commit rows without a position.
            required: whether the position is committed even if no row changes.
        """
        self.position.next, self.position.required = position, required
        events = pa.Table.from_batches([rows.select(self._columns.names)], self._columns)
        return self._merge(EventBatch.in_memory(self._shape, events))

    def newest_revision(self, created: int) -> int:
        """The greatest revision of the rows of a stream; 0 if there are none.

        Args:
            created: creation time of the stream, in microseconds since 1970.
        """
        table = self._table
        rows = open_rows(table.scan(open_row_columns(table.schema.names), {}))
        rows = rows.filter(pc.equal(rows["stream_created"].cast(pa.int64()), created))
        return int(pc.max(rows["revision"]).as_py() or 0)

    def delete_unseen(self, seen: pa.ChunkedArray, filters: Sequence[str]) -> None:
        """Delete the rows whose keys were not among the initial values, and that the bucket lacks.

        Each of these keys is requested from the stream leader: one that was written since then is
        not deleted.

        Args:
            seen: the keys of the initial values.
            filters: of the keys that are followed; empty for all.
        """
        matches = re.compile(filter_pattern(filters)) if filters else None
        codec, settings = self._options.codec, self._options.connection
        bucket, deletes = self._options.bucket, self._shape.layout.deletes
        assert bucket is not None

        def unseen(rows: pa.Table) -> pa.Table:
            rows = rows.filter(pc.invert(pc.is_in(rows["key"], value_set=seen.combine_chunks())))
            if matches is None:
                return rows
            keys = [codec.raw_key(key) if codec.key else key for key in rows["key"].to_pylist()]
            return rows.filter(pa.array([bool(matches.match(key)) for key in keys], pa.bool_()))

        self.position.next, self.position.required = None, False
        self._changed(
            lambda: compare_with_bucket(self._table, bucket, settings, codec, deletes, unseen)
        )

    def close(self) -> None:
        """Wait for upkeep that still runs."""
        self._table.wait()

    def _merge(self, batch: EventBatch) -> MergeResult:
        return self._changed(lambda: self._table.merge(batch, self._upkeep))

    def _changed(self, work: Callable[[], _T]) -> _T:
        try:
            return retry_conflicts(work, self.name, (TableChangedError,))
        except EngineRefusedError as refusal:
            raise ConfigurationError(
                f"could not follow into table {self.name!r}: {refusal}; follow with Spark"
            ) from refusal
