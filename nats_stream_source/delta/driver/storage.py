"""Where a table of the driver is: opening and creating it, and named errors for its storage."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import FileSelector, FileSystem, PyFileSystem
from pyspark.sql.types import StructType

from nats_stream_source.delta.cdc.columns import has_ntz
from nats_stream_source.delta.cdc.layout import state_name
from nats_stream_source.delta.conflicts import first_line, retry_conflicts
from nats_stream_source.delta.driver.deletion_vectors import VectorError
from nats_stream_source.delta.driver.delta_log import DamagedLogError
from nats_stream_source.delta.driver.features import is_unsupported
from nats_stream_source.delta.driver.objects import TableObjects, unsupported_store
from nats_stream_source.delta.table import EngineRefusedError, not_a_table_error
from nats_stream_source.errors import TableError

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

    def file_system(self) -> FileSystem:
        """The directory by delta-rs's own access, for stores that :meth:`objects` lacks, too.

        Raises:
            TableNotFoundError: it is a local directory that does not exist.
        """
        return PyFileSystem(DeltaStorageHandler(self.uri, self._options))

    def unsupported_store(self) -> str | None:
        """Why the driver cannot put the log's entries itself; None if it can."""
        return unsupported_store(self.uri, self.storage_options)

    def open(self) -> DeltaTable | None:
        """The newest version, or None if the table does not exist."""
        return self.named("open", self._open)

    def open_existing(self) -> DeltaTable:
        """The newest version of a table that existed before.

        Raises:
            TableError: the table does not exist any more.
        """
        target = self._open()
        if target is None:
            raise TableError(
                f"could not open table {self.name!r}: it no longer exists; create it again or "
                f"restart the query"
            )
        return target

    def create(self, put: Callable[[], None]) -> DeltaTable:
        """Create an empty table; the table that another process created meanwhile, if one did.

        Args:
            put: commits version 0; raises CommitFailedError if another process has.

        Raises:
            ConfigurationError: the directory has files and is not a Delta table.
        """

        def create() -> DeltaTable:
            # Of two processes that create the table, one has a conflict, and finds it then.
            if self._open() is None:
                self._require_empty()
                put()
            return self.open_existing()

        return self.changed("create", create)

    def put_copy_on_write(self, schema: StructType, properties: Mapping[str, str]) -> None:
        """Commit version 0 of a table without deletion vectors."""
        if any(has_ntz(field.dataType) for field in schema.fields):
            # delta-rs asks for the feature itself if a column has the type, not a part of one.
            properties = {**properties, "delta.feature.timestampNtz": "supported"}
        DeltaTable.create(
            self.uri,
            Schema.from_json(schema_string(schema)),
            mode="ignore",
            configuration=dict(properties),
            raise_if_key_not_exists=False,  # for the property of a layout
            storage_options=self._options,
        )

    def changed(self, what: str, work: Callable[[], _T]) -> _T:
        """The result of ``work``, which commits; repeated after a conflict.

        Raises:
            EngineRefusedError: delta-rs refuses to change the table.
            TableConflictError: each attempt had a conflict.
            TableError: delta-rs or its storage failed; the table is unchanged.
        """

        def commit() -> _T:
            try:
                return work()
            except CommitFailedError as error:
                if is_unsupported(str(error)):
                    raise EngineRefusedError(first_line(error)) from error
                raise

        return self.named(what, lambda: retry_conflicts(commit, self.name, (CommitFailedError,)))

    def named(self, what: str, work: Callable[[], _T]) -> _T:
        """The result of ``work``, with a TableError for failures of delta-rs, files and storage."""
        try:
            return work()
        except (DamagedLogError, VectorError) as error:
            raise TableError(
                f"could not {what} table {self.name!r}: {error}; the table is unchanged, restore "
                f"the file or an earlier version of the table"
            ) from error
        except (DeltaError, OSError) as error:
            raise TableError(
                f"could not {what} table {self.name!r}: {first_line(error)}; the table is unchanged"
            ) from error

    @property
    def _options(self) -> dict[str, str] | None:
        return dict(self.storage_options) if self.storage_options else None

    def _open(self) -> DeltaTable | None:
        try:
            return DeltaTable(self.uri, storage_options=self._options)
        except TableNotFoundError:
            return None

    def _require_empty(self) -> None:
        try:
            files = self.file_system()
        except TableNotFoundError:  # a local directory that does not exist
            return
        selector = FileSelector("", recursive=True, allow_not_found=True)
        if files.get_file_info(selector):
            raise not_a_table_error(self.name)


def schema_string(schema: StructType) -> str:
    """The columns of a table as the log has them.

    Raises:
        EngineRefusedError: delta-rs does not read these columns, and could not open the table.
    """
    text = schema.json()
    try:
        Schema.from_json(text)
    except ValueError as error:
        raise EngineRefusedError(
            f"delta-rs does not read the table's columns: {first_line(error)}"
        ) from error
    return text


def schema_of(target: DeltaTable) -> StructType:
    """The table's columns as Spark's types; both have the same JSON."""
    return StructType.fromJson(json.loads(target.schema().to_json()))


def file_sizes(target: DeltaTable) -> dict[str, int]:
    """The size of each data file of this version, in bytes."""
    actions = pa.table(target.get_add_actions(flatten=True))
    paths, sizes = (actions[name].to_pylist() for name in ("path", "size_bytes"))
    return dict(zip(paths, sizes, strict=True))
