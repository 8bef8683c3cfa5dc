"""Engine ``"spark"``: finds or creates the table that Spark's MERGE changes."""

from __future__ import annotations

from collections.abc import Mapping

from delta.tables import DeltaTable
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from nats_stream_source.delta.cdc.columns import with_new_columns
from nats_stream_source.delta.cdc.events import Events
from nats_stream_source.delta.cdc.layout import Layout, missing_state_error, state_name
from nats_stream_source.delta.merge_result import MergeResult
from nats_stream_source.delta.spark.event_merge import merge_by_spark
from nats_stream_source.delta.spark.merge_into import SparkTable
from nats_stream_source.delta.spark.settings import require_exact_times
from nats_stream_source.delta.table import (
    Deletes,
    not_a_table_error,
    require_storable_names,
    table_schema,
)
from nats_stream_source.delta.upkeep import Upkeep

_NOT_A_TABLE = ("DELTA_MISSING_DELTA_TABLE", "DELTA_CREATE_TABLE_WITH_NON_EMPTY_LOCATION")


class SparkEngine:
    """See :class:`nats_stream_source.delta.table.TableEngine`.

    Args:
        spark: the session of the table.
        name: path, URI or name as the user gave it.
        path: the path or URI for Spark; None for a name in the catalog.
    """

    def __init__(self, spark: SparkSession, name: str, path: str | None) -> None:
        self._spark = spark
        self._name = name
        self._path = path

    def find(self) -> SparkTable | None:
        """See :class:`nats_stream_source.delta.table.TableEngine`."""
        spark, name, path = self._spark, self._name, self._path
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

    def find_or_create(
        self, batch: StructType, deletes: Deletes, upkeep: Upkeep | None
    ) -> SparkTable:
        """See :class:`nats_stream_source.delta.table.TableEngine`."""
        found = self.find()
        if found is not None:
            return found
        return self._create(table_schema(batch, deletes), {}, upkeep)

    def find_state(self) -> SparkTable | None:
        """See :class:`nats_stream_source.delta.cdc.tables.EventEngine`."""
        return self._state().find()

    def merge_events(self, events: Events, upkeep: Upkeep | None) -> MergeResult:
        """See :class:`nats_stream_source.delta.cdc.tables.EventEngine`."""
        layout = events.layout
        schema, found = layout.table_schema(events.schema), self.find()
        if found is not None:
            layout.verify(self._name, found.layout)
            schema = with_new_columns(self._name, found.schema, schema.fields)
        known = self._state().of_table(found, layout) if layout.has_state else None
        events = events.conformed(schema, None if known is None else known.schema)

        def prepare() -> tuple[SparkTable, SparkTable | None]:
            table = found or self._create(schema, layout.properties, upkeep)
            if found is None:
                layout.verify_created(table.layout, schema, table.schema)
            if not layout.has_state:
                return table, None
            return table, self._state().prepared(known, events, table, upkeep)

        return merge_by_spark(self._spark, self._name, events, prepare, upkeep)

    def of_table(self, table: SparkTable | None, layout: Layout) -> SparkTable | None:
        """The state table of a table, for an engine of its location; None if it is to be made."""
        found = self.find()
        if found is not None:
            layout.state(table.table_id if table else "").verify_state(self._name, found.layout)
        elif table is not None and not table.is_empty():
            raise missing_state_error(self._name)
        return found

    def prepared(
        self, found: SparkTable | None, events: Events, table: SparkTable, upkeep: Upkeep | None
    ) -> SparkTable:
        """The state table, for an engine of its location; created if it was not found."""
        schema = events.layout.state_schema(events.schema)
        if found is None:
            properties = events.layout.state(table.table_id).properties
            return self._create(schema, properties, upkeep)
        with_new_columns(self._name, found.schema, schema.fields)
        return found

    def _state(self) -> SparkEngine:
        """The engine of the state table."""
        path = None if self._path is None else state_name(self._path)
        return SparkEngine(self._spark, state_name(self._name), path)

    def _create(
        self, schema: StructType, layout: Mapping[str, str], upkeep: Upkeep | None
    ) -> SparkTable:
        """Create an empty table; ``layout`` is its property for a layout."""
        name, path = self._name, self._path
        require_storable_names(name, schema)
        require_exact_times(self._spark, name, schema)
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
        require_exact_times(self._spark, self._name, table.schema)
        return table
