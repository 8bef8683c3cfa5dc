"""The driver's engine: a table that the driver's process changes, and its state table.

The state is read after the table's version and written before its next one. If another writer
commits one of them first, the changes are computed again from the newer version, so the last
committed version always has the events of every writer.
"""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from nats_stream_source.delta.driver.position import PositionLog
from nats_stream_source.delta.driver.storage import TableStorage
from nats_stream_source.delta.driver.table import DriverTable, require_supported
from nats_stream_source.delta.merge_result import MergeResult, newest_created
from nats_stream_source.delta.refused import column_problem
from nats_stream_source.delta.rules.changes import changes_of
from nats_stream_source.delta.rules.events import EventShape
from nats_stream_source.delta.rules.layout import REPLACES, Layout
from nats_stream_source.delta.rules.rows import Reader, RowChanges
from nats_stream_source.delta.tables import Engine
from nats_stream_source.delta.upkeep import Upkeep
from nats_stream_source.logs import field_logger

_log = field_logger(__name__)


class DriverEngine(Engine[DriverTable]):
    """See :class:`nats_stream_source.delta.tables.Engine`. A query keeps it from batch to batch.

    Args:
        deletion_vectors, limit, enforced: see :class:`DriverTable`.
        position: adds the position of a follower to each commit of the table.

    Attributes:
        table: the table, which exists if it is open.
    """

    def __init__(
        self,
        storage: TableStorage,
        deletion_vectors: bool | None = None,
        limit: int | None = None,
        position: PositionLog | None = None,
        *,
        enforced: bool = True,
    ) -> None:
        super().__init__(storage.name)
        self._position = position
        self._storage = storage
        self._deletion_vectors = deletion_vectors
        self._limit, self._enforced = limit, enforced
        self._beside: DriverEngine | None = None
        self.table = DriverTable(storage, deletion_vectors, limit, enforced)

    def find(self) -> DriverTable | None:
        """See :class:`nats_stream_source.delta.tables.Engine`."""
        return self.table if self.table.open_if_exists() else None

    def wait(self) -> None:
        """Wait for upkeep that still runs, of the table and its state table."""
        self.table.upkeep.wait()
        if self._beside is not None:
            self._beside.wait()

    def _verify(
        self, shape: EventShape, table: DriverTable | None, state: DriverTable | None
    ) -> None:
        for one in (table, state):
            if one is not None:
                one.build()  # refused before anything is written if the index exceeds its limit

    def _merge(
        self,
        events: pa.Table,
        shape: EventShape,
        table: DriverTable,
        state: DriverTable | None,
        upkeep: Upkeep | None,
    ) -> MergeResult:
        layout = shape.layout

        def select(rows: Reader) -> RowChanges:
            if state is None or REPLACES in events.column_names:
                return changes_of(events, layout, shape.tracked, rows, None)
            changes: RowChanges | None = None

            def recorded(of: Reader) -> RowChanges:
                nonlocal changes
                changes = changes_of(events, layout, shape.tracked, rows, of)
                assert changes.state is not None  # the rule has read the state
                return changes.state

            state.change(recorded, upkeep)
            assert changes is not None  # the state was changed by them
            return changes

        result = table.change(select, upkeep, self._position)
        return replace(result, newest=newest_created(events)) if result.changed else result

    def state(self) -> DriverEngine:
        """See :class:`nats_stream_source.delta.tables.Engine`."""
        if self._beside is None:
            beside = self._storage.state()
            self._beside = DriverEngine(
                beside, self._deletion_vectors, self._limit, enforced=self._enforced
            )
        return self._beside

    def _create(self, schema: pa.Schema, layout: Layout, upkeep: Upkeep | None) -> DriverTable:
        require_supported(column_problem(schema, ()))
        vectors = self._deletion_vectors is not False
        properties = {**layout.properties, **(upkeep.table_properties(vectors) if upkeep else {})}
        storage = self._storage
        storage.named("create", lambda: storage.create(schema, properties, vectors=vectors))
        if vectors:
            _log.info(
                "created the table with deletion vectors, which its readers must support",
                table=self._name,
            )
        self.table.opened()
        return self.table
