"""Adds columns of a batch to a table, and widens their types, by one commit.

delta-rs can add columns, and then also asks the readers of a table with deletion vectors for the
feature ``variantType`` (measured with deltalake 1.6.6). Therefore this module puts the commit.

A column with a wider type has it in all data files (see :mod:`nats_stream_source.delta.cdc.columns`
for the reason): the commit removes these and adds their live rows in new ones. It changes no data
(``dataChange`` is false). The files are read one by one, so the memory is that of a few.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError
from pyspark.sql.types import StructField, StructType

from nats_stream_source.delta.cdc.columns import (
    has_ntz,
    log_new_columns,
    verify_columns,
    widened_columns,
    with_new_columns,
)
from nats_stream_source.delta.driver.data_files import (
    read_data_file,
    removed_rows,
    write_data_file,
)
from nats_stream_source.delta.driver.delta_log import (
    Action,
    DeltaLog,
    VersionExistsError,
    removal,
)
from nats_stream_source.delta.driver.features import unsupported_type
from nats_stream_source.delta.driver.live_files import LiveFile
from nats_stream_source.delta.driver.objects import TableObjects
from nats_stream_source.delta.driver.storage import TableStorage, schema_of, schema_string
from nats_stream_source.delta.stored_columns import require_storable_names
from nats_stream_source.delta.table import EngineRefusedError

_NTZ = "timestampNtz"
_FEATURES = {  # those that a protocol's version has without their names
    2: ("appendOnly", "invariants"),
    3: ("checkConstraints",),
    4: ("changeDataFeed", "generatedColumns"),
    5: ("columnMapping",),
    6: ("identityColumns",),
}

_FILE_BYTES = 128 << 20  # in memory, of the rows that become one file


def add_columns(
    storage: TableStorage, batch: Sequence[StructField], expected: StructType
) -> DeltaTable:
    """Add what the columns of the newest version lack; returns the version with it.

    Args:
        storage: of the table.
        batch: the columns to store.
        expected: all columns of the version that is returned.

    Raises:
        TableChangedError: another writer has added or widened columns meanwhile.
        EngineRefusedError: only Spark can add them.
        ConfigurationError: the table cannot store them.
        TableError: a data file is damaged, or the storage failed; the table is unchanged.
    """

    def add() -> DeltaTable:
        target = storage.open_existing()
        own = schema_of(target)
        schema = with_new_columns(storage.name, own, batch)
        if schema is own:
            return target
        widened = widened_columns(own, schema)
        _put(storage, target, schema, widened)
        log_new_columns(storage.name, own, schema)
        return storage.open_existing()

    target = storage.changed("add columns to", add)
    verify_columns(schema_of(target), expected)
    return target


def _put(
    storage: TableStorage, target: DeltaTable, schema: StructType, widened: Sequence[str]
) -> None:
    metadata, protocol = target.metadata(), _with_ntz(target, schema)
    problem = unsupported_type(schema) or storage.unsupported_store()
    if partitions := [name for name in widened if name in metadata.partition_columns]:
        problem = f"the partition column {partitions[0]!r} gets another type"
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
        "schemaString": schema_string(schema),
        "partitionColumns": list(metadata.partition_columns),
        "configuration": dict(metadata.configuration),
        "createdTime": metadata.created_time,
    }
    actions: list[Action] = [{"metaData": {k: v for k, v in changed.items() if v is not None}}]
    if protocol is not None:
        actions.insert(0, {"protocol": protocol})
    objects = storage.objects()
    log = DeltaLog(objects)
    if widened:
        adds = list(log.files(target.version()).values())
        stored = pa.schema(Schema.from_json(schema.json()).to_arrow())
        actions += _written_again(objects, adds, stored, metadata.partition_columns)
    try:
        log.put(target.version() + 1, "CHANGE COLUMNS" if widened else "ADD COLUMNS", actions)
    except VersionExistsError as error:
        raise CommitFailedError(str(error)) from error


def _written_again(
    objects: TableObjects, adds: Sequence[Action], schema: pa.Schema, partitions: Sequence[str]
) -> list[Action]:
    """The actions that replace data files by others with their live rows and these types."""
    names = [name for name in schema.names if name not in partitions]
    of_partition = defaultdict(list)
    for add in adds:
        of_partition[tuple(sorted(add["partitionValues"].items()))].append(add)
    actions = [removal(add, data_change=False) for add in adds]
    for partition, members in of_partition.items():
        parts: list[pa.Table] = []
        for number, add in enumerate(members, start=1):
            rows = read_data_file(objects, add, names, schema)
            file = LiveFile(add, len(rows), removed_rows(objects, add, len(rows)))
            parts.append(rows.take(pa.array(file.live_positions())))
            if number == len(members) or sum(part.nbytes for part in parts) >= _FILE_BYTES:
                united, parts = pa.concat_tables(parts), []
                if len(united):
                    new = write_data_file(objects, united, dict(partition), data_change=False)
                    actions.append({"add": new})
    return actions


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
