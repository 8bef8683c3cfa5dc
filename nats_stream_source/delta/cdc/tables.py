"""What merging events requires of an engine and of its tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import pyarrow as pa
from pyspark.sql.types import StructField, StructType

from nats_stream_source.delta.cdc.changes import Reader, RowChanges
from nats_stream_source.delta.cdc.events import Events
from nats_stream_source.delta.cdc.layout import Layout
from nats_stream_source.delta.merge_result import MergeResult
from nats_stream_source.delta.table import Deletes, Table, TableEngine
from nats_stream_source.delta.upkeep import Upkeep


class LayoutTable(Table, Protocol):
    """A table that may have a layout."""

    @property
    def layout(self) -> Layout | None:
        """The layout that the table was created with."""

    @property
    def table_id(self) -> str:
        """The identity of the table, which changes if it is created again."""

    def add_columns(self, columns: Sequence[StructField]) -> None:
        """Add columns that the table lacks, if there are any, by a commit of its own.

        Raises:
            EngineRefusedError: only another engine can.
            ConfigurationError: the table cannot store the columns.
        """


class RowTable(LayoutTable, Protocol):
    """A table with a layout that the driver's process changes."""

    def is_empty(self) -> bool:
        """Whether the newest version has no rows."""

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
