"""Engine ``"spark"``: finds or creates the table that Spark's MERGE changes."""

from __future__ import annotations

from delta.tables import DeltaTable
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from nats_stream_source.delta.spark.merge_into import SparkTable
from nats_stream_source.delta.table import (
    Deletes,
    Table,
    is_path,
    not_a_table_error,
    table_schema,
)
from nats_stream_source.delta.upkeep import Upkeep

_NOT_A_TABLE = ("DELTA_MISSING_DELTA_TABLE", "DELTA_CREATE_TABLE_WITH_NON_EMPTY_LOCATION")


class SparkEngine:
    """See :class:`nats_stream_source.delta.table.TableEngine`."""

    def __init__(self, spark: SparkSession, name: str) -> None:
        self._spark = spark
        self._name = name

    def find(self) -> Table | None:
        """See :class:`nats_stream_source.delta.table.TableEngine`."""
        spark, name = self._spark, self._name
        if is_path(name):
            exists = DeltaTable.isDeltaTable(spark, name)
            return self._table(DeltaTable.forPath(spark, name)) if exists else None
        try:
            return self._table(DeltaTable.forName(spark, name))
        except AnalysisException:
            # The class of the error differs between catalogs. A table that exists in another format
            # must still raise, not count as missing.
            if spark.catalog.tableExists(name):
                raise
            return None

    def find_or_create(self, batch: StructType, deletes: Deletes, upkeep: Upkeep | None) -> Table:
        """See :class:`nats_stream_source.delta.table.TableEngine`."""
        found = self.find()
        if found is not None:
            return found
        name = self._name
        builder = DeltaTable.createIfNotExists(self._spark)
        builder = builder.location(name) if is_path(name) else builder.tableName(name)
        properties = upkeep.table_properties(False) if upkeep else {}
        for key, value in properties.items():
            builder = builder.property(key, value)
        try:
            return self._table(builder.addColumns(table_schema(batch, deletes)).execute())
        except AnalysisException as error:
            if error.getCondition() not in _NOT_A_TABLE:
                raise
            raise not_a_table_error(name) from error

    def _table(self, target: DeltaTable) -> Table:
        return SparkTable(self._spark, self._name, target)
