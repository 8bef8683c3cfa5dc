"""Creation of a table with deletion vectors.

delta-rs can create one, and then also asks its readers for the feature ``variantType`` (measured
with deltalake 1.6.6), which many lack. Therefore this module puts version 0 itself.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from deltalake.exceptions import CommitFailedError
from pyspark.sql.types import StructType

from nats_stream_source.delta.cdc.columns import has_ntz
from nats_stream_source.delta.driver.delta_log import (
    DeltaLog,
    VersionExistsError,
    now_ms,
)
from nats_stream_source.delta.driver.features import DELETION_VECTORS
from nats_stream_source.delta.driver.storage import TableStorage, schema_string


def put_first_version(
    storage: TableStorage, schema: StructType, properties: Mapping[str, str]
) -> None:
    """Commit version 0 of a table with deletion vectors.

    Raises:
        CommitFailedError: another process has committed it.
        EngineRefusedError: delta-rs does not read the columns; nothing is written.
    """
    features = ["deletionVectors"]
    if has_ntz(schema):
        features.append("timestampNtz")
    protocol = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": features,
        "writerFeatures": [*features, "appendOnly", "invariants"],
    }
    metadata = {
        "id": str(uuid.uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": schema_string(schema),
        "partitionColumns": [],
        "configuration": {**properties, DELETION_VECTORS: "true"},
        "createdTime": now_ms(),
    }
    log = DeltaLog(storage.objects(create=True))
    try:
        log.put(0, "CREATE TABLE", [{"protocol": protocol}, {"metaData": metadata}])
    except VersionExistsError as error:
        raise CommitFailedError(str(error)) from error
