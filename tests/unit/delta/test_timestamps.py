"""Which tables with timestamps delta-rs may read."""

from __future__ import annotations

import contextlib
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from nats_stream_source.delta.driver.storage import TableStorage
from nats_stream_source.delta.driver.timestamps import Int96Columns
from nats_stream_source.delta.table import EngineRefusedError
from nats_stream_source.errors import TableError

_AT = datetime(2026, 1, 1, tzinfo=timezone.utc)
_TYPE = pa.timestamp("us", "UTC")
_BOUNDS = {"minValues": {"at": "2026-01-01T00:00:00Z"}, "maxValues": {"at": "2026-01-01T00:00:00Z"}}


def _write(
    table: Path, values: pa.Array, statistics: dict[str, Any] | None, *, int96: bool
) -> None:
    """Write a table with one data file, whose column ``at`` is as Spark writes it."""
    write_deltalake(table, pa.table({"at": values}).slice(0, 0))
    file = table / "part-0.parquet"
    pq.write_table(
        pa.table({"at": values}), file, use_deprecated_int96_timestamps=int96, store_schema=False
    )
    add = {
        "path": file.name,
        "partitionValues": {},
        "size": file.stat().st_size,
        "modificationTime": 0,
        "dataChange": True,
        "stats": None if statistics is None else json.dumps({"numRecords": 1, **statistics}),
    }
    log = table / "_delta_log" / f"{1:020d}.json"
    log.write_text(json.dumps({"add": {k: v for k, v in add.items() if v is not None}}))


@pytest.mark.parametrize(
    ("values", "statistics", "int96", "refused"),
    [
        (pa.array([_AT], _TYPE), _BOUNDS, True, False),
        (pa.array([_AT], _TYPE), {}, True, True),
        (pa.array([_AT], _TYPE), None, True, True),
        (pa.array([_AT], _TYPE), {"minValues": _BOUNDS["minValues"]}, True, True),
        (pa.array([_AT], _TYPE), None, False, False),
        (pa.array([None], _TYPE), {"nullCount": {"at": 1}}, True, False),
        (pa.array([[_AT]], pa.list_(_TYPE)), {"nullCount": {"at": 0}}, True, True),
        (pa.array([[_AT]], pa.list_(_TYPE)), {"nullCount": {"at": 0}}, False, False),
    ],
)
def test_int96_values_need_bounds(
    tmp_path: Path,
    values: pa.Array,
    statistics: dict[str, Any] | None,
    int96: bool,
    refused: bool,
) -> None:
    _write(tmp_path, values, statistics, int96=int96)
    expected = pytest.raises(EngineRefusedError, match="'at' has TIMESTAMPs of Parquet's type")
    with expected if refused else contextlib.nullcontext():
        columns = Int96Columns(TableStorage("table", str(tmp_path)))
        columns.require_known_range(DeltaTable(tmp_path))


def test_footer_is_read_once(tmp_path: Path) -> None:
    """The path of the file is escaped in the log: its partition has other characters."""
    rows = {"place": ["a b/ü%:x"], "at": pa.array([[_AT]], pa.list_(_TYPE))}
    write_deltalake(tmp_path, pa.table(rows), partition_by=["place"])
    storage, target = TableStorage("table", str(tmp_path)), DeltaTable(tmp_path)
    columns = Int96Columns(storage)
    columns.require_known_range(target)
    (file,) = tmp_path.glob("place=*/*.parquet")
    file.unlink()
    columns.require_known_range(target)
    with pytest.raises(TableError, match=r"could not read table 'table': .*not found"):
        Int96Columns(storage).require_known_range(target)
