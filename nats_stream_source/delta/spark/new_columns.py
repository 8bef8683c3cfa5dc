"""Adds columns of a batch to a table by Spark, and widens their types.

**Wider types.** Delta Lake widens columns of a table that has ``delta.enableTypeWidening``, by a
change of its schema only. Any other table is overwritten with its own rows, in one commit, since
most other readers do not have the feature (see :mod:`nats_stream_source.delta.cdc.columns`). An
overwrite loses what belongs to a column beside its type, such as NOT NULL or an expression, so
tables with such columns must have the property.
"""

from __future__ import annotations

from collections.abc import Sequence

from delta.tables import DeltaTable
from pyspark.sql import Row, SparkSession
from pyspark.sql.types import StructField, StructType

from nats_stream_source.delta.cdc.columns import (
    conformed,
    has_ntz,
    log_new_columns,
    verify_columns,
    widened_columns,
    with_new_columns,
)
from nats_stream_source.delta.cdc.layout import Layout
from nats_stream_source.delta.conflicts import retry_conflicts
from nats_stream_source.delta.spark.conflicts import CONFLICTS
from nats_stream_source.delta.spark.settings import require_exact_times
from nats_stream_source.delta.stored_columns import require_storable_names
from nats_stream_source.delta.table import quote
from nats_stream_source.errors import ConfigurationError

_WIDENING = "delta.enableTypeWidening"
_OVERWRITTEN = {
    "appendOnly",
    "deletionVectors",
    "invariants",
    "timestampNtz",
    "typeWidening",
}
"""Features of a table that is the same after an overwrite, but for its types."""


def add_columns(
    spark: SparkSession,
    name: str,
    path: str | None,
    target: DeltaTable,
    batch: Sequence[StructField],
    *,
    of_table: DeltaTable | None = None,
) -> DeltaTable:
    """Add what the columns of a table lack; returns the table with it.

    Args:
        spark: the session of the table.
        name: path, URI or name as the user gave it.
        path: the path or URI for Spark; None for a name in the catalog.
        target: the newest version.
        batch: the columns to store.
        of_table: of a state table: the table beside it, which it follows in how types are widened.

    Raises:
        TableChangedError: another writer has added or widened columns meanwhile.
        ConfigurationError: the table cannot store the columns.
    """
    own = target.toDF().schema
    schema = with_new_columns(name, own, batch)
    if schema is own:
        return target
    detail = target.detail().head()
    assert detail is not None  # DESCRIBE DETAIL has one row
    if detail.properties.get("delta.columnMapping.mode", "none") == "none":
        require_storable_names(name, schema)
    require_exact_times(spark, name, schema, lambda: Layout.of(detail.properties))
    properties = {}
    widened, widens = widened_columns(own, schema), _widens(detail)
    if widened and not widens and of_table is not None and _widens(of_table.detail().head()):
        widens, properties[_WIDENING] = True, "true"
    if has_ntz(schema) and not has_ntz(own):
        properties["delta.feature.timestampNtz"] = "supported"
    if widened and not widens:
        _require_overwritten(name, own, detail, widened[0])
    identifier = name if path is None else f"delta.{quote(path)}"
    for key, value in properties.items():
        spark.sql(f"ALTER TABLE {identifier} SET TBLPROPERTIES ('{key}' = '{value}')")

    def save() -> None:
        if widened and not widens:
            rows = conformed(newest().toDF(), schema, schema.names)
            writer = rows.write.mode("overwrite").option("overwriteSchema", "true")
            # The session can have another mode, which cannot change a schema.
            writer = writer.option("partitionOverwriteMode", "static")
            writer = writer.partitionBy(*detail.partitionColumns)
        else:
            # A write without rows: it adds fields to structs, and widens types, as ALTER TABLE
            # cannot do in one commit.
            empty = spark.createDataFrame([], schema)
            writer = empty.write.mode("append").option("mergeSchema", "true")
        writer = writer.format("delta")
        if path is None:
            writer.saveAsTable(name)
        else:
            writer.save(path)

    def newest() -> DeltaTable:
        # A DeltaTable keeps the schema with which it was opened.
        of = DeltaTable.forName if path is None else DeltaTable.forPath
        return of(spark, name if path is None else path)

    retry_conflicts(save, name, CONFLICTS)
    log_new_columns(name, own, schema)
    added = newest()
    verify_columns(added.toDF().schema, schema)
    return added


def _widens(detail: Row | None) -> bool:
    return detail is not None and detail.properties.get(_WIDENING) == "true"


def _require_overwritten(table: str, own: StructType, detail: Row, column: str) -> None:
    """Raise ConfigurationError if an overwrite would lose more than the types of a table."""
    problem = ", ".join(sorted({*detail.tableFeatures} - _OVERWRITTEN))
    problem = problem and f"features that an overwrite can lose ({problem})"
    required = [field.name for field in own.fields if not field.nullable]
    if required:
        problem = f"the column {required[0]!r}, which is NOT NULL"
    if problem:
        raise ConfigurationError(
            f"could not widen column {column!r} of table {table!r}: the table has {problem}; cast "
            f"the column of the batch, or set the table property {_WIDENING}, with which few other "
            f"readers can read it"
        )
