"""Events of all layouts, columns that a batch adds or widens, NOT NULL, metadata, partitions."""

from __future__ import annotations

import json
import random
import shutil
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema

from nats_stream_source.delta.schema import TIMESTAMP_NTZ
from nats_stream_source.delta.tables import EngineRefusedError
from nats_stream_source.delta.upkeep import Upkeep
from nats_stream_source.errors import ConfigurationError
from tests.integration.delta.driver.in_process import (
    KINDS,
    CdcTable,
    InProcessTable,
    arrow,
    both_writers,
)
from tests.integration.delta.merge_model import columns_of, delete, put, versions
from tests.support.cdc.events import Event, history, latest, marked, random_event
from tests.support.delta import age, change_columns, partition_by, rows_of


@both_writers
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("scd_type", "deletes"), [(1, "remove"), (1, "mark"), (2, "remove")])
def test_random_batches_give_rows_of_model(
    tmp_path: Path, scd_type: int, deletes: str, kind: str, vectors: bool
) -> None:
    """Late, repeated and contradicting events, restarts, compaction, and another writer."""
    choice = random.Random(f"{scd_type} {deletes} {kind} {vectors}")
    arguments = {"deletes": deletes, "vectors": vectors, "upkeep": Upkeep(compact_files=2)}
    table = CdcTable(tmp_path / "t", scd_type, kind, **arguments)
    model = marked if deletes == "mark" else latest if scd_type == 1 else history
    known: list[Event] = []
    for _ in range(14):
        batch = [
            random_event(choice, f"k{choice.randrange(4)}", choice.randrange(60))
            for _ in range(choice.randint(1, 6))
        ]
        known += batch
        writer = table
        if choice.random() < 0.2:
            writer = CdcTable(tmp_path / "t", scd_type, kind, deletes=deletes, vectors=vectors)
        elif choice.random() < 0.2:
            table.table.crash()
        writer.merge(batch)
        writer.table.table.wait()
        assert table.rows() == model(known)
        table.table.verify_index()
        before = versions(table.path)
        assert not table.merge(choice.choices(known, k=3)).changed
        assert versions(table.path) == before


@pytest.mark.parametrize(
    ("gone", "error"),
    [("state", "does not exist beside a table with rows"), ("table", "belongs to another table")],
)
def test_table_or_state_without_other_one_is_refused(tmp_path: Path, gone: str, error: str) -> None:
    table = CdcTable(tmp_path / "t", 1)
    table.merge([Event("a", 1, "U", 1, None)])
    table.table.crash()
    shutil.rmtree(f"{table.path}__cdc_state" if gone == "state" else table.path)
    with pytest.raises(ConfigurationError, match=error):
        table.merge([Event("a", 2, "U", 1, None)])


def with_column(rows: pa.Table, name: str, values: list[Any], kind: pa.DataType) -> pa.Table:
    return rows.append_column(name, pa.array(values, kind))


@both_writers
def test_new_column_is_added_and_metadata_of_others_stays(path: Path, vectors: bool) -> None:
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
    assert columns_of(path, "key", "size") == [("a", 7), ("b", None)]
    fields = json.loads(DeltaTable(path).schema().to_json())["fields"]
    assert [field["metadata"] for field in fields if field["name"] == "value"] == [own]
    assert DeltaTable(path).protocol() == before
    assert [one["operation"] for one in DeltaTable(path).history()][1] == "ADD COLUMNS"
    table.verify_index()
    table.merge(put("a", 5))  # the batch lacks the column: the row keeps its value
    assert columns_of(path, "key", "size") == [("a", 7), ("b", None)]


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
    assert columns_of(path, "at") == [(datetime(1970, 1, 1),)]
    created = InProcessTable(tmp_path / "created", vectors=vectors)
    created.merge_rows(with_column(arrow([put("a", 3)]), "at", [0], TIMESTAMP_NTZ))
    assert DeltaTable(created.path).protocol().reader_features == protocol.reader_features


def test_wider_type_of_partition_column_is_refused(path: Path) -> None:
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
    path: Path, vectors: bool
) -> None:
    table = InProcessTable(path, vectors=vectors)
    table.merge_rows(with_column(arrow([]), "size", [], pa.int64()))

    def change(fields: dict[str, Any]) -> None:
        fields["value"]["nullable"] = fields["size"]["nullable"] = False

    change_columns(path, change)
    table.reopen()
    table.merge_rows(with_column(arrow([put("a", 1)]), "size", [1], pa.int64()))
    table.merge(put("a", 2))  # keeps its size
    assert columns_of(path, "key", "size") == [("a", 1)]
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


def parts_of(path: Path) -> dict[str, tuple[Any, int]]:
    return {row["key"]: (row["part"], row["revision"]) for row in rows_of(DeltaTable(path))}


@both_writers
@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (
            pa.string(),
            ["fleet", "a~b", "~", "ü %: 1/2=", "a%7Eb", "a b", "x+y", "", None, "'q\"", "#?[x]"],
        ),
        (pa.int64(), [1, -2, None]),
        (pa.bool_(), [True, False, None]),
        (pa.date32(), [date(2026, 2, 3), date(1, 1, 1), None]),
        (pa.decimal128(10, 2), [Decimal("1.50"), Decimal("-3.00"), None]),
    ],
    ids=lambda of: None if isinstance(of, list) else str(of),
)
def test_partitions_are_merged_and_maintained(
    path: Path, kind: pa.DataType, values: list[Any], vectors: bool
) -> None:
    table = InProcessTable(path, vectors=vectors)
    table.merge_rows(with_column(arrow([]), "part", [], kind))
    partition_by(path, "part")
    table.reopen()
    expected: dict[str, tuple[Any, int]] = {}

    def merge(parts: list[Any], revision: int, suffix: str) -> None:
        keys = [f"k{number}-{suffix}" for number in range(len(parts))]
        rows = arrow([put(key, revision) for key in keys])
        table.merge_rows(with_column(rows, "part", parts, kind))
        for key, part in zip(keys, parts, strict=True):
            expected[key] = None if part == "" else part, revision

    merge(values, 1, "a")
    merge(values, 2, "b")
    table.reopen()
    merge(values[1:] + values[:1], 3, "a")  # rows move from partition to partition
    table.merge(put("k0-b", 20), delete("k1-b", 20))
    expected["k0-b"] = values[0], 20  # keeps its partition
    del expected["k1-b"]
    assert parts_of(path) == expected
    table.verify_index()
    other = InProcessTable(path).found
    for value in {part for part, _ in expected.values()}:
        found = other.scan(["key"], {"part": (value,)})["key"].to_pylist()
        assert sorted(found) == sorted(key for key, of in expected.items() if of[0] == value)
    before = len(table.state.files)
    done = other.maintain(Upkeep(retention_hours=1))
    live = len(pa.table(DeltaTable(path).get_add_actions()))
    assert done.compacted - done.written == before - live > 0
    assert not done.skipped
    assert parts_of(path) == expected
    age(path.rglob("*.parquet"), hours=2)
    assert other.maintain(Upkeep(retention_hours=1)).compacted == 0
    assert parts_of(path) == expected  # VACUUM knows the live files by their odd names
    merge(values[:1], 30, "a")
    assert parts_of(path) == expected
    table.verify_index()
