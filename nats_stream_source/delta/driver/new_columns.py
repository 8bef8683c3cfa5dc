"""Adds columns of a batch to a table, by a commit that changes its schema only.

delta-rs can add columns, and then also asks the readers of a table with deletion vectors for the
feature ``variantType`` (measured with deltalake 1.6.6). Therefore this module puts the commit.
"""

from __future__ import annotations

from collections.abc import Sequence

from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from pyspark.sql.types import StructField, StructType

from nats_stream_source.delta.cdc.columns import has_ntz, with_new_columns
from nats_stream_source.delta.driver.delta_log import (
    Action,
    DeltaLog,
    VersionExistsError,
)
from nats_stream_source.delta.driver.features import unsupported_type
from nats_stream_source.delta.driver.storage import TableStorage, schema_of
from nats_stream_source.delta.table import EngineRefusedError, require_storable_names
from nats_stream_source.logs import field_logger

_NTZ = "timestampNtz"
_FEATURES = {  # those that a protocol's version has without their names
    2: ("appendOnly", "invariants"),
    3: ("checkConstraints",),
    4: ("changeDataFeed", "generatedColumns"),
    5: ("columnMapping",),
    6: ("identityColumns",),
}

_log = field_logger(__name__)


def add_columns(storage: TableStorage, batch: Sequence[StructField]) -> DeltaTable:
    """Add the columns that the newest version lacks; returns the version with them.

    Args:
        storage: of the table.
        batch: the columns to store.

    Raises:
        EngineRefusedError: only Spark can add them.
        ConfigurationError: the table cannot store them.
    """

    def add() -> DeltaTable:
        target = storage.open_existing()
        own = schema_of(target)
        schema = with_new_columns(storage.name, own, batch)
        if schema is own:
            return target
        _put(storage, target, schema)
        before = {field.name: field for field in own.fields}
        new = [f.name for f in schema.fields if before.get(f.name) != f]
        _log.info("added columns of the batch to the table", table=storage.name, columns=new)
        return storage.open_existing()

    return storage.changed("add columns to", add)


def _put(storage: TableStorage, target: DeltaTable, schema: StructType) -> None:
    metadata, protocol = target.metadata(), _with_ntz(target, schema)
    problem = unsupported_type(schema) or storage.unsupported_store()
    if metadata.configuration.get("delta.columnMapping.mode", "none") != "none":
        problem = "the table has column mapping, and delta-rs does not number new columns"
    if problem is not None:
        raise EngineRefusedError(problem)
    require_storable_names(storage.name, schema)
    changed: Action = {
        "id": str(metadata.id),
        "name": metadata.name,
        "description": metadata.description,
        "format": {"provider": "parquet", "options": {}},
        "schemaString": schema.json(),
        "partitionColumns": list(metadata.partition_columns),
        "configuration": dict(metadata.configuration),
        "createdTime": metadata.created_time,
    }
    actions: list[Action] = [{"metaData": {k: v for k, v in changed.items() if v is not None}}]
    if protocol is not None:
        actions.insert(0, {"protocol": protocol})
    log = DeltaLog(storage.objects())
    try:
        log.put(target.version() + 1, "ADD COLUMNS", actions)
    except VersionExistsError as error:
        raise CommitFailedError(str(error)) from error


def _with_ntz(target: DeltaTable, schema: StructType) -> Action | None:
    """The protocol with the feature of a new TIMESTAMP_NTZ column; None for the table's own."""
    own = target.protocol()
    if not has_ntz(schema) or _NTZ in (own.writer_features or ()):
        return None
    reads = {*(own.reader_features or ()), _NTZ}
    writes = {*(own.writer_features or ()), _NTZ}
    if own.min_writer_version < 7:
        for version, features in _FEATURES.items():
            writes.update(features if version <= own.min_writer_version else ())
    if own.min_reader_version == 2:
        reads.add("columnMapping")
    return {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": sorted(reads),
        "writerFeatures": sorted(writes),
    }
