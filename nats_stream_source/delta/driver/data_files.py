"""Data files of a Delta table: writing rows as Parquet with statistics, and reading them.

A partition column is not in the file: its value is in the log, as text.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyroaring import BitMap64

from nats_stream_source.delta.cdc.columns import not_null_error
from nats_stream_source.delta.conflicts import first_line
from nats_stream_source.delta.driver.deletion_vectors import (
    VectorError,
    vector_path,
    vector_rows,
)
from nats_stream_source.delta.driver.delta_log import Action, now_ms, outside_problem
from nats_stream_source.delta.driver.objects import TableObjects
from nats_stream_source.delta.table import EngineRefusedError

_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_STATISTICS_COLUMNS = 32  # Delta's own number
_LONGEST_TEXT = 32  # characters; a longer text does not bound the file


def write_data_file(
    objects: TableObjects,
    rows: pa.Table,
    partition: Mapping[str, str | None],
    *,
    data_change: bool = True,
) -> Action:
    """Write rows of one partition; the ``add`` of the file.

    Args:
        rows: with the table's types, without partition columns.
        partition: the value of each partition column as the log has it.
    """
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, compression="snappy")
    content = sink.getvalue()
    path = f"{_directory(partition)}part-00000-{uuid.uuid4()}-c000.snappy.parquet"
    objects.put(path, memoryview(content).cast("B"))
    return {
        "path": quote(path, safe="/="),
        "partitionValues": dict(partition),
        "size": content.size,
        "modificationTime": now_ms(),
        "dataChange": data_change,
        "stats": json.dumps(_statistics(rows)),
    }


def _directory(partition: Mapping[str, str | None]) -> str:
    """The directory of a partition as Hive names it: polars takes the values from there."""
    return "".join(
        f"{quote(name, safe='')}={quote(value or _NULL_PARTITION, safe='')}/"
        for name, value in partition.items()
    )


def read_data_file(
    objects: TableObjects, add: Action, columns: Sequence[str], schema: pa.Schema
) -> pa.Table:
    """Columns of a data file with the table's types; null where the file lacks a column.

    Raises:
        EngineRefusedError: the file is outside of the table.
        OSError: the file does not exist, is damaged, or the store failed.
    """
    if (problem := outside_problem([add["path"]])) is not None:
        raise EngineRefusedError(problem)
    path = unquote(add["path"])
    try:
        with objects.reader(path) as source:
            file = pq.ParquetFile(source, coerce_int96_timestamp_unit="us")
            rows = file.metadata.num_rows
            stored = [name for name in columns if name in file.schema_arrow.names]
            table = file.read(columns=stored)
    except pa.ArrowInvalid as error:
        raise OSError(f"data file {path} is damaged: {first_line(error)}") from error
    arrays: list[Any] = []
    for name in columns:
        kind = schema.field(name).type
        if name in add["partitionValues"]:
            value = pa.scalar(add["partitionValues"][name] or None, pa.string()).cast(kind)
            arrays.append(pa.repeat(value, rows))
        elif name in stored:
            arrays.append(cast_column(table[name], kind))
        else:
            arrays.append(pa.nulls(rows, kind))
    return pa.table(arrays, schema=pa.schema([schema.field(name) for name in columns]))


def removed_rows(objects: TableObjects, add: Action, rows: int) -> BitMap64:
    """The rows of a data file that its deletion vector removes.

    Args:
        rows: the number of rows of the file.

    Raises:
        EngineRefusedError: the vector is outside of the table.
        VectorError: the vector is damaged.
        OSError: its file does not exist, or the store failed.
    """
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


def cast_column(column: Any, kind: pa.DataType) -> Any:
    """A column with the table's type: Spark's timestamps have the session's time zone."""
    return column if column.type == kind else column.cast(kind)


def stored_column(rows: pa.Table, name: str, kind: pa.DataType, table: str) -> Any:
    """A column of a batch with the table's type.

    Raises:
        ConfigurationError: a part of the column is null that is NOT NULL in the table.
    """
    try:
        return cast_column(rows[name], kind)
    except pa.ArrowInvalid as error:
        if "non-nullable" not in str(error):
            raise
        raise not_null_error(table, name) from error


def _statistics(rows: pa.Table) -> dict[str, Any]:
    low, high, nulls = {}, {}, {}
    for name in rows.column_names[:_STATISTICS_COLUMNS]:
        column = rows[name]
        if pa.types.is_nested(column.type):
            continue
        nulls[name] = column.null_count
        if not (pa.types.is_string(column.type) or pa.types.is_integer(column.type)):
            continue
        bounds = pc.min_max(column).as_py()
        # A shortened text would not be an upper bound.
        if all(
            value is not None and not (isinstance(value, str) and len(value) > _LONGEST_TEXT)
            for value in bounds.values()
        ):
            low[name], high[name] = bounds["min"], bounds["max"]
    return {
        "numRecords": rows.num_rows,
        "minValues": low,
        "maxValues": high,
        "nullCount": nulls,
        "tightBounds": True,
    }
