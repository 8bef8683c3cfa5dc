"""The driver's engine: a table that the driver's process changes, and its state table.

The state is read after the table's version and written before its next one. If another writer
commits that one first, all of it begins again with the newer version, so the last committed version
always has the events of every writer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace

import pyarrow as pa
from deltalake import DeltaTable

from nats_stream_source.delta.driver.log import DeltaLog
from nats_stream_source.delta.driver.objects import UnsupportedStoreError
from nats_stream_source.delta.driver.position import PositionLog
from nats_stream_source.delta.driver.storage import TableStorage, schema_of
from nats_stream_source.delta.driver.table import DriverTable, OpenedTable
from nats_stream_source.delta.limits import IndexLimit
from nats_stream_source.delta.merge_result import MergeResult, newest_created
from nats_stream_source.delta.refused import (
    DELETION_VECTORS,
    column_problem,
    feature_problem,
    implied_features,
    path_outside,
)
from nats_stream_source.delta.rules.changes import changes_of, recorded_changes, require_valid
from nats_stream_source.delta.rules.events import EventShape
from nats_stream_source.delta.rules.layout import Layout
from nats_stream_source.delta.rules.reading import Reader, RowChanges
from nats_stream_source.delta.tables import Engine, EngineRefusedError, FoundTables
from nats_stream_source.delta.upkeep import Upkeep
from nats_stream_source.errors import ConfigurationError, TableError
from nats_stream_source.logs import field_logger

_log = field_logger(__name__)


def opened_table(
    name: str, uri: str, storage_options: Mapping[str, str] | None = None
) -> OpenedTable:
    """What a query keeps of its table from batch to batch; nothing is opened yet.

    Args:
        name: path or URI as the user gave it, for errors.
        uri: path or URI for delta-rs.
        storage_options: options of delta-rs for the object store.
    """
    return OpenedTable(TableStorage(name, uri, storage_options))


class DriverEngine(Engine[DriverTable]):
    """See :class:`nats_stream_source.delta.tables.Engine`.

    Args:
        opened: see :func:`opened_table`.
        deletion_vectors: see :func:`nats_stream_source.delta.merge`.
        limit: of the index.
        position: adds the position of a follower to each commit of the table.
    """

    def __init__(
        self,
        opened: OpenedTable,
        deletion_vectors: bool | None,
        limit: IndexLimit,
        position: PositionLog | None = None,
    ) -> None:
        super().__init__(opened.storage.name)
        self._position = position
        self._opened = opened
        self._storage = opened.storage
        self._deletion_vectors = deletion_vectors
        self._limit = limit

    def find(self) -> DriverTable | None:
        """See :class:`nats_stream_source.delta.tables.Engine`."""
        if self._opened.snapshot is not None:
            return DriverTable(self._opened, None, self._limit)
        _require_supported(self._storage.unsupported_store())
        target = self._open()
        return None if target is None else self._table(target)

    def _merge(self, found: FoundTables[DriverTable], upkeep: Upkeep | None) -> MergeResult:
        for one in (found.table, found.state):
            if one is not None:
                one.open()  # refused before anything is written if the index exceeds its limit
        result: MergeResult | None = None
        tables: tuple[DriverTable, DriverTable | None] | None = None
        for rows in found.source.parts(found.shape):
            events = found.shape.events(rows, self._name)
            # Invalid events are refused before there is a table with their layout.
            require_valid(events, found.shape.layout)
            tables = tables or self._created(found, upkeep)
            merged = _merged(events, found.shape, *tables, upkeep, self._position)
            result = merged if result is None else result + merged
        assert result is not None  # also an empty batch is a part
        return result

    def _state(self) -> DriverEngine:
        return DriverEngine(self._opened.state(), self._deletion_vectors, self._limit)

    def _create(self, schema: pa.Schema, layout: Layout, upkeep: Upkeep | None) -> DriverTable:
        _require_supported(column_problem(schema, ()))
        vectors = self._deletion_vectors is not False
        properties = {**layout.properties, **(upkeep.table_properties(vectors) if upkeep else {})}
        target = self._storage.create(schema, properties, vectors=vectors)
        if vectors:
            _log.info(
                "created the table with deletion vectors, which its readers must support",
                table=self._name,
            )
        return self._table(target)

    def _open(self) -> DeltaTable | None:
        try:
            return self._storage.open()
        except TableError as error:
            # delta-rs does not name the entry of the log that it cannot read.
            damaged = None
            with contextlib.suppress(OSError, UnsupportedStoreError):
                damaged = DeltaLog(self._storage.objects()).damaged_entry()
            raise (TableError(f"{error} ({damaged} is damaged)") if damaged else error) from error

    def _table(self, target: DeltaTable) -> DriverTable:
        protocol, metadata = target.protocol(), target.metadata()
        features = {*(protocol.reader_features or ()), *(protocol.writer_features or ())}
        features |= implied_features(protocol.min_writer_version)
        _require_supported(
            feature_problem(features, metadata.configuration)
            or column_problem(schema_of(target), metadata.partition_columns)
            or path_outside(pa.table(target.get_add_actions(flatten=True))["path"].to_pylist())
        )
        vectors = metadata.configuration.get(DELETION_VECTORS) == "true"
        if self._deletion_vectors is not None and self._deletion_vectors != vectors:
            has, action = ("has", "") if vectors else ("does not have", "set the property, or ")
            raise ConfigurationError(
                f"could not change table {self._name!r} with deletion_vectors="
                f"{self._deletion_vectors}: the table {has} the property {DELETION_VECTORS}; "
                f"{action}remove the argument, which is for new tables"
            )
        return DriverTable(self._opened, target, self._limit)


def _merged(
    events: pa.Table,
    shape: EventShape,
    table: DriverTable,
    state: DriverTable | None,
    upkeep: Upkeep | None,
    position: PositionLog | None,
) -> MergeResult:
    layout = shape.layout

    def select(rows: Reader) -> RowChanges:
        if state is None:
            return changes_of(events, layout, shape.tracked, rows, None)
        changes = state.read(lambda of: changes_of(events, layout, shape.tracked, rows, of))
        if len(changes.state):
            state.change(lambda of: recorded_changes(changes.state, layout, of), upkeep)
        return changes

    result = table.change(select, upkeep, position)
    return replace(result, newest=newest_created(events)) if result.changed else result


def _require_supported(problem: str | None) -> None:
    if problem is not None:
        raise EngineRefusedError(problem)
