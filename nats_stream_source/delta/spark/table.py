"""A Delta table that Spark changes: its columns and properties, new columns, scans and upkeep.

**Upkeep** is OPTIMIZE and VACUUM of Delta Lake (:mod:`nats_stream_source.delta.upkeep`). Both are
Spark jobs that list the table, and take seconds. Spark itself writes the log's checkpoints and
deletes the expired files of the log.

**New columns** are added by one write without rows, which also adds fields to structs, as ALTER
TABLE cannot do in one commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, reduce
from operator import and_, or_

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
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession, functions as F
from pyspark.sql.types import BinaryType, StructType

from nats_stream_source.delta.conflicts import first_line, retry_conflicts
from nats_stream_source.delta.refused import COLUMN, PARTITION, PROPERTY, row as refused_row
from nats_stream_source.delta.rules.layout import END, SEQUENCE, Layout, layout_of
from nats_stream_source.delta.rules.rows import Where
from nats_stream_source.delta.schema import (
    has_ntz,
    log_new_columns,
    require_storable_names,
    same_columns,
    widened_columns,
    with_new_columns,
)
from nats_stream_source.delta.spark.columns import arrow_schema, quote, spark_field
from nats_stream_source.delta.spark.session import data_frame, temporary_settings
from nats_stream_source.delta.tables import TableChangedError
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

_log = field_logger(__name__)


class SparkTable:
    """See :class:`nats_stream_source.delta.tables.Table`.

    Args:
        path: the path or URI for Spark; None for a name in the catalog, which must have it.

    Attributes:
        target: the table for Delta's own functions.
    """

    def __init__(self, spark: SparkSession, name: str, path: str | None) -> None:
        self._spark = spark
        self._name = name
        self._path = path
        self._open()

    def _open(self) -> None:
        # A DeltaTable keeps the schema with which it was opened.
        path, spark = self._path, self._spark
        self.target = (
            DeltaTable.forName(spark, self._name)
            if path is None
            else DeltaTable.forPath(spark, path)
        )
        self.columns: StructType = self.target.toDF().schema
        self.schema = arrow_schema(self.columns)
        self.__dict__.pop("_detail", None)

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

    def require_mergeable(self) -> None:
        """Raise ConfigurationError if Spark does not change rows, or stores other values."""
        if self._detail.properties.get("delta.appendOnly") == "true":
            raise self._refused(PROPERTY, "delta.appendOnly=true", "delta.appendOnly=true")
        for name in self._detail.partitionColumns:
            if isinstance(self.columns[name].dataType, BinaryType):  # stored as UTF-8, or lost
                raise self._refused(PARTITION, "BINARY", name)

    def with_columns(self, columns: Sequence[pa.Field]) -> pa.Schema:
        """The table's columns with others that it can store; the schema itself if it has all."""
        own = self.schema
        schema = with_new_columns(self._name, own, columns)
        if schema is own:
            return own
        if self._detail.properties.get("delta.columnMapping.mode", "none") == "none":
            require_storable_names(self._name, schema)
        for name in widened_columns(own, schema):
            raise self._refused(COLUMN, "wider type", name)
        return schema

    def _refused(self, kind: str, name: str, found: str) -> ConfigurationError:
        refusal = refused_row(kind, name)
        return ConfigurationError(
            f"could not merge the batch into table {self._name!r}: "
            f"{refusal.reason.format(found)}; {refusal.action}"
        )

    def add_columns(self, columns: Sequence[pa.Field]) -> None:
        """See :class:`nats_stream_source.delta.tables.Table`.

        Raises:
            TableChangedError: another writer has changed the columns meanwhile.
        """
        own = self.schema
        schema = self.with_columns(columns)
        if schema is own:
            return
        fields = [
            self.columns[one.name]
            if one.name in own.names and own.field(one.name).type == one.type
            else spark_field(one)
            for one in schema
        ]
        empty = self._spark.createDataFrame([], StructType(fields))
        writer = empty.write.format("delta").mode("append").option("mergeSchema", "true")
        name, path = self._name, self._path
        with temporary_settings(self._spark):
            if has_ntz(schema) and not has_ntz(own):
                self.target.addFeatureSupport("timestampNtz")
            retry_conflicts(
                lambda: writer.saveAsTable(name) if path is None else writer.save(path),
                name,
                CONFLICTS,
            )
        log_new_columns(name, own, schema)
        self._open()
        # Versions are compared by the columns that the events have. Events with fewer columns than
        # the table would join versions that differ in the others.
        if not same_columns(self.schema, schema):
            raise TableChangedError("the table's columns changed")

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
                raise maintenance_error(self._name, error) from error
        return result

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
            _log.warning("could not maintain the table", table=self._name, error=first_line(error))
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
