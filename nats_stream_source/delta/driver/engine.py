"""Engine ``"delta-rs"``: finds or creates the table that the driver's process changes."""

from __future__ import annotations

from collections.abc import Mapping

from deltalake import DeltaTable
from pyspark.sql.types import StructType

from nats_stream_source.delta.driver.copy_on_write import CopyOnWriteTable
from nats_stream_source.delta.driver.features import unsupported_feature, unsupported_type
from nats_stream_source.delta.driver.storage import TableStorage, schema_of
from nats_stream_source.delta.limits import LimitCheck
from nats_stream_source.delta.location import TableLocation
from nats_stream_source.delta.table import Deletes, EngineRefusedError, Table, table_schema


class DriverEngine:
    """See :class:`nats_stream_source.delta.table.TableEngine`."""

    def __init__(self, location: TableLocation, limits: LimitCheck) -> None:
        self._storage = TableStorage(location.name, location.uri, location.storage_options)
        self._limits = limits

    def find(self) -> Table | None:
        """See :class:`nats_stream_source.delta.table.TableEngine`."""
        target = self._storage.open()
        return None if target is None else self._table(target)

    def find_or_create(
        self, batch: StructType, deletes: Deletes, properties: Mapping[str, str]
    ) -> Table:
        """See :class:`nats_stream_source.delta.table.TableEngine`."""
        found = self.find()
        if found is not None:
            return found
        schema = table_schema(batch, deletes)
        _refuse(unsupported_type(schema))
        return self._table(self._storage.create(schema, properties))

    def _table(self, target: DeltaTable) -> Table:
        _refuse(unsupported_feature(target) or unsupported_type(schema_of(target)))
        return CopyOnWriteTable(self._storage, target, self._limits)


def _refuse(problem: str | None) -> None:
    if problem is not None:
        raise EngineRefusedError(problem)
