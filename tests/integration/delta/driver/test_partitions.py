"""Partitions of all types and odd names: merges, compaction, maintenance."""

from __future__ import annotations

import os
import time
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from nats_stream_source.delta.upkeep import Upkeep
from tests.integration.delta.driver.in_process import (
    InProcessTable,
    arrow,
    both_writers,
    index_of,
    rebuilt,
)
from tests.integration.delta.merge_model import delete, put
from tests.support.delta import partition_by, rows_of

NAMES = ["fleet", "a~b", "~", "ü %: 1/2=", "a%7Eb", "a b", "x+y", "", None, "'q\"", "#?[x]"]


def partitioned(path: Path, kind: pa.DataType, vectors: bool) -> InProcessTable:
    table = InProcessTable(path, vectors=vectors)
    table.merge_rows(arrow([]).append_column("part", pa.array([], kind)))
    partition_by(path, "part")
    table.reopen()
    return table


def parts_of(path: Path) -> dict[str, tuple[Any, int]]:
    return {row["key"]: (row["part"], row["revision"]) for row in rows_of(DeltaTable(path))}


@both_writers
def test_partitions_with_odd_names_are_merged_and_maintained(tmp_path: Path, vectors: bool) -> None:
    path = tmp_path / "t"
    table = partitioned(path, pa.string(), vectors)
    expected = {}
    for revision in range(4):
        for number, name in enumerate(NAMES):
            key = f"k{number}-{revision % 2}"
            rows = arrow([put(key, 100 * revision + number)])
            table.merge_rows(rows.append_column("part", pa.array([name], pa.string())))
            expected[key] = name or None, 100 * revision + number
    table.merge(delete("k0-0", 900))
    del expected["k0-0"]
    assert parts_of(path) == expected
    assert index_of(table.state) == index_of(rebuilt(path))
    other = InProcessTable(path).engine.find()
    assert other is not None
    before = len(table.state.files)
    done = other.maintain(Upkeep(retention_hours=1))
    live = len(pa.table(DeltaTable(path).get_add_actions()))
    assert done.compacted - done.written == before - live > 0
    assert not done.skipped
    assert parts_of(path) == expected
    old = time.time() - 7200
    for file in path.rglob("*.parquet"):
        os.utime(file, (old, old))
    again = other.maintain(Upkeep(retention_hours=1))
    assert again.compacted == 0
    assert parts_of(path) == expected  # VACUUM knows the live files by their odd names
    table.merge_rows(arrow([put("k1-1", 950)]).append_column("part", pa.array(["~"])))
    assert parts_of(path) == expected | {"k1-1": ("~", 950)}
    assert index_of(table.state) == index_of(rebuilt(path))


@both_writers
@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.int64(), [1, -2, None]),
        (pa.bool_(), [True, False, None]),
        (pa.date32(), [date(2026, 2, 3), date(1, 1, 1), None]),
        (pa.decimal128(10, 2), [Decimal("1.50"), Decimal("-3.00"), None]),
    ],
)
def test_partition_values_are_read_back(
    tmp_path: Path, kind: pa.DataType, values: list[Any], vectors: bool
) -> None:
    path = tmp_path / "t"
    table = partitioned(path, kind, vectors)
    rows = arrow([put(f"k{number}", number + 1) for number in range(3)])
    table.merge_rows(rows.append_column("part", pa.array(values, kind)))
    table.reopen()
    moved = values[1:] + values[:1]  # rows move from partition to partition
    rows = arrow([put(f"k{number}", number + 5) for number in range(3)])
    table.merge_rows(rows.append_column("part", pa.array(moved, kind)))
    assert parts_of(path) == {f"k{n}": (moved[n], n + 5) for n in range(3)}
    table.merge(put("k0", 20))  # keeps its partition
    assert parts_of(path)["k0"] == (moved[0], 20)
    assert index_of(table.state) == index_of(rebuilt(path))
    found = table.engine.find()
    assert found is not None
    for value in values:
        keys = [key for key, (part, _) in parts_of(path).items() if part == value]
        assert found.scan(["key"], {"part": (value,)})["key"].to_pylist() == keys
