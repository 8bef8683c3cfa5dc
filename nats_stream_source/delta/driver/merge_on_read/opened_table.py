"""The table that a query keeps open from batch to batch, so that its index is built once."""

from __future__ import annotations

from dataclasses import replace

from deltalake import DeltaTable

from nats_stream_source.delta.driver.collect import BatchCollector
from nats_stream_source.delta.driver.merge_on_read.indexed_table import IndexedTable
from nats_stream_source.delta.driver.merge_on_read.upkeep import BackgroundUpkeep
from nats_stream_source.delta.driver.storage import TableStorage
from nats_stream_source.delta.driver.timestamps import Int96Columns
from nats_stream_source.delta.limits import LimitCheck
from nats_stream_source.delta.merge_result import MergeResult
from nats_stream_source.delta.upkeep import Upkeep


class OpenedTable:
    """A table and its index if it is open, and its upkeep, which can outlive them.

    Attributes:
        collector: of the batches.
        int96_columns: of the files that delta-rs reads.
        table: None if the table is not open.
        reason: why copy-on-write changed the table, as the last log line had it.
    """

    def __init__(self, storage: TableStorage) -> None:
        self.storage = storage
        self.upkeep = BackgroundUpkeep(storage)
        self.collector = BatchCollector()
        self.int96_columns = Int96Columns(storage)
        self.table: IndexedTable | None = None
        self.reason = ""
        self._reported_bytes = 0
        self._state: OpenedTable | None = None

    def state(self) -> OpenedTable:
        """The state table beside the table."""
        if self._state is None:
            self._state = OpenedTable(self.storage.state())
        return self._state

    def wait(self) -> None:
        """Wait for upkeep that still runs, of the table and its state table."""
        self.upkeep.wait()
        if self._state is not None:
            self._state.wait()

    def open(self, target: DeltaTable | None, limits: LimitCheck) -> IndexedTable:
        """The table; its index is built if the table is not open.

        Args:
            target: the newest version; None if the table is open.
            limits: of the index.
        """
        if self.table is None:
            storage = self.storage
            newest = target or storage.open_existing()
            self.table = IndexedTable(storage.objects(), newest, storage.name, limits)
            self._reported_bytes = 0
        else:
            limits.validate("index_bytes", self.table.index.nbytes)
        return self.table

    def close(self) -> None:
        """Drop the table: after a failure its state can differ from the log's."""
        self.table = None

    def result(self, changes: MergeResult) -> MergeResult:
        """The result of a merge with the figures of the table, and of its upkeep since the last."""
        if self.table is None:
            return changes
        index, written = self.table.index, self.table.objects.written_bytes
        reported, self._reported_bytes = self._reported_bytes, written
        return replace(
            changes,
            written_bytes=written - reported,
            files=len(self.table.files),
            index_keys=len(index),
            index_bytes=index.nbytes,
            maintained=self.upkeep.take_done(),
        )

    def after_commit(self, upkeep: Upkeep | None) -> None:
        """Start the upkeep that is due."""
        if self.table is not None:
            self.upkeep.after_commit(self.table, upkeep)
