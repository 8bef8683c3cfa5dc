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

**Upkeep** is OPTIMIZE and VACUUM of Delta Lake (:mod:`nats_stream_source.delta.upkeep`). Both are
Spark jobs that list the table, and take seconds. Spark itself writes the log's checkpoints and
deletes the expired files of the log.

**New columns** are added by one write without rows, which also adds fields to structs, as ALTER
TABLE cannot do in one commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from operator import and_, or_

import numpy as np
import pyarrow as pa
from delta.exceptions import (
    ConcurrentAppendException,
    ConcurrentDeleteDeleteException,
    ConcurrentDeleteReadException,
    ConcurrentTransactionException,
    ConcurrentWriteException,
    MetadataChangedException,
    ProtocolChangedException,
)
from delta.tables import DeltaTable
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, DataFrame, Row, SparkSession, functions as F
from pyspark.sql.types import BinaryType, StructType

from nats_stream_source.delta.conflicts import first_line, retry_conflicts
from nats_stream_source.delta.merge_result import MergeResult, newest_created
from nats_stream_source.delta.refused import COLUMN, PARTITION, PROPERTY, row as refused_row
from nats_stream_source.delta.rules.changes import changes_of
from nats_stream_source.delta.rules.events import EventShape
from nats_stream_source.delta.rules.layout import (
    DELETED_COLUMN,
    END,
    SEQUENCE,
    Layout,
    layout_of,
    state_name,
)
from nats_stream_source.delta.rules.rows import Where
from nats_stream_source.delta.schema import (
    OWN_PREFIX,
    has_ntz,
    log_new_columns,
    require_storable_names,
    same_columns,
    stored_field,
    type_parts,
    widened_columns,
    with_new_columns,
)
from nats_stream_source.delta.spark.columns import (
    arrow_schema,
    quote,
    spark_field,
    spark_schema,
)
from nats_stream_source.delta.spark.reader import RowsOfKeys
from nats_stream_source.delta.spark.session import (
    SKIPS_EMPTY_COMMITS,
    data_frame,
    temporary_settings,
)
from nats_stream_source.delta.tables import Table, TableChangedError, not_a_table_error
from nats_stream_source.delta.upkeep import (
    MaintenanceResult,
    Upkeep,
    maintenance_error,
    skipped_after_conflict,
)
from nats_stream_source.errors import ConfigurationError
from nats_stream_source.logs import field_logger

CONFLICTS = (
    ConcurrentAppendException,
    ConcurrentDeleteDeleteException,
    ConcurrentDeleteReadException,
    ConcurrentTransactionException,
    ConcurrentWriteException,
    MetadataChangedException,
    ProtocolChangedException,
)
"""Delta's exceptions of a commit that conflicts with another one; they lack a common base."""

_RETENTION_CHECK = "spark.databricks.delta.retentionDurationCheck.enabled"
_MAX_FILE_SIZE = "spark.databricks.delta.optimize.maxFileSize"
_LISTING_TASKS = "spark.sql.sources.parallelPartitionDiscovery.parallelism"
_FAILURES = (PySparkException, Py4JJavaError)
_NOT_A_TABLE = ("DELTA_MISSING_DELTA_TABLE", "DELTA_CREATE_TABLE_WITH_NON_EMPTY_LOCATION")
_CHANGED = "another writer has changed the rows meanwhile"

# Of a row in a MERGE: whether it is removed, and the row of the table as it was read.
_REMOVED, _READ = OWN_PREFIX + "removed", OWN_PREFIX + "read"

_log = field_logger(__name__)


class SparkTable(Table):
    """See :class:`nats_stream_source.delta.tables.Table`. Each merge opens it again.

    Args:
        path: the path or URI for Spark; None for a name in the catalog, which must have it.

    Attributes:
        target: the table for Delta's own functions.
    """

    def __init__(self, spark: SparkSession, name: str, path: str | None) -> None:
        super().__init__(name)
        self._spark = spark
        self._path = path

    def exists(self) -> bool:
        """See :class:`nats_stream_source.delta.tables.Table`."""
        if self._path is not None and not DeltaTable.isDeltaTable(self._spark, self._path):
            return False
        try:
            self._open()
        except AnalysisException:
            # The class of the error differs between catalogs. A table that exists in another format
            # must still raise, not count as missing.
            if self._path is not None or self._spark.catalog.tableExists(self.name):
                raise
            return False
        return True

    def _open(self) -> None:
        # A DeltaTable keeps the schema with which it was opened.
        path, spark = self._path, self._spark
        self.target = (
            DeltaTable.forName(spark, self.name)
            if path is None
            else DeltaTable.forPath(spark, path)
        )
        self.columns: StructType = self.target.toDF().schema
        for name in ("_detail", "schema"):
            self.__dict__.pop(name, None)

    @cached_property
    def schema(self) -> pa.Schema:
        """See :class:`nats_stream_source.delta.tables.Table`."""
        return arrow_schema(self.columns)

    @property
    def layout(self) -> Layout | None:
        """See :class:`nats_stream_source.delta.tables.Table`."""
        return layout_of(self._detail.properties, self.schema)

    @property
    def table_id(self) -> str:
        """See :class:`nats_stream_source.delta.tables.Table`."""
        return str(self._detail.id)

    def is_empty(self) -> bool:
        """See :class:`nats_stream_source.delta.tables.Table`."""
        return self.target.toDF().isEmpty()

    def version(self) -> int:
        """The newest version."""
        newest = self.target.history(1).select("version").head()
        assert newest is not None  # a table has at least the version that created it
        return int(newest.version)

    @cached_property
    def _detail(self) -> Row:
        detail = self.target.detail().select("id", "properties", "partitionColumns").head()
        assert detail is not None  # DESCRIBE DETAIL has one row
        return detail

    def _verify(self, columns: pa.Schema) -> None:
        if self._detail.properties.get("delta.appendOnly") == "true":
            raise self._refused(PROPERTY, "delta.appendOnly=true", "delta.appendOnly=true")
        for name in self._detail.partitionColumns:
            if isinstance(self.columns[name].dataType, BinaryType):  # stored as UTF-8, or lost
                raise self._refused(PARTITION, "BINARY", name)
        self._with_columns(columns)

    def _with_columns(self, columns: Iterable[pa.Field]) -> pa.Schema:
        """The table's columns with others that it can store; the schema itself if it has all."""
        own = self.schema
        schema = with_new_columns(self.name, own, columns)
        if schema is own:
            return own
        if self._detail.properties.get("delta.columnMapping.mode", "none") == "none":
            require_storable_names(self.name, schema)
        for name in widened_columns(own, schema):
            raise self._refused(COLUMN, "wider type", name)
        return schema

    def _refused(self, kind: str, name: str, found: str) -> ConfigurationError:
        refusal = refused_row(kind, name)
        return ConfigurationError(
            f"could not merge the batch into table {self.name!r}: "
            f"{refusal.reason.format(found)}; {refusal.action}"
        )

    def add_columns(self, columns: Sequence[pa.Field]) -> None:
        """See :class:`nats_stream_source.delta.tables.Table`.

        Raises:
            TableChangedError: another writer has changed the columns meanwhile.
        """
        own = self.schema
        schema = self._with_columns(columns)
        if schema is own:
            return
        fields = [
            self.columns[one.name]
            if one.name in own.names and own.field(one.name).type == one.type
            else spark_field(one)
            for one in schema
        ]
        with temporary_settings(self._spark):
            if has_ntz(schema) and not has_ntz(own):
                self.target.addFeatureSupport("timestampNtz")
            retry_conflicts(lambda: self._write_no_rows(StructType(fields)), self.name, CONFLICTS)
        log_new_columns(self.name, own, schema)
        self._open()
        # Versions are compared by the columns that the events have. Events with fewer columns than
        # the table would join versions that differ in the others.
        if not same_columns(self.schema, schema):
            raise TableChangedError("the table's columns changed")

    def _write_no_rows(self, columns: StructType) -> None:
        empty = self._spark.createDataFrame([], columns)
        writer = empty.write.format("delta").mode("append").option("mergeSchema", "true")
        if self._path is None:
            writer.saveAsTable(self.name)
        else:
            writer.save(self._path)

    def scan(self, columns: Sequence[str], where: Where) -> pa.Table:
        """See :class:`nats_stream_source.delta.tables.Table`."""
        frame: DataFrame = self.target.toDF()
        conditions = [
            reduce(or_, (F.col(quote(name)).eqNullSafe(F.lit(value)) for value in values))
            for name, values in where.items()
        ]
        if conditions:
            frame = frame.where(reduce(and_, conditions))
        with temporary_settings(self._spark):
            return frame.select(*map(quote, columns)).toArrow()

    def rows_of_keys(self, of: pa.Table, keys: Sequence[str], columns: Sequence[str]) -> pa.Table:
        """Columns of the rows of keys.

        Args:
            of: the keys, in any number; with their sequences, rows that end before these, or are
                recorded for an earlier one, are left out.
        """
        conditions = [F.col(f"t.{quote(name)}") == F.col(f"k.{quote(name)}") for name in keys]
        if SEQUENCE in of.column_names:
            sequence = F.col(f"k.{SEQUENCE}")
            if END in self.schema.names:
                end = F.col(f"t.{END}")
                conditions.append(end.isNull() | (end >= sequence))
            else:
                conditions.append(F.col(f"t.{SEQUENCE}") >= sequence)
        # Of the size of the keys Spark knows nothing, and would sort the table to join it.
        wanted = F.broadcast(data_frame(self._spark, of, of.schema).alias("k"))
        found = self.target.toDF().alias("t").join(wanted, reduce(and_, conditions), "left_semi")
        rows = found.select(*(F.col(f"t.{quote(name)}") for name in columns)).toArrow()
        # A row that a reader does not find has nulls, also in a column that is NOT NULL.
        return rows.cast(pa.schema([field.with_nullable(True) for field in rows.schema]))

    def maintain(self, upkeep: Upkeep) -> MaintenanceResult:
        """See :class:`nats_stream_source.delta.tables.Table`."""
        with temporary_settings(self._spark):
            try:
                result = self._compact(upkeep)
                self._vacuum(upkeep)
            except _FAILURES as error:
                raise maintenance_error(self.name, error) from error
        return result

    def state(self) -> SparkTable:
        """See :class:`nats_stream_source.delta.tables.Table`."""
        path = None if self._path is None else state_name(self._path)
        return SparkTable(self._spark, state_name(self.name), path)

    def _create(self, schema: pa.Schema, layout: Layout, upkeep: Upkeep | None) -> None:
        name, path = self.name, self._path
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
        self._open()

    def _merge(
        self, events: pa.Table, shape: EventShape, state: SparkTable | None, upkeep: Upkeep | None
    ) -> MergeResult:
        conflicts = (*CONFLICTS, TableChangedError)
        # The batch was read with the settings of the session: its rows are the user's.
        with temporary_settings(self._spark):
            result, recorded = retry_conflicts(
                lambda: _merge_events(self._spark, events, shape, self, state),
                self.name,
                conflicts,
            )
            if upkeep and recorded and state is not None:
                state.upkeep_after_commit(upkeep)
            if not (upkeep and result.changed):
                return result
            return replace(result, maintained=self.upkeep_after_commit(upkeep))

    def upkeep_after_commit(self, upkeep: Upkeep) -> MaintenanceResult:
        """Do what is due. A failure is logged, and the next commit tries again."""
        result = MaintenanceResult()
        try:
            after = self.version()
            before = after - 1
            if upkeep.look_at_files_due(before, after):
                detail = self.target.detail().select("numFiles", "sizeInBytes").head()
                assert detail is not None  # DESCRIBE DETAIL has one row
                needed = detail.sizeInBytes // upkeep.target_file_bytes + 1
                if upkeep.compact_files and detail.numFiles - needed >= upkeep.compact_files:
                    result = self._compact(upkeep)
            if upkeep.vacuum_due(before, after):
                self._vacuum(upkeep)
        except _FAILURES as error:
            _log.warning("could not maintain the table", table=self.name, error=first_line(error))
        return result

    def _compact(self, upkeep: Upkeep) -> MaintenanceResult:
        with temporary_settings(self._spark, {_MAX_FILE_SIZE: str(upkeep.target_file_bytes)}):
            try:
                row = self.target.optimize().executeCompaction().select("metrics.*").head()
            except CONFLICTS as error:
                return skipped_after_conflict(error)
        assert row is not None  # OPTIMIZE returns one row
        return MaintenanceResult(int(row.numFilesRemoved), int(row.numFilesAdded))

    def _vacuum(self, upkeep: Upkeep) -> None:
        # VACUUM lists the directories in as many tasks as this; the default of 10,000 takes minutes
        # on a few cores. A retention that the user asks for can be below the table's.
        settings: dict[str, str | None] = {_LISTING_TASKS: "64"}
        if upkeep.retention_hours is not None:
            settings[_RETENTION_CHECK] = "false"
        with temporary_settings(self._spark, settings):
            self.target.vacuum(upkeep.retention_hours)


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
    rows = RowsOfKeys(table.rows_of_keys, keys, known, events)
    rows.rows(events.select([*layout.keys, *([SEQUENCE] if layout.scd_type == 2 else [])]))
    recorded, columns = None, layout.state_schema(events.schema).names
    if state is not None:
        recorded = RowsOfKeys(state.rows_of_keys, keys, columns, events)
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
