"""Where a table of the driver is: opening and creating it, and named errors for its storage."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.exceptions import DeltaError

from nats_stream_source.delta.conflicts import first_line
from nats_stream_source.delta.driver.log import (
    Action,
    DamagedLogError,
    DeltaLog,
    LogState,
    VersionExistsError,
    now_ms,
)
from nats_stream_source.delta.driver.objects import TableObjects
from nats_stream_source.delta.refused import DELETION_VECTORS, implied_features
from nats_stream_source.delta.rules.layout import state_name
from nats_stream_source.delta.schema import has_ntz, opaque_type
from nats_stream_source.delta.tables import not_a_table_error
from nats_stream_source.errors import TableError

_NTZ = "timestampNtz"
_T = TypeVar("_T")


@dataclass(frozen=True)
class TableStorage:
    """The directory of a table.

    Attributes:
        name: path or URI as the user gave it, for errors.
        uri: path or URI for delta-rs.
        storage_options: options of delta-rs for the object store; never in a repr, as they have
            secrets.
    """

    name: str
    uri: str
    storage_options: Mapping[str, str] | None = field(default=None, repr=False)

    def state(self) -> TableStorage:
        """The directory of the state table beside this one."""
        return replace(self, name=state_name(self.name), uri=state_name(self.uri))

    def objects(self, *, create: bool = False) -> TableObjects:
        """The objects of the directory; see :meth:`TableObjects.at`."""
        return TableObjects.at(self.uri, self.storage_options, create=create)

    def delta_rs(self) -> DeltaTable:
        """The newest version for delta-rs."""
        options = dict(self.storage_options) if self.storage_options else None
        return DeltaTable(self.uri, storage_options=options)

    def read(self) -> LogState | None:
        """The newest version, or None if the table does not exist."""
        try:
            return DeltaLog(self.objects()).newest()
        except FileNotFoundError:
            return None

    def read_existing(self) -> LogState:
        """The newest version of a table that existed before.

        Raises:
            TableError: the table does not exist any more.
        """
        if (state := self.read()) is None:
            raise TableError(
                f"could not open table {self.name!r}: it no longer exists; create it again or "
                f"restart the query"
            )
        return state

    def create(self, schema: pa.Schema, properties: Mapping[str, str], *, vectors: bool) -> None:
        """Create an empty table, unless another process has created it meanwhile.

        delta-rs can create one with deletion vectors, and then also asks its readers for the
        feature ``variantType`` (measured with deltalake 1.6.6), which many lack. Therefore this
        method puts version 0 itself.

        Raises:
            ConfigurationError: the directory has files and is not a Delta table.
        """
        objects = self.objects(create=True)
        log = DeltaLog(objects)
        if any(objects.list()) and log.newest() is None:
            raise not_a_table_error(self.name)
        with suppress(VersionExistsError):
            log.put(0, "CREATE TABLE", _first_actions(schema, properties, vectors=vectors))

    def named(self, what: str, work: Callable[[], _T]) -> _T:
        """The result of ``work``, with a TableError for failures of delta-rs, files and storage."""
        try:
            return work()
        except DamagedLogError as error:
            raise TableError(
                f"could not {what} table {self.name!r}: {error}; the table is unchanged, restore "
                f"the file or an earlier version of the table"
            ) from error
        except (DeltaError, OSError) as error:
            raise TableError(
                f"could not {what} table {self.name!r}: {first_line(error)}; the table is unchanged"
            ) from error


def _first_actions(
    schema: pa.Schema, properties: Mapping[str, str], *, vectors: bool
) -> list[Action]:
    features = [*(["deletionVectors"] if vectors else []), *([_NTZ] if has_ntz(schema) else [])]
    protocol: Action = {"minReaderVersion": 1, "minWriterVersion": 2}
    if features:
        protocol = _protocol(features, [*features, *implied_features(2)])
    metadata = {
        "id": str(uuid.uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": Schema.from_arrow(schema).to_json(),
        "partitionColumns": [],
        "configuration": {**properties, **({DELETION_VECTORS: "true"} if vectors else {})},
        "createdTime": now_ms(),
    }
    return [{"protocol": protocol}, {"metaData": metadata}]


def changed_metadata(state: LogState, schema: pa.Schema) -> list[Action]:
    """The actions that give a table other columns.

    delta-rs can add columns, and then also asks the readers of a table with deletion vectors for
    the feature ``variantType`` (measured with deltalake 1.6.6).
    """
    own_schema, columns = schema_of(state), json.loads(Schema.from_arrow(schema).to_json())
    before = {one["name"]: one for one in json.loads(state.metadata["schemaString"])["fields"]}
    for one in columns["fields"]:  # Arrow's metadata is text
        if (known := before.get(one["name"])) is not None:
            same = own_schema.field(one["name"]).type == schema.field(one["name"]).type
            one |= known if same else {"metadata": known["metadata"]}
    text = json.dumps(columns, separators=(",", ":"))
    actions: list[Action] = [{"metaData": {**state.metadata, "schemaString": text}}]
    own = state.protocol
    written = own.get("writerFeatures") or ()
    if has_ntz(schema) and _NTZ not in written:
        reads = {*(own.get("readerFeatures") or ()), _NTZ}
        reads |= {"columnMapping"} if own["minReaderVersion"] == 2 else set()
        writes = {*written, *implied_features(own["minWriterVersion"]), _NTZ}
        actions.insert(0, {"protocol": _protocol(reads, writes)})
    return actions


def _protocol(reads: Iterable[str], writes: Iterable[str]) -> Action:
    return {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": sorted(reads),
        "writerFeatures": sorted(writes),
    }


def schema_of(state: LogState) -> pa.Schema:
    """The table's columns; a type that Arrow lacks is an opaque one."""
    text = state.metadata["schemaString"]
    schema = pa.schema(Schema.from_json(text).to_arrow())
    for index, column in enumerate(json.loads(text)["fields"]):
        if (name := _foreign(column["type"])) is not None:
            schema = schema.set(index, schema.field(index).with_type(opaque_type(name)))
    return schema


def _foreign(kind: Any) -> str | None:
    """The name of a type that Arrow lacks, or of such a part of a type."""
    if isinstance(kind, str):
        return kind if kind == "variant" or kind.startswith("interval") else None
    parts = [field["type"] for field in kind.get("fields", ())]
    parts += [kind[name] for name in ("elementType", "keyType", "valueType") if name in kind]
    return next(filter(None, map(_foreign, parts)), None)
