"""The table of a follower: entries in, commits out.

A commit has the rows and the position after them
(:mod:`nats_stream_source.delta.driver.position`). The methods wait for the storage, so the follower
calls them in a thread, one at a time.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.connection.settings import ConnectionSettings
from nats_stream_source.delta.conflicts import retry_conflicts
from nats_stream_source.delta.driver.engine import DriverEngine, opened_table
from nats_stream_source.delta.driver.position import PositionLog, StreamPosition
from nats_stream_source.delta.driver.table import DriverTable
from nats_stream_source.delta.limits import IndexLimit
from nats_stream_source.delta.location import TableLocation
from nats_stream_source.delta.merge_result import MergeResult
from nats_stream_source.delta.missing_keys import find_missing, missing_table, table_rows
from nats_stream_source.delta.rules.arguments import ChangeRules
from nats_stream_source.delta.rules.events import (
    EventBatch,
    EventTable,
    deletes_of,
    event_shape,
    open_row_columns,
    open_rows,
    open_rows_where,
)
from nats_stream_source.delta.rules.layout import ORDER_COLUMNS, SEQUENCE
from nats_stream_source.delta.rules.newest import DecidingEvents
from nats_stream_source.delta.tables import EngineRefusedError, TableChangedError
from nats_stream_source.delta.upkeep import Upkeep
from nats_stream_source.errors import ConfigurationError
from nats_stream_source.jetstream.kv.codec import KvCodec
from nats_stream_source.jetstream.subjects import filter_pattern


class FollowedTable:
    """Merges the entries of one bucket into one table.

    Args:
        location: of the table.
        rules: how entries change it.
        columns: of the entries.
        position: of the follower, in the table's log.
        upkeep: what is due after a commit; None for no upkeep.

    Attributes:
        keys: the number of rows; 0 before the table is open.
    """

    def __init__(
        self,
        location: TableLocation,
        rules: ChangeRules,
        columns: pa.Schema,
        position: PositionLog,
        upkeep: Upkeep | None,
    ) -> None:
        self.name = location.name
        self.keys = 0
        self._position = position
        self._upkeep = upkeep
        self._opened = opened_table(location.name, location.uri, location.storage_options)
        self._engine = DriverEngine(self._opened, None, IndexLimit(), position)
        selected = rules.selected(columns.names)
        self._columns = pa.schema([columns.field(name) for name in selected])
        order = ORDER_COLUMNS if rules.scd_type == 1 else (SEQUENCE,)
        self._shape = event_shape(self._columns, rules, columns.names, order)

    def open(self) -> StreamPosition | None:
        """Open the table, or create it; returns its position, None if it does not have one.

        Raises:
            ConfigurationError: the table is one of other rows, deletes or keys, or cannot be
                changed without Spark.
            TableError: the storage failed, or a file is damaged.
        """
        self._position.restart()
        # An empty merge verifies the layout, and creates the table.
        self._merge(EventBatch(self._shape, EventTable(self._columns.empty_table())))
        self._table().read(lambda _: None)
        snapshot = self._opened.snapshot
        assert snapshot is not None  # it was read
        self._position.read(snapshot)
        self.keys = len(snapshot.index.live())
        return self._position.stored

    def merge(
        self, batches: Sequence[pa.RecordBatch], position: StreamPosition | None, *, required: bool
    ) -> MergeResult:
        """Merge entries; one commit if they change a row.

        Args:
            batches: entries in their order.
            position: of the last one; None to commit rows without a position.
            required: whether the position is committed even if no row changes.

        Raises:
            PositionVoidError: another writer has restored a version of the table.
            and the errors of :func:`nats_stream_source.delta.merge`.
        """
        self._position.next, self._position.required = position, required
        events = DecidingEvents(self._columns, self._shape.layout)
        for batch in batches:
            events.add(batch.select(self._columns.names))
        return self._merge(EventBatch(self._shape, EventTable(events.table())))

    def delete_unseen(
        self,
        seen: pa.ChunkedArray,
        bucket: str,
        filters: Sequence[str],
        settings: ConnectionSettings,
        codec: KvCodec,
    ) -> MergeResult:
        """Delete the rows whose keys were not among the initial values, and that the bucket lacks.

        Each of these keys is requested from the stream leader: one that was written since then is
        not deleted.

        Args:
            seen: the keys of the initial values.
            filters: of the keys that are followed; empty for all.
        """
        table, layout = self._table(), self._shape.layout
        columns = open_row_columns(layout, table.schema.names)
        rows = open_rows(table.scan(columns, open_rows_where(layout, bucket)))
        rows = rows.filter(pc.invert(pc.is_in(rows["key"], value_set=seen.combine_chunks())))
        if filters:
            raw = [codec.raw_key(key) if codec.key else key for key in rows["key"].to_pylist()]
            matches = re.compile(filter_pattern(filters))
            rows = rows.filter(pa.array([bool(matches.match(key)) for key in raw], pa.bool_()))
        missing, _ = asyncio.run(find_missing(table_rows(rows), self.name, bucket, settings, codec))
        self._position.next, self._position.required = None, False
        events = deletes_of(missing_table(missing), bucket, layout, table.schema)
        return self._merge(events)

    def newest_revision(self, created: int) -> int:
        """The greatest revision of the rows of a stream; 0 if there are none.

        Args:
            created: creation time of the stream, in microseconds since 1970.
        """
        table = self._table()
        columns = open_row_columns(self._shape.layout, table.schema.names)
        rows = open_rows(table.scan(columns, {}))
        rows = rows.filter(pc.equal(rows["stream_created"].cast(pa.int64()), created))
        return int(pc.max(rows["revision"]).as_py() or 0)

    def close(self) -> None:
        """Wait for upkeep that still runs."""
        self._opened.wait()

    def _table(self) -> DriverTable:
        table = self._engine.find()
        assert table is not None  # it is open
        return table

    def _merge(self, batch: EventBatch) -> MergeResult:
        try:
            result = retry_conflicts(
                lambda: self._engine.merge(batch, self._upkeep), self.name, (TableChangedError,)
            )
        except EngineRefusedError as refusal:
            raise ConfigurationError(
                f"could not follow into table {self.name!r}: {refusal}; follow with Spark"
            ) from refusal
        self.keys += result.inserted - result.deleted
        return result
