"""Timestamps that delta-rs reads or writes wrongly.

**INT96.** Spark writes TIMESTAMP as Parquet's type INT96 by default, which delta-rs reads as 64-bit
nanoseconds. Values outside the years 1678 to 2261 wrap, and a merge or compaction writes the
wrapped ones back. The table's statistics show the range of a file's values, but not in arrays and
maps, nor beyond Delta's first 32 columns (``delta.dataSkippingNumIndexedCols``). There the file's
footer shows whether it has the type.

pyarrow reads INT96 as microseconds without loss (see :mod:`data_files`), so merge-on-read does not
need the footers, except for what delta-rs does for it.

**Partitions.** delta-rs writes the value of a partition column of type TIMESTAMP in UTC without a
zone, which Spark reads in the session's time zone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.schema import ArrayType, Field, MapType, PrimitiveType, StructType
from pyarrow.fs import FileSystem

from nats_stream_source.delta.conflicts import first_line
from nats_stream_source.delta.driver.storage import TableStorage
from nats_stream_source.delta.table import EngineRefusedError

# Microseconds since 1970: 1678-01-01 and 2262-01-01.
_FIRST, _END = -9_214_560_000_000_000, 9_214_646_400_000_000
_PHYSICAL_NAME = "delta.columnMapping.physicalName"


def unsupported_timestamp(target: DeltaTable) -> str | None:
    """Why delta-rs cannot change a table by its statistics; None if they do not show a reason."""
    columns = list(_timestamp_columns(target.schema().fields))
    for column in target.metadata().partition_columns:
        if column in dict(columns):
            return f"the partition column {column!r} is a TIMESTAMP"
    if not columns:
        return None
    files = pa.table(target.get_add_actions(flatten=True))
    for column, path in columns:
        if pc.any(pc.invert(_within(files, path))).as_py():
            return f"column {column!r} has a TIMESTAMP before 1678 or after 2261"
    return None


class Int96Columns:
    """The columns of type INT96 in data files, by their footers.

    A footer is read only if the statistics of the file lack a timestamp's range, and once while the
    file is live.
    """

    def __init__(self, storage: TableStorage) -> None:
        self._storage = storage
        self._of_file: dict[str, list[str]] = {}

    def require_known_range(self, target: DeltaTable) -> None:
        """Raise if delta-rs might read a timestamp of the table wrongly.

        Raises:
            EngineRefusedError: a file has INT96 values, and its statistics lack their range.
            TableError: a footer cannot be read.
        """
        self._storage.named("read", lambda: self._require_known_range(target))

    def _require_known_range(self, target: DeltaTable) -> None:
        columns = list(_timestamp_columns(target.schema().fields))
        if not columns:
            return
        files = pa.table(target.get_add_actions(flatten=True))
        unknown = defaultdict(list)
        for column, path in columns:
            known = pc.or_(pc.fill_null(_within(files, path), False), _all_null(files, path))
            for file in files["path"].filter(pc.invert(known)).to_pylist():
                unknown[file].append((column, path))
        self._of_file = {file: self._of_file[file] for file in unknown if file in self._of_file}
        for file, of_file in unknown.items():
            if file not in self._of_file:
                self._of_file[file] = self._read(file)
            for column, path in of_file:
                if any(f"{leaf}.".startswith(f"{path}.") for leaf in self._of_file[file]):
                    raise EngineRefusedError(
                        f"column {column!r} has TIMESTAMPs of Parquet's type INT96 and no "
                        f"statistics that exclude years before 1678 and after 2261"
                    )

    @cached_property
    def _file_system(self) -> FileSystem:
        return self._storage.file_system()

    def _read(self, file: str) -> list[str]:
        """The paths of a file's INT96 columns that have values."""
        path = unquote(file)
        try:
            with self._file_system.open_input_file(path) as source:
                footer = pq.read_metadata(source)
        except pa.ArrowInvalid as error:
            raise OSError(f"data file {path} is damaged: {first_line(error)}") from error
        leaves = (
            footer.row_group(group).column(leaf)
            for group in range(footer.num_row_groups)
            for leaf in range(footer.num_columns)
        )
        return sorted({leaf.path_in_schema for leaf in leaves if _has_int96(leaf)})


def _has_int96(leaf: pq.ColumnChunkMetaData) -> bool:
    if leaf.physical_type != "INT96":
        return False
    statistics = leaf.statistics
    return statistics is None or not statistics.has_null_count or statistics.num_values > 0


def _timestamp_columns(
    fields: Iterable[Field], name: str = "", path: str = ""
) -> Iterator[tuple[str, str]]:
    """The names of timestamps and their paths in files and statistics.

    The name and path of one in an array or map are those of the array or map.
    """
    for field in fields:
        at = f"{name}{field.name}", f"{path}{field.metadata.get(_PHYSICAL_NAME, field.name)}"
        if isinstance(field.type, StructType):
            yield from _timestamp_columns(field.type.fields, *(f"{part}." for part in at))
        elif _has_timestamp(field.type):
            yield at


def _has_timestamp(kind: object) -> bool:
    if isinstance(kind, StructType):
        return any(_has_timestamp(field.type) for field in kind.fields)
    if isinstance(kind, ArrayType):
        return _has_timestamp(kind.element_type)
    if isinstance(kind, MapType):
        return _has_timestamp(kind.key_type) or _has_timestamp(kind.value_type)
    return isinstance(kind, PrimitiveType) and kind.type == "timestamp"


def _within(files: pa.Table, path: str) -> pa.Array:
    """For each file, whether its values are in the years that INT96 can have; null if unknown."""
    low, high = (_values(files, f"{bound}.{path}") for bound in ("min", "max"))
    return pc.and_kleene(pc.greater_equal(low, _FIRST), pc.less(high, _END))


def _all_null(files: pa.Table, path: str) -> pa.Array:
    nulls, rows = _values(files, f"null_count.{path}"), _values(files, "num_records")
    return pc.fill_null(pc.equal(nulls, rows), False)


def _values(files: pa.Table, name: str) -> pa.Array:
    """A number of each file's statistics, or a time in microseconds; null if they lack it."""
    index = files.schema.get_field_index(name)  # -1 also if two columns have the name
    return pa.nulls(len(files), pa.int64()) if index < 0 else files.column(index).cast(pa.int64())
