"""A table that the driver's process changes: a commit writes only what changed.

**A commit.** 1. The rule reads the rows of a batch's keys, most of it from the index, and returns
the changes. 2. The new rows are written. 3. The positions of the old rows join the deletion vector
of each data file that has one of them, all vectors of the commit in one object. A table without
deletion vectors gets the other rows of these files again, in new files. 4. The log's next
entry is put, which must not exist: ``remove`` and ``add`` of the files. A process that ends before
step 4 leaves objects that no version names; after it, the version is complete.

**Other writers.** Each attempt begins with the commits that follow the known version. If another
writer takes the next version first, the change begins again with its commit, bounded by
:mod:`nats_stream_source.delta.conflicts`.

**The state table** is read after the table's version and written before its next one. If another
writer commits one of them first, the changes are computed again from the newer version, so the last
committed version always has the events of every writer.

**A repeated batch** changes no row, and makes no version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap64

from nats_stream_source.delta.conflicts import retry_conflicts
from nats_stream_source.delta.driver.data_files import LiveFile, PartitionWriter, partitions
from nats_stream_source.delta.driver.index import NO_FILE
from nats_stream_source.delta.driver.log import (
    Action,
    Commit,
    DeltaLog,
    LogState,
    VersionExistsError,
    removal,
)
from nats_stream_source.delta.driver.position import PositionLog
from nats_stream_source.delta.driver.snapshot import Replaced, Snapshot
from nats_stream_source.delta.driver.storage import TableStorage, changed_metadata, schema_of
from nats_stream_source.delta.driver.upkeep import (
    BackgroundUpkeep,
    Rewrite,
    maintain,
    places,
    rewritten,
)
from nats_stream_source.delta.merge_result import MergeResult, newest_created
from nats_stream_source.delta.refused import (
    DELETION_VECTORS,
    column_problem,
    feature_problem,
    implied_features,
    path_outside,
)
from nats_stream_source.delta.rules.changes import changes_of
from nats_stream_source.delta.rules.events import EventShape
from nats_stream_source.delta.rules.layout import REPLACES, Layout
from nats_stream_source.delta.rules.rows import Integers, Reader, RowChanges, Where
from nats_stream_source.delta.schema import (
    conform,
    log_new_columns,
    require_not_null,
    require_storable_names,
    same_columns,
    widened_columns,
    with_new_columns,
)
from nats_stream_source.delta.tables import EngineRefusedError, Table, TableChangedError
from nats_stream_source.delta.upkeep import DEFAULT_UPKEEP, MaintenanceResult, Upkeep
from nats_stream_source.errors import ConfigurationError
from nats_stream_source.logs import field_logger

_NEARLY = 0.8  # of the index's limit: a warning
_TARGET_BYTES = DEFAULT_UPKEEP.target_file_bytes

_log = field_logger(__name__)
_T = TypeVar("_T")


class DriverTable(Table):
    """See :class:`nats_stream_source.delta.tables.Table`. It stays open from batch to batch.

    A version is opened only if the driver can change it: another writer can have given the table
    other features, properties or columns since the last one.

    Args:
        deletion_vectors: see :func:`nats_stream_source.delta.merge`.
        limit: of the index in bytes; None for no limit.
        position: adds the position of a follower to each commit.
        enforced: whether an index beyond the limit is refused; else a warning is logged.

    Attributes:
        snapshot: the table; None if it is not open.
        upkeep: of the table, which can outlive the snapshot.
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
        self._storage = storage
        self._position = position
        self._deletion_vectors = deletion_vectors
        self._limit = limit
        self._enforced = enforced
        self._reported_bytes = 0
        self._warned = 0  # 1: the limit was near, 2: it was exceeded
        self._state: DriverTable | None = None
        self.snapshot: Snapshot | None = None
        self.upkeep = BackgroundUpkeep(storage)

    @property
    def schema(self) -> pa.Schema:
        """See :class:`nats_stream_source.delta.tables.Table`."""
        return self.opened().schema

    @property
    def layout(self) -> Layout | None:
        """See :class:`nats_stream_source.delta.tables.Table`."""
        return self.opened().layout

    @property
    def table_id(self) -> str:
        """See :class:`nats_stream_source.delta.tables.Table`."""
        return self.opened().table_id

    def exists(self) -> bool:
        """See :class:`nats_stream_source.delta.tables.Table`."""
        if self.snapshot is None:
            self._storage.named("open", lambda: self._open(self._storage.read()))
        return self.snapshot is not None

    def opened(self) -> Snapshot:
        """The table, which is opened if it is not open."""
        if self.snapshot is None:
            self._storage.named("open", lambda: self._open(self._storage.read_existing()))
        assert self.snapshot is not None
        return self.snapshot

    def _open(self, state: LogState | None) -> None:
        if state is not None:
            self._require_supported(state)
            self.snapshot, self._reported_bytes = Snapshot(self._storage, state), 0

    def _require_supported(self, state: LogState) -> None:
        protocol, properties = state.protocol, state.properties
        listed = (protocol.get("readerFeatures"), protocol.get("writerFeatures"))
        features = {name for names in listed for name in names or ()}
        features |= implied_features(protocol["minWriterVersion"])
        require_supported(
            feature_problem(features, properties)
            or column_problem(schema_of(state), state.metadata["partitionColumns"])
            or path_outside(add["path"] for add in state.files.values())
        )
        vectors = properties.get(DELETION_VECTORS) == "true"
        if self._deletion_vectors is not None and self._deletion_vectors != vectors:
            has, action = ("has", "") if vectors else ("does not have", "set the property, or ")
            raise ConfigurationError(
                f"could not change table {self.name!r} with deletion_vectors="
                f"{self._deletion_vectors}: the table {has} the property {DELETION_VECTORS}; "
                f"{action}remove the argument, which is for new tables"
            )

    def close(self) -> None:
        """Drop the table: after a failure its state can differ from the log's."""
        self.snapshot = None

    def indexed(self) -> Snapshot:
        """The table with its index; an error if that exceeds its limit."""
        snapshot = self.opened()
        if not snapshot.indexed:
            snapshot.build_index(self._limit if self._enforced else None)
        size = snapshot.index.nbytes
        if self._limit is not None and size >= _NEARLY * self._limit:
            reason = f"index_bytes is {size:,}, limit {self._limit:,}"
            exceeded = size > self._limit
            if exceeded and self._enforced:
                raise ConfigurationError(
                    f"could not change table {self.name!r}: {reason}; restart the query: "
                    f"it then takes Spark"
                )
            if self._warned < (level := 1 + exceeded):
                self._warned = level
                _log.warning(
                    "the index of keys is near or beyond its limit",
                    table=self.name,
                    reason=reason,
                )
        return snapshot

    def wait(self) -> None:
        """Wait for upkeep that still runs, of the table and its state table."""
        self.upkeep.wait()
        if self._state is not None:
            self._state.wait()

    def state(self) -> DriverTable:
        """See :class:`nats_stream_source.delta.tables.Table`."""
        if self._state is None:
            self._state = DriverTable(
                self._storage.state(), self._deletion_vectors, self._limit, enforced=self._enforced
            )
        return self._state

    def _verify(self, columns: pa.Schema) -> None:
        self._run("open", self.indexed)  # an index beyond its limit is refused

    def _create(self, schema: pa.Schema, layout: Layout, upkeep: Upkeep | None) -> None:
        require_supported(column_problem(schema, ()))
        vectors = self._deletion_vectors is not False
        properties = {**layout.properties, **(upkeep.table_properties(vectors) if upkeep else {})}
        storage = self._storage
        storage.named("create", lambda: storage.create(schema, properties, vectors=vectors))
        if vectors:
            _log.info(
                "created the table with deletion vectors, which its readers must support",
                table=self.name,
            )
        self.opened()

    def _merge(
        self, events: pa.Table, shape: EventShape, state: DriverTable | None, upkeep: Upkeep | None
    ) -> MergeResult:
        def select(rows: Reader) -> RowChanges:
            if state is None or REPLACES in events.column_names:
                return changes_of(events, shape.layout, shape.tracked, rows, None)
            changes: RowChanges | None = None

            def recorded(of: Reader) -> RowChanges:
                nonlocal changes
                changes = changes_of(events, shape.layout, shape.tracked, rows, of)
                assert changes.state is not None  # the rule has read the state
                return changes.state

            state.change(recorded, upkeep)
            assert changes is not None  # the state was changed by them
            return changes

        result = self.change(select, upkeep)
        return replace(result, newest=newest_created(events)) if result.changed else result

    def is_empty(self) -> bool:
        """See :class:`nats_stream_source.delta.tables.Table`."""
        return not len(self.scan(self.schema.names[:1], {}))

    def scan(self, columns: Sequence[str], where: Where) -> pa.Table:
        """See :class:`nats_stream_source.delta.tables.Table`."""

        def scan() -> pa.Table:
            snapshot = self.opened()
            names = list(dict.fromkeys([*columns, *where]))
            with snapshot.lock:
                snapshot.refresh()
                parts = [
                    pa.schema([snapshot.stored_schema.field(n) for n in columns]).empty_table()
                ]
                for file in snapshot.files.values():
                    rows = snapshot.rows_at(file, file.live_positions(), names)
                    for name, values in where.items():
                        column = rows[name]  # a struct is compared with null only
                        rows = rows.filter(
                            pc.is_null(column)
                            if values == (None,)
                            else pc.is_in(column, pa.array(values, column.type))
                        )
                    parts.append(rows.select(list(columns)))
            return pa.concat_tables(parts)

        return self._run("read", scan)

    def read(self, select: Callable[[Reader], _T]) -> _T:
        """What ``select`` reads from the newest version."""

        def read() -> _T:
            snapshot = self.indexed()
            with snapshot.lock:
                snapshot.refresh()
                return select(snapshot)

        return self._run("read", read)

    def change(self, select: Callable[[Reader], RowChanges], upkeep: Upkeep | None) -> MergeResult:
        """Commit the changes that ``select`` returns for the newest version.

        Args:
            select: reads the version; it is called again if another writer commits first.

        Raises:
            PositionVoidError: the table is not the one that the follower's position describes.
        """
        position = self._position
        target_bytes = upkeep.target_file_bytes if upkeep else _TARGET_BYTES

        def attempt(snapshot: Snapshot) -> MergeResult:
            with snapshot.lock:
                snapshot.refresh()
                changes = select(snapshot)
                rows = _full_rows(snapshot, changes)
                changed = bool(len(changes)) or changes.state_only
                moved = position.actions(snapshot, changed=changed) if position else []
                if moved is None:
                    return MergeResult("driver")
                if changed or moved:
                    _commit(snapshot, changes, rows, target_bytes, moved)
                if position is not None and moved:
                    position.committed(snapshot.version)
            inserted = int((changes.replaced < 0).sum())
            return MergeResult(
                "driver",
                inserted,
                len(rows) - inserted,
                len(changes.removed),
                changed_bytes=rows.nbytes,
                contradictions=changes.contradictions,
            )

        def work() -> MergeResult:
            snapshot = self.indexed()
            return retry_conflicts(lambda: attempt(snapshot), snapshot.name, (VersionExistsError,))

        result = self._run("merge the batch into", work)
        snapshot, maintained = self.opened(), self.upkeep.take_done()
        if result.changed:
            self.upkeep.after_commit(snapshot, upkeep)
        written, reported = snapshot.objects.written_bytes, self._reported_bytes
        self._reported_bytes = written
        return replace(
            result,
            written_bytes=written - reported,
            files=len(snapshot.files),
            index_keys=len(snapshot.index),
            index_bytes=snapshot.index.nbytes,
            maintained=maintained,
        )

    def add_columns(self, columns: Sequence[pa.Field]) -> None:
        """See :class:`nats_stream_source.delta.tables.Table`.

        A column with a wider type has it in all data files afterwards: the commit writes their live
        rows again. If another writer has changed columns meanwhile, TableChangedError is raised.
        """
        name, own = self.name, self.schema
        expected = with_new_columns(name, own, columns)
        if expected is own:
            return

        def add() -> None:
            state = self._storage.read_existing()
            self._require_supported(state)
            before = schema_of(state)
            schema = with_new_columns(name, before, columns)
            if schema is not before:
                require_storable_names(name, schema)
                operation, actions = _new_columns(self._storage, state, schema)
                DeltaLog(self._storage.objects()).put(state.version + 1, operation, actions)
                log_new_columns(name, before, schema)

        # The index is built again: the kept rows have the former columns.
        self.close()
        self._storage.named(
            "add columns to", lambda: retry_conflicts(add, name, (VersionExistsError,))
        )
        if not same_columns(self.schema, expected):
            raise TableChangedError("another writer has changed columns of the table")

    def maintain(self, upkeep: Upkeep) -> MaintenanceResult:
        """See :class:`nats_stream_source.delta.tables.Table`."""
        return self._run("maintain", lambda: maintain(self._storage, self.opened(), upkeep))

    def _run(self, what: str, work: Callable[[], _T]) -> _T:
        """The result of ``work``; after a failure the table is opened again by the next call."""
        try:
            return self._storage.named(what, work)
        except BaseException:
            self.close()
            raise


def require_supported(problem: str | None) -> None:
    """Raise an EngineRefusedError for a problem."""
    if problem is not None:
        raise EngineRefusedError(problem)


def _full_rows(snapshot: Snapshot, changes: RowChanges) -> pa.Table:
    """The upserts as rows of the table: a column that they lack keeps its value in the old row."""
    names = changes.upserts.column_names
    given = pa.schema([snapshot.stored_schema.field(name) for name in names])
    rows = conform(changes.upserts, given, snapshot.name)
    kept = [name for name in snapshot.schema.names if name not in names]
    if kept:
        old = snapshot.read(changes.replaced, kept)
        for name in kept:
            rows = rows.append_column(old.schema.field(name), old[name])
    rows = rows.select(snapshot.schema.names)
    require_not_null(snapshot.name, pa.table(rows.columns, schema=snapshot.schema))
    return pa.table(rows.columns, schema=snapshot.stored_schema)


def _commit(
    snapshot: Snapshot,
    changes: RowChanges,
    rows: pa.Table,
    target_bytes: int,
    others: Sequence[Action],
) -> None:
    index = snapshot.index
    old = np.concatenate([changes.replaced[changes.replaced >= 0], changes.removed])
    numbers, old_rows = index.file[old], index.row[old]
    left: dict[int, LiveFile] = {}
    for number in np.unique(numbers).tolist():
        file = snapshot.files[number]
        left[number] = replace(file, vector=file.vector | BitMap64(old_rows[numbers == number]))
    rewrites: list[Rewrite] = []
    if snapshot.vectors:
        files = snapshot.with_vectors(left.values(), data_change=True)
    else:
        rewrites = rewritten(snapshot, left, target_bytes, data_change=True)
        files = [None] * len(left)
    replaced: Replaced = [*zip(left, files, strict=True)]
    actions = [removal(file.add, data_change=True) for file in left.values()]
    actions += [{"add": file.add} for file in files if file is not None]
    written, at = _write(snapshot, rows, target_bytes)
    for new in (*(rewrite.written for rewrite in rewrites), written):
        actions += [{"add": add} for add, _ in new]

    def update() -> None:
        index.file[old] = NO_FILE
        for rewrite in rewrites:
            rewrite.apply([LiveFile(add, count) for add, count in rewrite.written])
        added = [snapshot.add(LiveFile(add, count)) for add, count in written]
        number, where = places(at, [count for _, count in written])
        index.put(rows, changes.replaced, np.array(added, np.int32)[number], where)

    snapshot.commit("MERGE", [*actions, *others], replaced, update)


def _write(
    snapshot: Snapshot, rows: pa.Table, target_bytes: int
) -> tuple[list[tuple[Action, int]], Integers]:
    """Write rows, partition by partition.

    Returns:
        the ``add`` of each file and its number of rows, and the position of each row in all files.
    """
    stored = rows.select(snapshot.stored_columns)
    written: list[tuple[Action, int]] = []
    position, count = np.empty(len(rows), np.int64), 0
    for partition, at in partitions(rows, snapshot.partition_columns):
        whole = len(at) == len(rows)
        writer = PartitionWriter(snapshot.objects, partition, target_bytes)
        writer.add(stored if whole else stored.take(at))
        writer.finish()
        written += writer.files
        position[at.to_numpy()] = count + np.arange(len(at))
        count += len(at)
        if len(writer.files) == 1:
            snapshot.cache.put(writer.files[0][0], rows if whole else rows.take(at))
    return written, position


def _new_columns(
    storage: TableStorage, state: LogState, schema: pa.Schema
) -> tuple[str, list[Action]]:
    """The commit that gives a table other columns.

    A file that is written again changes no data (``dataChange`` is false). The files are read one
    by one, so the memory is that of a few.
    """
    columns = state.metadata["partitionColumns"]
    widened = widened_columns(schema_of(state), schema)
    problem = column_problem(schema, columns)
    if partitioned := [name for name in widened if name in columns]:
        problem = f"the partition column {partitioned[0]!r} gets another type"
    require_supported(problem)
    actions = changed_metadata(state, schema)
    if not widened:
        return "ADD COLUMNS", actions
    state.apply(Commit(state.version, list(actions)))
    changed = Snapshot(storage, state)
    for rewrite in rewritten(changed, changed.files, _TARGET_BYTES, data_change=False):
        actions += rewrite.removals()[0] + [{"add": add} for add, _ in rewrite.written]
    return "CHANGE COLUMNS", actions
