"""Data files of a Delta table: writing rows as Parquet with statistics, and reading them.

A live file keeps its number when its vector changes, so the index names a row by the number of its
file and its position.

A partition column is not in the file: its value is in the log, as text.

**Statistics** are those of Delta's own writer: bounds of numbers, decimals, texts, dates and times,
and the number of nulls of each column, also of the fields of structs, for the first 32 columns and
fields. A bound that JSON or Delta's text cannot have exactly is left out: readers then read the
file.
"""

from __future__ import annotations

import json
import math
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyroaring import BitMap64

from nats_stream_source.delta.conflicts import first_line
from nats_stream_source.delta.driver.log import (
    Action,
    VectorError,
    now_ms,
    vector_path,
    vector_rows,
)
from nats_stream_source.delta.driver.objects import TableObjects
from nats_stream_source.delta.rules.rows import Integers

LARGEST_FILE = 4 << 20
"""Size of a data file up to which its rows are kept."""

_MAX_BYTES = 64 << 20
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A live data file.

    Attributes:
        add: its action in the log.
        rows: the number of its rows, removed ones included.
        vector: the removed rows; never changed in place.
    """

    add: Action
    rows: int
    vector: BitMap64 = field(default_factory=BitMap64)

    def live_positions(self) -> Integers:
        """The positions of the rows that are not removed, in ascending order."""
        alive = np.ones(self.rows, bool)
        alive[positions(self.vector)] = False
        return np.flatnonzero(alive)

    @property
    def partition(self) -> tuple[tuple[str, str | None], ...]:
        """The values of its partition columns."""
        return tuple(sorted(self.add["partitionValues"].items()))

    @property
    def live_rows(self) -> int:
        """The number of rows that are not removed."""
        return self.rows - len(self.vector)

    @property
    def live_bytes(self) -> int:
        """The estimated size of the rows that are not removed."""
        return int(self.add["size"] * self.live_rows // max(1, self.rows))


def positions(rows: BitMap64) -> Integers:
    """The rows of a vector as an array, in ascending order."""
    return np.fromiter(rows, np.int64, len(rows))


class PartitionWriter:
    """Writes rows of one partition into files of about a target size.

    A row group has about the target size in Arrow, which compresses; a file ends with the row group
    that makes it as large. So only the last file is smaller, and compaction does not see the others
    as small files again. Memory: one file, and the rows of a row group.

    Args:
        partition: the value of each partition column as the log has it.
        data_change: whether the rows are new to readers of the table's changes.

    Attributes:
        files: the ``add`` of each file that is written, and its number of rows.
    """

    def __init__(
        self,
        objects: TableObjects,
        partition: Mapping[str, str | None],
        target_bytes: int,
        *,
        data_change: bool = True,
    ) -> None:
        self._objects = objects
        self._partition = partition
        self._target_bytes = target_bytes
        self._data_change = data_change
        self._rows: list[pa.Table] = []
        self._bytes = 0
        self.files: list[tuple[Action, int]] = []
        self._file: tuple[pa.BufferOutputStream, pq.ParquetWriter, Statistics] | None = None

    def add(self, rows: pa.Table) -> None:
        """Add rows with the table's types, without partition columns."""
        self._rows.append(rows)
        self._bytes += rows.nbytes
        if self._bytes >= self._target_bytes:
            self._write()

    def finish(self) -> None:
        """Write what remains."""
        self._write()
        self._end_file()

    def _write(self) -> None:
        if not self._rows:
            return
        rows = pa.concat_tables(self._rows)
        groups = max(1, -(-self._bytes // self._target_bytes))
        step = max(1, -(-len(rows) // groups))
        for start in range(0, len(rows), step):
            group = rows.slice(start, step)
            if self._file is None:
                sink = pa.BufferOutputStream()
                writer = pq.ParquetWriter(sink, rows.schema, compression="snappy")
                self._file = sink, writer, Statistics()
            sink, writer, statistics = self._file
            writer.write_table(group, row_group_size=len(group))
            statistics.add(group)
            if sink.tell() >= self._target_bytes:
                self._end_file()
        self._rows, self._bytes = [], 0

    def _end_file(self) -> None:
        if self._file is None:
            return
        (sink, writer, statistics), self._file = self._file, None
        writer.close()
        content = sink.getvalue()
        # The directory as Hive names it: polars takes the values from there.
        directory = "".join(
            f"{quote(name, safe='')}={quote(value or _NULL_PARTITION, safe='')}/"
            for name, value in self._partition.items()
        )
        path = f"{directory}part-00000-{uuid.uuid4()}-c000.snappy.parquet"
        self._objects.put(path, memoryview(content).cast("B"))
        add = {
            "path": quote(path, safe="/="),
            "partitionValues": dict(self._partition),
            "size": content.size,
            "modificationTime": now_ms(),
            "dataChange": self._data_change,
            "stats": json.dumps(statistics.values()),
        }
        self.files.append((add, statistics.rows))


@contextmanager
def _parquet(objects: TableObjects, add: Action) -> Iterator[pq.ParquetFile]:
    path = unquote(add["path"])
    try:
        with objects.reader(path) as source:
            yield pq.ParquetFile(source, coerce_int96_timestamp_unit="us")
    except pa.ArrowInvalid as error:
        raise OSError(f"data file {path} is damaged: {first_line(error)}") from error


def read_data_file(
    objects: TableObjects, add: Action, columns: Sequence[str], schema: pa.Schema
) -> pa.Table:
    """Columns of a data file with the table's types; null where the file lacks a column.

    Raises:
        OSError: the file does not exist, is damaged, or the store failed.
    """
    with _parquet(objects, add) as file:
        rows = file.metadata.num_rows
        stored = [name for name in columns if name in file.schema_arrow.names]
        table = file.read(columns=stored)
    arrays: list[pa.Array | pa.ChunkedArray] = []
    for name in columns:
        kind = schema.field(name).type
        if name in add["partitionValues"]:
            value = pa.scalar(add["partitionValues"][name] or None, pa.string()).cast(kind)
            arrays.append(pa.repeat(value, rows))
        elif name in stored:
            column = table[name]
            arrays.append(column if column.type == kind else column.cast(kind))
        else:
            arrays.append(pa.nulls(rows, kind))
    return pa.table(arrays, schema=pa.schema([schema.field(name) for name in columns]))


def file_rows(objects: TableObjects, add: Action) -> int:
    """The number of rows of a data file, by its statistics if it has them."""
    rows = json.loads(add.get("stats") or "{}").get("numRecords")
    if rows is not None:
        return int(rows)
    with _parquet(objects, add) as file:
        return int(file.metadata.num_rows)


def removed_rows(objects: TableObjects, add: Action, rows: int) -> BitMap64:
    """The rows of a data file with so many rows that its deletion vector removes."""
    descriptor = add.get("deletionVector")
    if descriptor is None:
        return BitMap64()
    path = vector_path(descriptor)
    content = b"" if path is None else objects.get(path)
    try:
        return vector_rows(descriptor, content, rows)
    except VectorError as error:
        raise VectorError(f"{path or 'the log'}, for {add['path']}: {error}") from error


def partitions(
    rows: pa.Table, columns: Sequence[str]
) -> Iterator[tuple[dict[str, str | None], pa.Array]]:
    """The partitions of rows: the values of their columns as the log has them, and positions."""
    if not len(rows):
        return
    positions = pa.array(np.arange(rows.num_rows))
    if not columns:
        yield {}, positions
        return
    texts = {name: rows[name].cast(pa.string()) for name in columns}
    groups = (
        pa.table({**texts, "_at": positions}).group_by(list(columns)).aggregate([("_at", "list")])
    )
    for group in groups.to_batches():
        for index, at in enumerate(group.column("_at_list")):
            # The log has null for an empty text, too.
            yield {name: group.column(name)[index].as_py() or None for name in columns}, at.values


class RowCache:
    """The rows of small data files that were written lately, by the path of the file.

    A compaction reads the files of the last commits, which took most of its time. A version of a
    history is closed by writing its row again, so each batch reads the open rows of its keys,
    mostly in such files, too. A data file never changes, so its rows are kept while it is live and
    there is room; the file that was used the longest time ago goes first.
    """

    def __init__(self) -> None:
        self._files: OrderedDict[str, pa.Table] = OrderedDict()
        self._bytes = 0

    def get(self, path: str) -> pa.Table | None:
        """The rows of a file, removed ones included; None if they are not kept."""
        with suppress(KeyError):  # a compaction reads beside a merge, which can drop the file
            self._files.move_to_end(path)
        return self._files.get(path)

    def put(self, add: Action, rows: pa.Table) -> None:
        """Keep the rows of a file that is not kept, if it is small."""
        if add["size"] > LARGEST_FILE:
            return
        self._files[add["path"]] = rows
        self._bytes += rows.nbytes
        while self._bytes > _MAX_BYTES:
            self._bytes -= self._files.popitem(last=False)[1].nbytes

    def drop(self, path: str) -> None:
        """Drop the rows of a file that is no longer live."""
        if (rows := self._files.pop(path, None)) is not None:
            self._bytes -= rows.nbytes


_COLUMNS = 32  # Delta's own number
_LONGEST_TEXT = 32  # characters; a longer text is cut, and then does not bound the file above
_EPOCH = datetime(1970, 1, 1)

_Path = tuple[str, ...]


class Statistics:
    """The statistics of one file, whose rows come in parts."""

    def __init__(self) -> None:
        self.rows = 0
        self._kinds: dict[_Path, pa.DataType] = {}
        self._nulls: dict[_Path, int] = {}
        self._low: dict[_Path, Any] = {}  # None: the column does not have a bound
        self._high: dict[_Path, Any] = {}

    def add(self, rows: pa.Table) -> None:
        """Add rows of the file."""
        self.rows += len(rows)
        leaves = (leaf for name in rows.column_names for leaf in _leaves((name,), rows[name]))
        for (path, column), _ in zip(leaves, range(_COLUMNS), strict=False):
            self._nulls[path] = self._nulls.get(path, 0) + column.null_count
            self._kinds[path] = column.type
            if not _is_bounded(column.type) or column.null_count == len(column):
                continue
            if pa.types.is_timestamp(column.type):  # Python lacks years beyond 9999
                column = column.cast(pa.int64())
            elif pa.types.is_date(column.type):
                column = column.cast(pa.int32())
            bounds: Any = pc.min_max(column).as_py()
            low, high = bounds["min"], bounds["max"]
            if pa.types.is_floating(column.type) and pc.any(pc.is_nan(column)).as_py():
                low = high = None
            self._low[path] = _bound(min, self._low.get(path, low), low)
            self._high[path] = _bound(max, self._high.get(path, high), high)

    def values(self) -> dict[str, Any]:
        """The statistics as JSON has them."""
        return {
            "numRecords": self.rows,
            "minValues": self._texts(self._low, upper=False),
            "maxValues": self._texts(self._high, upper=True),
            "nullCount": _nested(self._nulls),
            "tightBounds": True,
        }

    def _texts(self, bounds: dict[_Path, Any], *, upper: bool) -> dict[str, Any]:
        texts = ((path, _text(self._kinds[path], bounds[path], upper)) for path in bounds)
        return _nested({path: text for path, text in texts if text is not None})


def _leaves(path: _Path, column: pa.ChunkedArray) -> Iterator[tuple[_Path, pa.ChunkedArray]]:
    if not pa.types.is_struct(column.type):
        yield path, column
        return
    for one, part in zip(column.type, column.flatten(), strict=True):
        yield from _leaves((*path, one.name), part)


def _is_bounded(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_string(kind)
        or pa.types.is_date(kind)
        or pa.types.is_timestamp(kind)
    )


def _bound(choice: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    return None if one is None or other is None else choice(one, other)


def _text(kind: pa.DataType, value: Any, upper: bool) -> Any:
    """A bound as JSON has it; None if it cannot be said exactly."""
    if isinstance(value, str):
        return None if upper and len(value) > _LONGEST_TEXT else value[:_LONGEST_TEXT]
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return _time(kind, value, upper)
    if isinstance(value, Decimal):
        number = float(value)
        return number if Decimal(repr(number)) == value else None
    if isinstance(value, float):
        short = float(str(np.float32(value))) if pa.types.is_float32(kind) else value
        return short if math.isfinite(value) else None
    return value


def _time(kind: pa.DataType, value: int, upper: bool) -> str | None:
    """Days or microseconds since 1970 as text; None beyond the years 1 to 9999."""
    try:
        if pa.types.is_date(kind):
            return (_EPOCH + timedelta(days=value)).date().isoformat()
        time = _EPOCH + timedelta(milliseconds=-(-value // 1000) if upper else value // 1000)
    except OverflowError:
        return None
    return time.isoformat(timespec="milliseconds") + ("Z" if kind.tz is not None else "")


def _nested(values: dict[_Path, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for path, value in values.items():
        inner = result
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = value
    return result
