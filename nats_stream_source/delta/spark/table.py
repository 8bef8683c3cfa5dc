"""A Delta table that Spark changes: its columns and properties, new columns, scans and upkeep.

**New columns** are added by one write without rows, which also adds fields to structs and widens
types, as ALTER TABLE cannot do in one commit. Types are widened in a table that has
``delta.enableTypeWidening``; any other table would have to be overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, reduce
from operator import and_, or_

import pyarrow as pa
from delta.tables import DeltaTable
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import BinaryType, StructType

from nats_stream_source.delta.conflicts import retry_conflicts
from nats_stream_source.delta.refused import COLUMN, PARTITION, PROPERTY, row
from nats_stream_source.delta.rules.layout import END, SEQUENCE, Layout, layout_of
from nats_stream_source.delta.rules.reading import Where
from nats_stream_source.delta.schema import (
    has_ntz,
    log_new_columns,
    require_storable_names,
    same_columns,
    widened_columns,
    with_new_columns,
)
from nats_stream_source.delta.spark.columns import arrow_schema, quote, spark_field, spark_schema
from nats_stream_source.delta.spark.session import exact_settings
from nats_stream_source.delta.spark.upkeep import CONFLICTS, maintain_by_spark, newest_version
from nats_stream_source.delta.tables import TableChangedError
from nats_stream_source.delta.upkeep import MaintenanceResult, Upkeep
from nats_stream_source.errors import ConfigurationError

_WIDENING = "delta.enableTypeWidening"


class SparkTable:
    """See :class:`nats_stream_source.delta.tables.Table`.

    Args:
        spark: the session of the table.
        name: path, URI or name as the user gave it.
        path: the path or URI for Spark; None for a name in the catalog.

    Attributes:
        target: the table for Delta's own functions.
        follows: of a state table, the table beside it, which it follows in whether types are
            widened.

    Raises:
        AnalysisException: a name that the catalog does not have.
    """

    def __init__(self, spark: SparkSession, name: str, path: str | None) -> None:
        self._spark = spark
        self._name = name
        self._path = path
        self.follows: SparkTable | None = None
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
        return newest_version(self.target)

    @property
    def _widens(self) -> bool:
        return bool(self._detail.properties.get(_WIDENING) == "true")

    @cached_property
    def _detail(self) -> Row:
        detail = self.target.detail().select("id", "properties", "partitionColumns").head()
        assert detail is not None  # DESCRIBE DETAIL has one row
        return detail

    def require_mergeable(self) -> None:
        """Raise ConfigurationError if Spark does not change rows, or stores other values."""
        if self._detail.properties.get("delta.appendOnly") == "true":
            refusal = row(PROPERTY, "delta.appendOnly=true")
            raise ConfigurationError(
                f"could not use table {self._name!r}: "
                f"{refusal.reason.format('delta.appendOnly=true')}; {refusal.action}"
            )
        for name in self._detail.partitionColumns:
            if isinstance(self.columns[name].dataType, BinaryType):
                refusal = row(PARTITION, "BINARY")
                raise ConfigurationError(
                    f"could not use table {self._name!r}: {refusal.reason.format(name)}, whose "
                    f"bytes are stored as UTF-8 and lost where they are not; {refusal.action}"
                )

    def with_columns(self, columns: Sequence[pa.Field]) -> pa.Schema:
        """The table's columns with others; the schema itself if it has them all.

        Raises:
            ConfigurationError: the table cannot store the columns.
        """
        own = self.schema
        schema = with_new_columns(self._name, own, columns)
        if schema is own:
            return own
        if self._detail.properties.get("delta.columnMapping.mode", "none") == "none":
            require_storable_names(self._name, schema)
        widened = widened_columns(own, schema)
        if widened and not (self.follows or self)._widens:
            refusal = row(COLUMN, "wider type")
            raise ConfigurationError(
                f"could not merge the batch into table {self._name!r}: "
                f"{refusal.reason.format(widened[0])}; {refusal.action}"
            )
        return schema

    def add_columns(self, columns: Sequence[pa.Field]) -> None:
        """See :class:`nats_stream_source.delta.tables.Table`.

        Raises:
            TableChangedError: another writer has changed the columns meanwhile.
        """
        own = self.schema
        schema = self.with_columns(columns)
        if schema is own:
            return
        properties = {}
        if has_ntz(schema) and not has_ntz(own):
            properties["delta.feature.timestampNtz"] = "supported"
        if widened_columns(own, schema) and not self._widens:
            properties[_WIDENING] = "true"
        identifier = self._name if self._path is None else f"delta.{quote(self._path)}"
        for key, value in properties.items():
            self._spark.sql(f"ALTER TABLE {identifier} SET TBLPROPERTIES ('{key}' = '{value}')")
        fields = [
            self.columns[one.name]
            if one.name in own.names and own.field(one.name).type == one.type
            else spark_field(one)
            for one in schema
        ]
        empty = self._spark.createDataFrame([], StructType(fields))
        writer = empty.write.format("delta").mode("append").option("mergeSchema", "true")
        name, path = self._name, self._path
        with exact_settings(self._spark):
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
        conditions = [_is_one_of(F.col(quote(name)), values) for name, values in where.items()]
        if conditions:
            frame = frame.where(reduce(and_, conditions))
        with exact_settings(self._spark):
            return frame.select(*map(quote, columns)).toArrow()

    def rows_of_keys(self, of: pa.Table, keys: Sequence[str], columns: Sequence[str]) -> pa.Table:
        """Columns of the rows of keys.

        Args:
            of: the keys, in any number; with their sequences, rows that end before these, or are
                recorded for an earlier one, are left out.
            keys: the names of the key columns.
            columns: of the table.
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
        wanted = F.broadcast(self._spark.createDataFrame(of, spark_schema(of.schema)).alias("k"))
        found = self.target.toDF().alias("t").join(wanted, reduce(and_, conditions), "left_semi")
        return found.select(*(F.col(f"t.{quote(name)}") for name in columns)).toArrow()

    def maintain(self, upkeep: Upkeep) -> MaintenanceResult:
        """See :class:`nats_stream_source.delta.tables.Table`."""
        with exact_settings(self._spark):
            return maintain_by_spark(self._spark, self.target, upkeep, self._name)


def _is_one_of(column: Column, values: Sequence[object]) -> Column:
    return reduce(or_, (column.eqNullSafe(F.lit(value)) for value in values))
