"""Columns that a batch adds or widens, NOT NULL, and the metadata of the table's own columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema

from nats_stream_source.delta.schema import TIMESTAMP_NTZ
from nats_stream_source.delta.tables import EngineRefusedError
from nats_stream_source.errors import ConfigurationError
from tests.integration.delta.driver.in_process import (
    InProcessTable,
    arrow,
    both_writers,
    index_of,
    rebuilt,
)
from tests.integration.delta.merge_model import Entry, put
from tests.support.delta import change_columns, partition_by, rows_of


def with_column(rows: pa.Table, name: str, values: list[Any], kind: pa.DataType) -> pa.Table:
    return rows.append_column(name, pa.array(values, kind))


def values_of(path: Path, name: str) -> dict[str, Any]:
    return {row["key"]: row[name] for row in rows_of(DeltaTable(path))}


@both_writers
def test_new_column_is_added_and_metadata_of_others_stays(tmp_path: Path, vectors: bool) -> None:
    path = tmp_path / "t"
    table = InProcessTable(path, vectors=vectors)
    table.merge_rows(arrow([]))
    own = {"comment": "the value", "delta.userDefined": {"a": [1, None]}, "number": 3, "flag": True}

    def change(fields: dict[str, Any]) -> None:
        fields["value"]["metadata"] = own

    change_columns(path, change)
    table.reopen()
    before = DeltaTable(path).protocol()
    table.merge(put("a", 1), put("b", 2))
    rows = with_column(arrow([put("a", 3)]), "size", [7], pa.int32())
    assert table.merge_rows(rows).updated == 1
    assert values_of(path, "size") == {"a": 7, "b": None}
    fields = json.loads(DeltaTable(path).schema().to_json())["fields"]
    assert [field["metadata"] for field in fields if field["name"] == "value"] == [own]
    assert DeltaTable(path).protocol() == before
    assert [one["operation"] for one in DeltaTable(path).history()][1] == "ADD COLUMNS"
    assert index_of(table.state) == index_of(rebuilt(path))
    table.merge(put("b", 4))  # the batch lacks the column: new rows have null, others keep theirs
    assert values_of(path, "size") == {"a": 7, "b": None}
    table.merge(put("a", 5))
    assert values_of(path, "size") == {"a": 7, "b": None}


@both_writers
def test_column_without_time_zone_adds_feature(tmp_path: Path, vectors: bool) -> None:
    path = tmp_path / "t"
    table = InProcessTable(path, vectors=vectors)
    table.merge(put("a", 1))
    table.merge_rows(with_column(arrow([put("a", 3)]), "at", [0], TIMESTAMP_NTZ))
    protocol = DeltaTable(path).protocol()
    vector = ["deletionVectors"] * vectors
    assert (protocol.min_reader_version, protocol.min_writer_version) == (3, 7)
    assert sorted(protocol.reader_features) == [*vector, "timestampNtz"]
    assert sorted(protocol.writer_features) == [
        *("appendOnly", *vector, "invariants", "timestampNtz")
    ]
    assert values_of(path, "at")["a"].isoformat() == "1970-01-01T00:00:00"


def test_table_is_created_with_column_without_time_zone(tmp_path: Path) -> None:
    table = InProcessTable(tmp_path / "t", vectors=False)
    table.merge_rows(with_column(arrow([put("a", 3)]), "at", [0], TIMESTAMP_NTZ))
    assert DeltaTable(tmp_path / "t").protocol().reader_features == ["timestampNtz"]


@both_writers
def test_wider_types_are_in_all_data_files(tmp_path: Path, vectors: bool) -> None:
    path = tmp_path / "t"
    table = InProcessTable(path, vectors=vectors)

    def merge(column: str, kind: pa.DataType, value: Any, *entries: Entry) -> None:
        table.merge_rows(with_column(arrow(entries), column, [value] * len(entries), kind))

    narrow = pa.struct([("a", pa.int16()), ("l", pa.list_(pa.float32()))])
    wide = pa.struct([("a", pa.int64()), ("l", pa.list_(pa.float64())), ("b", pa.string())])
    before, after = {"a": 1, "l": [0.5]}, {"a": 1 << 40, "l": [0.1], "b": "x"}
    widened = {**before, "b": None}
    merge("n", narrow, before, put("a", 1), put("b", 2), put("c", 3))
    merge("n", narrow, before, put("c", 4))
    merge("n", wide, after, put("b", 5))
    assert values_of(path, "n") == {"a": widened, "b": after, "c": widened}
    assert "CHANGE COLUMNS" in [commit["operation"] for commit in DeltaTable(path).history()]
    assert index_of(table.state) == index_of(rebuilt(path))


def test_wider_type_of_partition_column_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    table = InProcessTable(path)
    table.merge_rows(with_column(arrow([]), "n", [], pa.int32()))
    partition_by(path, "n")
    table.reopen()
    table.merge_rows(with_column(arrow([put("a", 1)]), "n", [3], pa.int32()))
    version = DeltaTable(path).version()
    with pytest.raises(EngineRefusedError, match="the partition column 'n' gets another type"):
        table.merge_rows(with_column(arrow([put("a", 2)]), "n", [1 << 40], pa.int64()))
    assert DeltaTable(path).version() == version


@both_writers
def test_null_in_not_null_column_is_refused_before_anything_is_written(
    tmp_path: Path, vectors: bool
) -> None:
    path = tmp_path / "t"
    table = InProcessTable(path, vectors=vectors)
    table.merge_rows(with_column(arrow([]), "size", [], pa.int64()))

    def change(fields: dict[str, Any]) -> None:
        fields["value"]["nullable"] = fields["size"]["nullable"] = False

    change_columns(path, change)
    table.reopen()
    table.merge_rows(with_column(arrow([put("a", 1)]), "size", [1], pa.int64()))
    table.merge(put("a", 2))  # keeps its size
    assert values_of(path, "size") == {"a": 1}
    before = sorted(path.rglob("*"))
    for rows in (
        with_column(arrow([put("a", 3, value=None)]), "size", [1], pa.int64()),
        with_column(arrow([put("a", 3)]), "size", [None], pa.int64()),
        arrow([put("b", 3)]),
    ):
        with pytest.raises(ConfigurationError, match="NOT NULL in the table and null in the batch"):
            table.merge_rows(rows)
        assert sorted(path.rglob("*")) == before
    schema = Schema.from_json(DeltaTable(path).schema().to_json())
    assert [field.name for field in schema.fields if not field.nullable] == ["value", "size"]


def test_column_of_other_writer_is_seen(tmp_path: Path) -> None:
    first, second = (InProcessTable(tmp_path / "t") for _ in range(2))
    first.merge(put("a", 1))
    second.merge(put("b", 2))
    first.merge_rows(with_column(arrow([put("a", 3)]), "size", [7], pa.int32()))
    second.merge_rows(with_column(arrow([put("b", 4)]), "size", [8], pa.int64()))
    first.merge_rows(with_column(arrow([put("c", 5)]), "size", [9], pa.int32()))
    assert values_of(tmp_path / "t", "size") == {"a": 7, "b": 8, "c": 9}
    assert DeltaTable(tmp_path / "t").schema().to_arrow().field("size").type == pa.int64()
