"""Engine ``"delta-rs"``: finds or creates the table that the driver's process changes.

A table with deletion vectors is changed by :mod:`merge_on_read`, any other one by
:mod:`copy_on_write`. So is a table with deletion vectors that has something :mod:`merge_on_read`
does not keep; the log then has the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from deltalake import DeltaTable
from pyspark.sql.types import StructType

from nats_stream_source.delta.cdc.events import require_valid_frame
from nats_stream_source.delta.cdc.tables import BaseEngine, FoundTables, RowTable
from nats_stream_source.delta.driver.copy_on_write import CopyOnWriteTable
from nats_stream_source.delta.driver.delta_log import DeltaLog, outside_problem
from nats_stream_source.delta.driver.event_merge import merge_collected
from nats_stream_source.delta.driver.features import (
    DELETION_VECTORS,
    deletion_vectors_problem,
    rewriting_problem,
    unsupported_feature,
    unsupported_type,
)
from nats_stream_source.delta.driver.merge_on_read.creation import put_first_version
from nats_stream_source.delta.driver.merge_on_read.opened_table import OpenedTable
from nats_stream_source.delta.driver.merge_on_read.table import MergeOnReadTable
from nats_stream_source.delta.driver.objects import UnsupportedStoreError
from nats_stream_source.delta.driver.storage import TableStorage, file_sizes, schema_of
from nats_stream_source.delta.driver.timestamps import unsupported_timestamp
from nats_stream_source.delta.limits import LimitCheck
from nats_stream_source.delta.location import TableLocation
from nats_stream_source.delta.merge_result import MergeResult
from nats_stream_source.delta.stored_columns import require_storable_names
from nats_stream_source.delta.table import EngineRefusedError
from nats_stream_source.delta.upkeep import Upkeep
from nats_stream_source.errors import ConfigurationError, TableError
from nats_stream_source.logs import field_logger

_log = field_logger(__name__)


def opened_table(location: TableLocation) -> OpenedTable:
    """What a query keeps of its table from batch to batch; nothing is opened yet."""
    return OpenedTable(TableStorage(location.name, location.uri, location.storage_options))


class DriverEngine(BaseEngine[RowTable]):
    """See :class:`nats_stream_source.delta.table.TableEngine`.

    Args:
        opened: see :func:`opened_table`.
        limits: of this change.
        deletion_vectors: see :func:`nats_stream_source.delta.merge`.
    """

    def __init__(
        self, opened: OpenedTable, limits: LimitCheck, deletion_vectors: bool | None
    ) -> None:
        super().__init__(opened.storage.name)
        self._opened = opened
        self._storage = opened.storage
        self._limits = limits
        self._deletion_vectors = deletion_vectors

    def find(self) -> RowTable | None:
        """See :class:`nats_stream_source.delta.table.TableEngine`."""
        if self._opened.table is not None:
            return MergeOnReadTable(self._opened, None, self._limits)
        target = self._open()
        return None if target is None else self._table(target)

    def _merge(self, found: FoundTables[RowTable], upkeep: Upkeep | None) -> MergeResult:
        events = found.events
        try:
            # Invalid events are refused before there is a table with their layout.
            collected = self._opened.collector.events(events, self._limits)
        except EngineRefusedError:
            # Spark merges a batch beyond the limits, into a table as this engine creates it.
            if found.table is None:
                require_valid_frame(events.frame, events.layout)
                self._create(found.schema, events.layout.properties, upkeep)
            raise
        table, state = self._created(found, upkeep)
        return merge_collected(collected, events, table, state, upkeep)

    def _state(self) -> DriverEngine:
        return DriverEngine(self._opened.state(), self._limits, self._deletion_vectors)

    def _create(
        self, schema: StructType, layout: Mapping[str, str], upkeep: Upkeep | None
    ) -> RowTable:
        require_storable_names(self._name, schema)
        _require_supported(unsupported_type(schema))
        vectors = self._deletion_vectors is not False and self._storage.unsupported_store() is None
        properties = {**layout, **(upkeep.table_properties(vectors) if upkeep else {})}
        storage = self._storage
        if not vectors:
            return self._table(
                storage.create(lambda: storage.put_copy_on_write(schema, properties))
            )
        target = storage.create(lambda: put_first_version(storage, schema, properties))
        _log.info(
            "created the table with deletion vectors, which its readers must support",
            table=storage.name,
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

    def _table(self, target: DeltaTable) -> RowTable:
        _require_supported(
            unsupported_feature(target)
            or outside_problem(file_sizes(target))
            or unsupported_timestamp(target)
            or unsupported_type(schema_of(target))
        )
        if self._deletion_vectors is False:
            return self._copy_on_write(target)
        problem = deletion_vectors_problem(target) or self._storage.unsupported_store()
        if problem is None:
            return MergeOnReadTable(self._opened, target, self._limits)
        if self._deletion_vectors:
            raise ConfigurationError(
                f"could not change table {self._name!r} with deletion_vectors=True: "
                f"{problem}; set the table property {DELETION_VECTORS}, or remove the argument"
            )
        if target.metadata().configuration.get(DELETION_VECTORS) == "true":
            self._log_reason(problem)
        return self._copy_on_write(target)

    def _copy_on_write(self, target: DeltaTable) -> RowTable:
        _require_supported(rewriting_problem(target))
        self._opened.int96_columns.require_known_range(target)
        return CopyOnWriteTable(self._storage, target, self._opened.collector, self._limits)

    def _log_reason(self, problem: str) -> None:
        if problem != self._opened.reason:
            self._opened.reason = problem
            _log.info("delta-rs rewrites files of the table", table=self._name, reason=problem)


def _require_supported(problem: str | None) -> None:
    if problem is not None:
        raise EngineRefusedError(problem)
