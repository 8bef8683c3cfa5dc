"""What merging events requires of an engine and of its tables, and what both engines share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import pyarrow as pa
from pyspark.sql.types import StructField, StructType

from nats_stream_source.delta.cdc.changes import Reader, RowChanges
from nats_stream_source.delta.cdc.columns import with_new_columns
from nats_stream_source.delta.cdc.events import Events
from nats_stream_source.delta.cdc.layout import Layout, missing_state_error
from nats_stream_source.delta.merge_result import MergeResult
from nats_stream_source.delta.stored_columns import require_exact_keys
from nats_stream_source.delta.table import (
    DELETED_COLUMN,
    Deletes,
    Table,
    TableEngine,
    require_markable,
    table_schema,
)
from nats_stream_source.delta.upkeep import Upkeep


class LayoutTable(Table, Protocol):
    """A table that may have a layout."""

    @property
    def layout(self) -> Layout | None:
        """The layout that the table was created with."""

    @property
    def table_id(self) -> str:
        """The identity of the table, which changes if it is created again."""

    def is_empty(self) -> bool:
        """Whether the newest version has no rows."""

    def add_columns(self, columns: Sequence[StructField]) -> None:
        """Add columns that the table lacks, if there are any, by a commit of its own.

        Raises:
            EngineRefusedError: only another engine can.
            ConfigurationError: the table cannot store the columns.
        """


class RowTable(LayoutTable, Protocol):
    """A table with a layout that the driver's process changes."""

    def read_rows(self, keys: pa.Table, columns: Sequence[str]) -> pa.Table:
        """Columns of the rows of these keys in the newest version."""

    def change_rows(
        self, select: Callable[[Reader], RowChanges], upkeep: Upkeep | None
    ) -> MergeResult:
        """Upsert and remove rows in one commit, and do the upkeep that is due.

        Args:
            select: returns the changes of a version, which it reads with its argument. It runs
                again if another writer commits first.
            upkeep: when what is due.
        """


class EventEngine(TableEngine, Protocol):
    """An engine that merges events."""

    def find(self) -> LayoutTable | None:
        """See :class:`nats_stream_source.delta.table.TableEngine`."""

    def find_or_create(
        self, batch: StructType, deletes: Deletes, upkeep: Upkeep | None
    ) -> LayoutTable:
        """See :class:`nats_stream_source.delta.table.TableEngine`."""

    def find_state(self) -> LayoutTable | None:
        """The state table beside the table, or None if it does not exist."""

    def merge_events(self, events: Events, upkeep: Upkeep | None) -> MergeResult:
        """Merge events into the table and its state table, which are created if need be.

        Raises:
            EngineRefusedError: this engine cannot change the tables; they are unchanged.
            ConfigurationError: the events are invalid, or the table was created for others.
        """


_T = TypeVar("_T", bound=LayoutTable)


@dataclass(frozen=True, slots=True)
class FoundTables(Generic[_T]):
    """The tables of a batch of events, before any is created or changed.

    Attributes:
        events: with the columns and types of the tables.
        schema: the columns of the table with those of the events.
        table: None if it does not exist.
        state: the state table; None if it does not exist, or the layout does not have one.
    """

    events: Events
    schema: StructType
    table: _T | None
    state: _T | None


class BaseEngine(ABC, Generic[_T]):
    """An :class:`EventEngine` without what depends on the engine: finding, creating and merging.

    Args:
        name: path, URI or name of the table as the user gave it.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @abstractmethod
    def find(self) -> _T | None:
        """See :class:`nats_stream_source.delta.table.TableEngine`."""

    def find_or_create(self, batch: StructType, deletes: Deletes, upkeep: Upkeep | None) -> _T:
        """See :class:`nats_stream_source.delta.table.TableEngine`."""
        found = self.find()
        if found is not None:
            return found
        schema = self._with(StructType(), table_schema(batch, deletes))
        return self._create(schema, {}, upkeep)

    def find_state(self) -> _T | None:
        """See :class:`EventEngine`."""
        return self._state().find()

    def merge_events(self, events: Events, upkeep: Upkeep | None) -> MergeResult:
        """See :class:`EventEngine`."""
        layout = events.layout
        table = self.find()
        if table is not None:
            layout.verify(self._name, table.layout)
            require_exact_keys(self._name, table.schema, (*layout.keys, *layout.order))
            if layout.deletes == "mark":
                kept = (*layout.keys, *layout.order, DELETED_COLUMN)
                require_markable(self._name, table.schema, kept)
        own = StructType() if table is None else table.schema
        schema = self._with(own, layout.table_schema(events.schema))
        state = self._state().of_table(table, layout) if layout.has_state else None
        events = events.conformed(schema, None if state is None else state.schema)
        return self._merge(FoundTables(events, schema, table, state), upkeep)

    def of_table(self, table: _T | None, layout: Layout) -> _T | None:
        """The state table of a table, for an engine of its location; None if it is to be made."""
        found = self.find()
        if found is not None:
            layout.state(table.table_id if table else "").verify_state(self._name, found.layout)
        elif table is not None and not table.is_empty():
            raise missing_state_error(self._name)
        return found

    def prepared(self, found: _T | None, events: Events, table: _T, upkeep: Upkeep | None) -> _T:
        """The state table, for an engine of its location; created if it was not found."""
        schema = events.layout.state_schema(events.schema)
        if found is None:
            properties = events.layout.state(table.table_id).properties
            return self._create(self._with(StructType(), schema), properties, upkeep)
        self._with(found.schema, schema)
        return found

    def _with(self, own: StructType, batch: StructType) -> StructType:
        """The columns of the table with those of a batch; ``own`` if it has them all."""
        return with_new_columns(self._name, own, batch.fields)

    def _created(self, found: FoundTables[_T], upkeep: Upkeep | None) -> tuple[_T, _T | None]:
        """The table, and its state table if its layout has one; those not found are created."""
        layout = found.events.layout
        table = found.table or self._create(found.schema, layout.properties, upkeep)
        if found.table is None:
            layout.verify_created(table.layout, found.schema, table.schema)
        if not layout.has_state:
            return table, None
        return table, self._state().prepared(found.state, found.events, table, upkeep)

    @abstractmethod
    def _merge(self, found: FoundTables[_T], upkeep: Upkeep | None) -> MergeResult:
        """Merge events; :meth:`_created` has the tables, once the events are valid."""

    @abstractmethod
    def _create(self, schema: StructType, layout: Mapping[str, str], upkeep: Upkeep | None) -> _T:
        """Create an empty table; ``layout`` is its property for a layout."""

    @abstractmethod
    def _state(self) -> BaseEngine[_T]:
        """The engine of the state table."""
