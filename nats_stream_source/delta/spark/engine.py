"""Engine ``"spark"``: finds or creates a table, and changes it by Delta Lake's MERGE."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
from delta.tables import DeltaTable
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from nats_stream_source.delta.conflicts import retry_conflicts
from nats_stream_source.delta.merge_result import MergeResult
from nats_stream_source.delta.rules.events import EventTable
from nats_stream_source.delta.rules.layout import Layout, state_name
from nats_stream_source.delta.schema import require_storable_names
from nats_stream_source.delta.spark.collect import DataFrameSource
from nats_stream_source.delta.spark.columns import spark_schema
from nats_stream_source.delta.spark.executor import CommittedMeanwhileError, Merge
from nats_stream_source.delta.spark.rows import require_valid_rows
from nats_stream_source.delta.spark.session import exact_settings
from nats_stream_source.delta.spark.table import SparkTable
from nats_stream_source.delta.spark.upkeep import CONFLICTS, upkeep_after_spark_commit
from nats_stream_source.delta.tables import Engine, FoundTables, not_a_table_error
from nats_stream_source.delta.upkeep import Upkeep

_NOT_A_TABLE = ("DELTA_MISSING_DELTA_TABLE", "DELTA_CREATE_TABLE_WITH_NON_EMPTY_LOCATION")


class SparkEngine(Engine[SparkTable]):
    """See :class:`nats_stream_source.delta.tables.Engine`.

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

    def _of_table(self, table: SparkTable | None, layout: Layout) -> SparkTable | None:
        state = super()._of_table(table, layout)
        if state is not None:
            state.follows = table
        return state

    def _merge(self, found: FoundTables[SparkTable], upkeep: Upkeep | None) -> MergeResult:
        shape, spark, source = found.shape, self._spark, found.source
        events = shape.target
        assert events is not None  # the shape is fitted to the table
        if found.table is not None:
            found.table.require_mergeable()
            found.table.with_columns(list(shape.layout.table_schema(events)))
        if found.state is not None:
            found.state.with_columns(list(shape.layout.state_schema(events)))
        if isinstance(source, DataFrameSource):
            frame = source.frame
        else:
            assert isinstance(source, EventTable)
            frame = spark.createDataFrame(source.rows)
        # Read once, and with the settings of the session: the rows are the user's.
        frame = frame.persist()
        try:
            require_valid_rows(frame, shape)
            with exact_settings(spark):
                table, state = self._created(found, upkeep)
                merge = Merge(self._name, frame, shape, table, state)
                conflicts = (*CONFLICTS, CommittedMeanwhileError)
                result, recorded = retry_conflicts(merge.run, self._name, conflicts)
        finally:
            frame.unpersist()
        if upkeep and recorded and state is not None:
            upkeep_after_spark_commit(spark, state.target, upkeep, self._name)
        if not (upkeep and result.changed):
            return result
        maintained = upkeep_after_spark_commit(spark, table.target, upkeep, self._name)
        return replace(result, maintained=maintained)

    def _state(self) -> SparkEngine:
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
            builder.addColumns(spark_schema(schema)).execute()
        except AnalysisException as error:
            if error.getCondition() not in _NOT_A_TABLE:
                raise
            raise not_a_table_error(name) from error
        return SparkTable(self._spark, name, path)
