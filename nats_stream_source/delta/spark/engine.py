"""Engine ``"spark"``: finds or creates the table that Spark's MERGE changes."""

from __future__ import annotations

from collections.abc import Mapping

from delta.tables import DeltaTable
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from nats_stream_source.delta.cdc.columns import require_fields
from nats_stream_source.delta.cdc.layout import Layout, state_name
from nats_stream_source.delta.cdc.tables import BaseEngine, FoundTables
from nats_stream_source.delta.merge_result import MergeResult
from nats_stream_source.delta.spark.event_merge import merge_by_spark
from nats_stream_source.delta.spark.merge_into import SparkTable
from nats_stream_source.delta.spark.settings import (
    require_changeable_table,
    require_exact_times,
    require_repeated_commits,
)
from nats_stream_source.delta.stored_columns import require_storable_names
from nats_stream_source.delta.table import not_a_table_error
from nats_stream_source.delta.upkeep import Upkeep

_NOT_A_TABLE = ("DELTA_MISSING_DELTA_TABLE", "DELTA_CREATE_TABLE_WITH_NON_EMPTY_LOCATION")


class SparkEngine(BaseEngine[SparkTable]):
    """See :class:`nats_stream_source.delta.table.TableEngine`.

    Args:
        spark: the session of the table.
        name: path, URI or name as the user gave it.
        path: the path or URI for Spark; None for a name in the catalog.
    """

    def __init__(self, spark: SparkSession, name: str, path: str | None) -> None:
        super().__init__(name)
        self._spark = spark
        self._path = path

    def find(self) -> SparkTable | None:
        """See :class:`nats_stream_source.delta.table.TableEngine`."""
        spark, name, path = self._spark, self._name, self._path
        require_repeated_commits(spark, name)
        if path is not None:
            exists = DeltaTable.isDeltaTable(spark, path)
            return self._table(DeltaTable.forPath(spark, path)) if exists else None
        try:
            return self._table(DeltaTable.forName(spark, name))
        except AnalysisException:
            # The class of the error differs between catalogs. A table that exists in another format
            # must still raise, not count as missing.
            if spark.catalog.tableExists(name):
                raise
            return None

    def _merge(self, found: FoundTables[SparkTable], upkeep: Upkeep | None) -> MergeResult:
        if found.table is not None:
            found.table.require_exact_partitions()
        if found.table is not None:
            require_fields(self._name, found.events.rows.schema, found.table.schema)
        return merge_by_spark(
            self._spark, self._name, found.events, lambda: self._created(found, upkeep), upkeep
        )

    def _state(self) -> SparkEngine:
        path = None if self._path is None else state_name(self._path)
        return SparkEngine(self._spark, state_name(self._name), path)

    def _create(
        self, schema: StructType, layout: Mapping[str, str], upkeep: Upkeep | None
    ) -> SparkTable:
        name, path = self._name, self._path
        require_storable_names(name, schema)
        require_changeable_table(self._spark, name)
        require_exact_times(self._spark, name, schema, lambda: Layout.of(layout))
        builder = DeltaTable.createIfNotExists(self._spark)
        builder = builder.tableName(name) if path is None else builder.location(path)
        properties = {**layout, **(upkeep.table_properties(False) if upkeep else {})}
        for key, value in properties.items():
            builder = builder.property(key, value)
        try:
            return self._table(builder.addColumns(schema).execute())
        except AnalysisException as error:
            if error.getCondition() not in _NOT_A_TABLE:
                raise
            raise not_a_table_error(name) from error

    def _table(self, target: DeltaTable) -> SparkTable:
        table = SparkTable(self._spark, self._name, self._path, target)
        require_exact_times(self._spark, self._name, table.schema, lambda: table.layout)
        return table
