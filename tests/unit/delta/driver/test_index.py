"""The index of a table's rows."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from nats_stream_source.delta.driver.index import BYTES_PER_KEY, NO_FILE, RowIndex
from nats_stream_source.delta.rules.layout import SEQUENCE, START, Layout

_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("stream_created", pa.timestamp("us", "UTC")),
        ("revision", pa.int64()),
    ]
)


def rows_of(numbers: range) -> pa.Table:
    """Rows whose keys have 16 bytes."""
    created = pa.scalar(datetime(2026, 1, 1, tzinfo=timezone.utc), _SCHEMA.types[1])
    keys = [f"key-{number:012}" for number in numbers]
    return pa.table([keys, pa.repeat(created, len(numbers)), list(numbers)], schema=_SCHEMA)


def test_memory_per_key_is_bounded() -> None:
    index = RowIndex("t", _SCHEMA, Layout.of_entries(_SCHEMA.names, "remove"))
    for number, start in enumerate(range(0, 200_000, 10_000)):
        index.add_file(number, rows_of(range(start, start + 10_000)), np.arange(10_000))
    # The keys' 16 bytes; capacity for a quarter more rows.
    assert index.nbytes <= 200_000 * (BYTES_PER_KEY + 16) * 1.1


def test_row_that_moves_while_files_are_searched_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A merge in another thread puts row 1 into file 5, between two steps of the search."""
    index = RowIndex("t", _SCHEMA, Layout.of_entries(_SCHEMA.names, "remove"))
    for number in range(2):
        index.add_file(number, rows_of(range(3 * number, 3 * number + 3)), np.arange(3))
    whole = index.file

    class MovesOneRow(np.ndarray[Any, np.dtype[np.int32]]):
        def __getitem__(self, at: Any) -> Any:
            whole[1] = 5
            return super().__getitem__(at)

    monkeypatch.setattr(RowIndex, "file", whole.view(MovesOneRow))
    slots, numbers = index.in_files([0])
    assert whole[1] == 5
    assert (slots.tolist(), numbers.tolist()) == ([0, 2], [0, 0])


_STRUCT = pa.struct(
    [
        ("at", pa.timestamp("us", "UTC")),
        ("inner", pa.struct([("a", pa.int32()), ("b", pa.int64())])),
    ]
)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.int64(), [3, None, -7]),
        (pa.int16(), [3, None, -7]),
        (pa.timestamp("us"), [3, None, -7]),
        (_STRUCT, [{"at": 5, "inner": {"a": 1, "b": None}}, None, {"at": 0, "inner": None}]),
    ],
)
def test_order_of_integers_and_times_is_read_from_index(kind: pa.DataType, values: Any) -> None:
    schema = pa.schema([("key", pa.string()), (SEQUENCE, kind)])
    index = RowIndex("t", schema, Layout(1, ("key",), "", (SEQUENCE,), "remove", False))
    rows = pa.table([["a", "b", "c"], pa.array(values, kind)], schema=schema)
    index.add_file(0, rows, np.arange(3))
    assert index.has_columns([SEQUENCE])
    assert not index.has_columns(["key", SEQUENCE])
    slots = index.find(pa.table({"key": ["c", "x", "a", "b"]}))
    read = index.read_order(slots, [SEQUENCE])
    expected = [values[2], None, values[0], values[1]]
    assert read.schema.types == [kind]
    assert read[SEQUENCE].to_pylist() == pa.array(expected, kind).to_pylist()


@pytest.mark.parametrize("kind", [pa.string(), pa.decimal128(20, 0), pa.float64(), pa.date32()])
def test_order_of_other_type_is_not_in_index(kind: pa.DataType) -> None:
    schema = pa.schema([("key", pa.string()), (SEQUENCE, kind)])
    index = RowIndex("t", schema, Layout(1, ("key",), "", (SEQUENCE,), "remove", False))
    assert not index.has_columns([SEQUENCE])
    assert (index.columns, index.order) == (("key",), ())


def test_replaced_row_keeps_its_slot_and_removed_identity_takes_its_own_again() -> None:
    index = RowIndex("t", _SCHEMA, Layout.of_entries(_SCHEMA.names, "remove"))
    index.add_file(0, rows_of(range(3)), np.arange(3))
    slots = index.find(rows_of(range(3)))
    index.file[slots[2]] = NO_FILE
    assert index.find(rows_of(range(3))).tolist() == [*slots[:2], -1]
    written = rows_of(range(1, 4))
    index.put(written, np.array([slots[1], -1, -1]), np.full(3, 7, np.int32), np.arange(3))
    assert index.find(rows_of(range(4))).tolist() == [0, 1, 2, 3]
    assert index.file.tolist() == [0, 7, 7, 7]
    assert index.row.tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize("kind", [pa.int64(), _STRUCT.field("inner").type])
def test_rows_of_key_begin_with_last_one_before_sequence(kind: pa.DataType) -> None:
    schema = pa.schema([("key", pa.string()), (START, kind)])
    layout = Layout(2, ("key",), "", (SEQUENCE,), "remove", False)
    index = RowIndex("t", schema, layout)
    starts: list[Any] = [1, 5, 9, 2]
    if pa.types.is_struct(kind):
        starts = [{"a": 0, "b": start} for start in starts]
    rows = pa.table([["k", "k", "k", "other"], pa.array(starts, kind)], schema=schema)
    index.add_file(0, rows, np.arange(4))
    for since, expected in ((0, [0, 1, 2]), (5, [0, 1, 2]), (6, [1, 2]), (20, [2])):
        value = {"a": 0, "b": since} if pa.types.is_struct(kind) else since
        keys = pa.table({"key": ["k"], SEQUENCE: pa.array([value], kind)})
        assert sorted(index.of_keys(keys).tolist()) == expected
    assert sorted(index.of_keys(pa.table({"key": ["k", "x"]})).tolist()) == [0, 1, 2]
