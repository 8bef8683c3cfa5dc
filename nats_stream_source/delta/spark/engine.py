"""Engine ``"spark"``: the rule in this process, its changes by Delta Lake's MERGE.

**Steps**, for each part of a batch (:mod:`batch`). 1. Read the rows of its keys; of entries, only
their keys and order. 2. The rule computes the changes. It reads the state of the keys if the table
has one. 3. MERGE the state, then the table. A MERGE without changes is left out; if only the state
has changed, that of the table commits a version without changes.

**Other writers.** Delta's MERGE does not compare with the versions that were read. So each change
carries what was read of its row, and the MERGE fails if the table has another one meanwhile.
Then all is computed again from the newest version; with a state table after any other commit in
between, too: the rows and the state have the events of both writers, so the second time is right. A
part of the changes would not do: a row of this writer can begin where one of the other's ends, by a
delete that only this end shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import and_

import numpy as np
import pyarrow as pa
from delta.tables import DeltaTable
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, Row, SparkSession, functions as F

from nats_stream_source.delta.conflicts import retry_conflicts
from nats_stream_source.delta.merge_result import MergeResult, newest_created
from nats_stream_source.delta.rules.changes import changes_of
from nats_stream_source.delta.rules.events import EventShape
from nats_stream_source.delta.rules.layout import DELETED_COLUMN, SEQUENCE, Layout, state_name
from nats_stream_source.delta.rules.rows import Integers, key_codes, positions_in
from nats_stream_source.delta.schema import (
    OWN_PREFIX,
    require_storable_names,
    stored_field,
    type_parts,
)
from nats_stream_source.delta.spark.batch import ONCE_BYTES
from nats_stream_source.delta.spark.columns import quote, spark_schema
from nats_stream_source.delta.spark.session import (
    SKIPS_EMPTY_COMMITS,
    data_frame,
    temporary_settings,
)
from nats_stream_source.delta.spark.table import CONFLICTS, SparkTable
from nats_stream_source.delta.tables import Engine, TableChangedError, not_a_table_error
from nats_stream_source.delta.upkeep import Upkeep

_NOT_A_TABLE = ("DELTA_MISSING_DELTA_TABLE", "DELTA_CREATE_TABLE_WITH_NON_EMPTY_LOCATION")
_CHANGED = "another writer has changed the rows meanwhile"

# Of a row in a MERGE: whether it is removed, and the row of the table as it was read.
_REMOVED, _READ = OWN_PREFIX + "removed", OWN_PREFIX + "read"


class SparkEngine(Engine[SparkTable]):
    """See :class:`nats_stream_source.delta.tables.Engine`.

    Args:
        path: the path or URI for Spark; None for a name in the catalog.
    """

    def __init__(self, spark: SparkSession, name: str, path: str | None) -> None:
        super().__init__(name)
        self._spark = spark
        self._path = path

    def find(self) -> SparkTable | None:
        """See :class:`nats_stream_source.delta.tables.Engine`."""
        spark, name, path = self._spark, self._name, self._path
        if path is not None:
            exists = DeltaTable.isDeltaTable(spark, path)
            return SparkTable(spark, name, path) if exists else None
        try:
            return SparkTable(spark, name, path)
        except AnalysisException:
            # The class of the error differs between catalogs. A table that exists in another format
            # must still raise, not count as missing.
            if spark.catalog.tableExists(name):
                raise
            return None

    def _verify(
        self, shape: EventShape, table: SparkTable | None, state: SparkTable | None
    ) -> None:
        assert shape.target is not None  # the shape is fitted to the table
        if table is not None:
            table.require_mergeable()
            table.with_columns(list(shape.layout.table_schema(shape.target)))
        if state is not None:
            state.with_columns(list(shape.layout.state_schema(shape.target)))

    def _merge(
        self,
        events: pa.Table,
        shape: EventShape,
        table: SparkTable,
        state: SparkTable | None,
        upkeep: Upkeep | None,
    ) -> MergeResult:
        conflicts = (*CONFLICTS, TableChangedError)
        # The batch was read with the settings of the session: its rows are the user's.
        with temporary_settings(self._spark):
            result, recorded = retry_conflicts(
                lambda: _merge_events(self._spark, events, shape, table, state),
                self._name,
                conflicts,
            )
            if upkeep and recorded and state is not None:
                state.upkeep_after_commit(upkeep)
            if not (upkeep and result.changed):
                return result
            return replace(result, maintained=table.upkeep_after_commit(upkeep))

    def state(self) -> SparkEngine:
        """See :class:`nats_stream_source.delta.tables.Engine`."""
        path = None if self._path is None else state_name(self._path)
        return SparkEngine(self._spark, state_name(self._name), path)

    def _create(self, schema: pa.Schema, layout: Layout, upkeep: Upkeep | None) -> SparkTable:
        name, path = self._name, self._path
        require_storable_names(name, schema)
        builder = DeltaTable.createIfNotExists(self._spark)
        builder = builder.tableName(name) if path is None else builder.location(path)
        properties = {**layout.properties, **(upkeep.table_properties(False) if upkeep else {})}
        for key, value in properties.items():
            builder = builder.property(key, value)
        try:
            with temporary_settings(self._spark):
                builder.addColumns(spark_schema(schema)).execute()
        except AnalysisException as error:
            if error.getCondition() not in _NOT_A_TABLE:
                raise
            raise not_a_table_error(name) from error
        return SparkTable(self._spark, name, path)


class _RowsOfKeys:
    """A :class:`nats_stream_source.delta.rules.rows.Reader` of the rows of one set of keys.

    The rows can be of several versions, since the MERGE compares each with what was read of it.

    Args:
        columns: what is read of each row.
        events: whose sizes are those that their rows are taken to have.
    """

    def __init__(
        self, table: SparkTable, keys: Sequence[str], columns: Sequence[str], events: pa.Table
    ) -> None:
        self._table, self._keys, self._events = table, list(keys), events
        self._columns = list(columns)
        self._rows: pa.Table | None = None

    def rows(self, keys: pa.Table) -> pa.Table:
        """The rows; the first call reads those of its keys, see :meth:`Reader.of_keys`.

        They are read in steps: the driver's JVM holds one of them.
        """
        if self._rows is None:
            of, columns = self._events, self._columns
            size = of.select([name for name in of.column_names if name in columns]).nbytes
            steps = 1 + size * len(keys) // (max(1, len(of)) * ONCE_BYTES)
            step = np.zeros(len(keys), int) if steps == 1 else key_codes(keys, self._keys) % steps
            self._rows = pa.concat_tables(
                self._table.rows_of_keys(keys.filter(pa.array(step == n)), self._keys, columns)
                for n in range(steps)
            )
        return self._rows

    def find(self, keys: pa.Table) -> Integers:
        return positions_in(keys, self.rows(keys), self._keys)

    def of_keys(self, keys: pa.Table) -> Integers:
        return np.flatnonzero(positions_in(self.rows(keys), keys, self._keys) >= 0)

    def read(self, slots: Integers, columns: Sequence[str]) -> pa.Table:
        assert self._rows is not None  # the slots are of its rows
        at = pa.array(np.maximum(slots, 0), mask=slots < 0)
        return self._rows.select(list(columns)).take(at)


def _merge_events(
    spark: SparkSession,
    events: pa.Table,
    shape: EventShape,
    table: SparkTable,
    state: SparkTable | None,
) -> tuple[MergeResult, bool]:
    """What has changed in the table, and whether the state table has changed."""
    layout = shape.layout
    if not len(events):
        return MergeResult("spark"), False
    version = None if state is None else table.version()
    known, keys = layout.table_schema(events.schema).names, layout.keys
    if layout.entries:
        known = [name for name in known if name in (*layout.identified, DELETED_COLUMN)]
    rows = _RowsOfKeys(table, keys, known, events)
    rows.rows(events.select([*layout.keys, *([SEQUENCE] if layout.scd_type == 2 else [])]))
    recorded, columns = None, layout.state_schema(events.schema).names
    if state is not None:
        recorded = _RowsOfKeys(state, keys, columns, events)
    changes = changes_of(events, layout, shape.tracked, rows, recorded)
    if state is not None and recorded is not None and changes.state:
        identity = layout.state("state").identity
        before = recorded.read(changes.state.replaced, columns)
        _merge_as_read(spark, state, changes.state.upserts, before, before[:0], identity)
    if not (changes or changes.state):
        return MergeResult("spark", contradictions=changes.contradictions), False
    before, gone = (rows.read(at, known) for at in (changes.replaced, changes.removed))
    # A MERGE without changes commits, too: so the state's change is a conflict for others, and
    # the next version is this writer's own.
    with temporary_settings(spark, {SKIPS_EMPTY_COMMITS: "false"}):
        merged = _merge_as_read(spark, table, changes.upserts, before, gone, layout.identity)
    vanished = merged.num_inserted_rows + merged.num_updated_rows != len(changes.upserts)
    if vanished or (version is not None and table.version() != version + 1):
        raise TableChangedError(_CHANGED)
    return MergeResult(
        "spark",
        merged.num_inserted_rows,
        merged.num_updated_rows,
        merged.num_deleted_rows,
        newest=newest_created(events) if len(changes) else None,
        contradictions=changes.contradictions,
    ), bool(changes.state)


def _merge_as_read(
    spark: SparkSession,
    table: SparkTable,
    upserts: pa.Table,
    before: pa.Table,
    gone: pa.Table,
    identity: Sequence[str],
) -> Row:
    """Upsert and remove rows of a table or state table in one MERGE; returns its counts.

    Args:
        before: the row that each upsert replaces, as it was read; nulls for none.
        gone: the rows that are removed, as they were read.
        identity: the columns that identify a row.
    """
    read = [stored_field(table.schema.field(name)) for name in before.column_names]
    written = [stored_field(table.schema.field(name)) for name in upserts.column_names]
    own = [pa.field(_READ, pa.struct(read)), pa.field(_REMOVED, pa.bool_())]

    def part(rows: pa.Table, known: pa.Table, removed: bool) -> pa.Table:
        # A struct array without rows lacks chunks.
        structs = known.combine_chunks().to_struct_array().combine_chunks()
        flags = pa.array(np.full(len(rows), removed))
        return rows.combine_chunks().append_column(_READ, structs).append_column(_REMOVED, flags)

    identified = upserts.select(list(identity)).schema
    removals = part(gone.select(list(identity)).cast(identified), gone, True)
    changed = pa.concat_tables([part(upserts, before, False), removals], promote_options="default")
    source = data_frame(spark, changed, pa.schema([*written, *own]))
    columns: dict[str, str | Column] = {
        quote(name): F.col(f"s.{quote(name)}") for name in upserts.column_names
    }
    key, removed = quote(identity[0]), F.col(f"s.{_REMOVED}")
    same = reduce(and_, map(_as_read, read))
    # Delta evaluates a condition for all rows, also for those of one side only.
    matched = F.col(f"t.{key}").isNotNull() & F.col(f"s.{key}").isNotNull()
    fails = F.raise_error(F.lit(_CHANGED)).cast("boolean")
    as_read = F.when(same, F.lit(True)).when(matched, fails).otherwise(F.lit(False))
    equal = (F.col(f"t.{quote(name)}") == F.col(f"s.{quote(name)}") for name in identity)
    merger = (
        table.target.alias("t")
        .merge(source.alias("s"), reduce(and_, equal))
        .whenMatchedDelete(removed & as_read)
        .whenMatchedUpdate(~removed & as_read, columns)
        .whenNotMatchedInsert(~removed & F.col(f"s.{_READ}.{key}").isNull(), columns)
    )
    try:
        counts = merger.execute().first()
    except (PySparkException, Py4JJavaError) as error:
        # Other errors show the plan, which has the text, too.
        if f"[USER_RAISED_EXCEPTION] {_CHANGED}" in str(error):
            raise TableChangedError(_CHANGED) from error
        raise
    assert counts is not None  # Delta's MERGE returns one row of counts
    return counts


def _as_read(field: pa.Field) -> Column:
    """Whether a column of the row has the value that was read; null equals null."""
    name = quote(field.name)
    now, before = F.col(f"t.{name}"), F.col(f"s.{_READ}.{name}")
    if any(pa.types.is_map(kind) for kind in type_parts(field.type)):  # two cannot be compared
        now, before = F.to_json(F.struct(now)), F.to_json(F.struct(before.alias(field.name)))
    return now.eqNullSafe(before)
