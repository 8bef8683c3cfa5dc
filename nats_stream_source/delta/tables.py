"""A Delta table and the executor that changes it, and what both executors have in common.

An executor finds, creates and changes the one table of a location and the state table beside it.
:class:`Engine` has the order of the steps; an executor reads rows of keys for the rule
(:mod:`rules`) and applies the changes that the rule returns.

**A merge.** 1. Find the tables, and compare their layout with that of the call. 2. Collect the
events and validate them; until here nothing is written. 3. Create the tables that are missing.
4. Add the columns that they lack. 5. Change the state table, then the table: one commit each, or
none if no row changes. A crash between two commits leaves rows that are each right for their key,
and the repeat of the batch completes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import pyarrow as pa

from nats_stream_source.delta.merge_result import MergeResult
from nats_stream_source.delta.rules.changes import require_valid
from nats_stream_source.delta.rules.events import EventBatch, EventShape
from nats_stream_source.delta.rules.layout import Layout
from nats_stream_source.delta.rules.rows import Where
from nats_stream_source.delta.schema import (
    require_storable_names,
    same_columns,
    validate_names,
    with_new_columns,
)
from nats_stream_source.delta.upkeep import MaintenanceResult, Upkeep
from nats_stream_source.errors import ConfigurationError


class EngineRefusedError(Exception):
    """An executor cannot change the table; the text is a reason of :mod:`refused`."""


class TableChangedError(Exception):
    """The table is not the one that an executor has opened; its change begins again."""


class Table(Protocol):
    """A Delta table and what changes it: the driver's process, or Spark.

    All methods raise TableConflictError if each attempt of a change had a conflict, and TableError
    if the executor or its storage failed.
    """

    @property
    def schema(self) -> pa.Schema:
        """The table's columns."""

    @property
    def layout(self) -> Layout | None:
        """The layout of the table; None if this package did not create it."""

    @property
    def table_id(self) -> str:
        """The identity of the table, which changes if it is created again."""

    def is_empty(self) -> bool:
        """Whether the newest version has no rows."""

    def add_columns(self, columns: Sequence[pa.Field]) -> None:
        """Add columns that the table lacks, if there are any, by a commit of its own.

        Raises:
            ConfigurationError: the table cannot store the columns.
        """

    def scan(self, columns: Sequence[str], where: Where) -> pa.Table:
        """Columns of the rows that fit."""

    def maintain(self, upkeep: Upkeep) -> MaintenanceResult:
        """Compact and VACUUM the table; see :func:`nats_stream_source.delta.maintain`."""


_T = TypeVar("_T", bound=Table)


class Engine(ABC, Generic[_T]):
    """An executor of one location: the steps, without what depends on the executor."""

    def __init__(self, name: str) -> None:
        self._name = name

    @abstractmethod
    def find(self) -> _T | None:
        """The table, or None if it does not exist.

        Raises:
            EngineRefusedError: this executor cannot change the table.
        """

    def merge(self, batch: EventBatch, upkeep: Upkeep | None) -> MergeResult:
        """Merge events into the table and its state table, which are created if need be.

        Args:
            upkeep: when what is due after the merge, and the properties of a table that is created;
                None for no upkeep and Delta's own properties.

        Raises:
            EngineRefusedError: this executor cannot change the tables; they are unchanged.
            ConfigurationError: the events are invalid, or the table was created for others.
        """
        shape, layout = batch.shape, batch.shape.layout
        table = self.find()
        if table is not None:
            given = None if batch.reconciles else shape.rows.names
            layout.verify(self._name, _stored(table.layout), table.schema, given)
        validate_names(layout.table_schema(shape.schema).names)
        own = pa.schema([]) if table is None else table.schema
        schema = with_new_columns(self._name, own, layout.table_schema(shape.schema))
        if table is None:
            require_storable_names(self._name, schema)
        state = self.state()._of_table(table, layout) if layout.has_state else None
        shape = shape.fitted(schema, None if state is None else state.schema)
        self._verify(shape, table, state)
        result: MergeResult | None = None
        tables: tuple[_T, _T | None] | None = None
        for rows in batch.parts(shape):
            events = shape.events(rows, self._name)
            require_valid(events, layout)
            # Only now: no table is created with the layout of invalid events.
            tables = tables or self._created(shape, schema, table, state, upkeep)
            merged = self._merge(events, shape, *tables, upkeep)
            result = merged if result is None else result + merged
        assert result is not None  # also an empty batch is a part
        return result

    def _of_table(self, table: _T | None, layout: Layout) -> _T | None:
        """The state table of a table, for the engine of its location; None if it is to be made."""
        found = self.find()
        if found is not None:
            layout.state(table.table_id if table else "").verify_state(self._name, found.layout)
        elif table is not None and not table.is_empty():
            raise ConfigurationError(
                f"could not merge the batch: the state table {self._name!r} does not exist beside "
                f"a table with rows, and late events would be merged wrongly without it; restore "
                f"it, or replay the events into a new table"
            )
        return found

    def _created(
        self,
        shape: EventShape,
        schema: pa.Schema,
        found: _T | None,
        found_state: _T | None,
        upkeep: Upkeep | None,
    ) -> tuple[_T, _T | None]:
        """The table, and its state table if its layout has one; those not found are created.

        Both have the columns of the events.
        """
        layout, events = shape.layout, shape.target
        assert events is not None  # the shape is fitted to the table
        table = found or self._create(schema, layout, upkeep)
        if found is None:
            changed = not layout.entries and _stored(table.layout) != layout
            if changed or not same_columns(schema, table.schema):
                raise TableChangedError("another writer has created the table")
        state: _T | None = None
        if layout.has_state:
            own, beside = layout.state_schema(events), self.state()
            state = found_state or beside._create(own, layout.state(table.table_id), upkeep)
            state.add_columns(list(own))
        table.add_columns(list(layout.table_schema(events)))
        return table, state

    @abstractmethod
    def _verify(self, shape: EventShape, table: _T | None, state: _T | None) -> None:
        """Raise an error for tables that cannot get events of a shape."""

    @abstractmethod
    def _merge(
        self,
        events: pa.Table,
        shape: EventShape,
        table: _T,
        state: _T | None,
        upkeep: Upkeep | None,
    ) -> MergeResult:
        """Merge valid events into tables that have their columns."""

    @abstractmethod
    def _create(self, schema: pa.Schema, layout: Layout, upkeep: Upkeep | None) -> _T:
        """Create an empty table; the one that another process created meanwhile, if one did.

        Raises:
            EngineRefusedError: this executor cannot write the columns.
            ConfigurationError: the directory has files and is not a Delta table.
        """

    @abstractmethod
    def state(self) -> Engine[_T]:
        """The engine of the state table beside the table."""


def _stored(of_table: Layout | None) -> Layout | None:
    """The layout that a table stores, for a comparison: one of entries is not stored."""
    return None if of_table is not None and of_table.entries else of_table


def not_a_table_error(table: str) -> ConfigurationError:
    """The error for a path with files that are not a Delta table."""
    return ConfigurationError(
        f"could not create table {table!r}: the directory has files and is not a Delta table; "
        f"name a new directory"
    )
