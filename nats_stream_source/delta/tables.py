"""A Delta table and the executor that changes it, and what both executors have in common.

An executor finds, creates and changes the table of one location and the state table beside it.
:class:`Table` has the order of the steps; an executor reads rows of keys for the rule
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
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from typing_extensions import Self


class EngineRefusedError(Exception):
    """An executor cannot change the table; the text is a reason of :mod:`refused`."""


class TableChangedError(Exception):
    """The table is not the one that an executor has opened; its change begins again."""


class Table(ABC):
    """The Delta table of a location, which may not exist yet, as one executor changes it.

    All methods but :meth:`exists` and :meth:`merge` require that it exists. They raise
    TableConflictError if each attempt of a change had a conflict, and TableError if the executor or
    its storage failed.

    Attributes:
        name: path, URI or name in the catalog as the user gave it, for errors.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def exists(self) -> bool:
        """Open the table if it exists.

        Raises:
            EngineRefusedError: this executor cannot change the table.
        """

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The table's columns."""

    @property
    @abstractmethod
    def layout(self) -> Layout | None:
        """The layout of the table; None if this package did not create it."""

    @property
    @abstractmethod
    def table_id(self) -> str:
        """The identity of the table, which changes if it is created again."""

    @abstractmethod
    def is_empty(self) -> bool:
        """Whether the newest version has no rows."""

    @abstractmethod
    def add_columns(self, columns: Sequence[pa.Field]) -> None:
        """Add columns that the table lacks, if there are any, by a commit of its own.

        Raises:
            ConfigurationError: the table cannot store the columns.
        """

    @abstractmethod
    def scan(self, columns: Sequence[str], where: Where) -> pa.Table:
        """Columns of the rows that fit."""

    @abstractmethod
    def maintain(self, upkeep: Upkeep) -> MaintenanceResult:
        """Compact and VACUUM the table; see :func:`nats_stream_source.delta.maintain`."""

    @abstractmethod
    def state(self) -> Self:
        """The state table beside the table."""

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
        exists, own = self.exists(), pa.schema([])
        if exists:
            own, given = self.schema, None if batch.reconciles else shape.rows.names
            layout.verify(self.name, _stored(self.layout), own, given)
        validate_names(layout.table_schema(shape.schema).names)
        schema = with_new_columns(self.name, own, layout.table_schema(shape.schema))
        if not exists:
            require_storable_names(self.name, schema)
        state = self.state() if layout.has_state else None
        recorded = state is not None and state._is_state_of(self if exists else None, layout)
        shape = shape.fitted(schema, state.schema if state is not None and recorded else None)
        events = shape.target
        assert events is not None  # the shape is fitted to the table
        if exists:
            self._verify(layout.table_schema(events))
        if state is not None and recorded:
            state._verify(layout.state_schema(events))
        result: MergeResult | None = None
        for rows in batch.parts(shape):
            part = shape.events(rows, self.name)
            require_valid(part, layout)
            if result is None:  # only now: no table is created with the layout of invalid events
                if not exists:
                    self._create_first(schema, layout, upkeep)
                if state is not None:
                    columns = layout.state_schema(events)
                    if not recorded:
                        state._create(columns, layout.state(self.table_id), upkeep)
                    state.add_columns(list(columns))
                if schema is not own:
                    self.add_columns(list(layout.table_schema(events)))
            merged = self._merge(part, shape, state, upkeep)
            result = merged if result is None else result + merged
        assert result is not None  # also an empty batch is a part
        return result

    def _is_state_of(self, table: Table | None, layout: Layout) -> bool:
        """Whether this state table of a table exists."""
        if self.exists():
            layout.state(table.table_id if table else "").verify_state(self.name, self.layout)
            return True
        if table is not None and not table.is_empty():
            raise ConfigurationError(
                f"could not merge the batch: the state table {self.name!r} does not exist beside "
                f"a table with rows, and late events would be merged wrongly without it; restore "
                f"it, or replay the events into a new table"
            )
        return False

    def _create_first(self, schema: pa.Schema, layout: Layout, upkeep: Upkeep | None) -> None:
        self._create(schema, layout, upkeep)
        changed = not layout.entries and _stored(self.layout) != layout
        if changed or not same_columns(schema, self.schema):
            raise TableChangedError("another writer has created the table")

    @abstractmethod
    def _verify(self, columns: pa.Schema) -> None:
        """Raise an error if rows with these columns cannot be merged; nothing is written."""

    @abstractmethod
    def _merge(
        self, events: pa.Table, shape: EventShape, state: Self | None, upkeep: Upkeep | None
    ) -> MergeResult:
        """Merge valid events into tables that have their columns."""

    @abstractmethod
    def _create(self, schema: pa.Schema, layout: Layout, upkeep: Upkeep | None) -> None:
        """Create an empty table, and open it; the one that another process created meanwhile.

        Raises:
            EngineRefusedError: this executor cannot write the columns.
            ConfigurationError: the directory has files and is not a Delta table.
        """


def _stored(of_table: Layout | None) -> Layout | None:
    """The layout that a table stores, for a comparison: one of entries is not stored."""
    return None if of_table is not None and of_table.entries else of_table


def not_a_table_error(table: str) -> ConfigurationError:
    """The error for a path with files that are not a Delta table."""
    return ConfigurationError(
        f"could not create table {table!r}: the directory has files and is not a Delta table; "
        f"name a new directory"
    )
