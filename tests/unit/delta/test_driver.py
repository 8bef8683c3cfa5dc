"""What the driver keeps of a table and writes: index, statistics, deletion vectors."""

from __future__ import annotations

import base64
import json
import math
from collections import OrderedDict
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st
from pyroaring import BitMap64

from nats_stream_source.delta.driver import key_index
from nats_stream_source.delta.driver.data_files import RowCache, Statistics
from nats_stream_source.delta.driver.index import BYTES_PER_KEY, NO_FILE, RowIndex
from nats_stream_source.delta.driver.key_index import KeyIndex, Keys, encoded_keys
from nats_stream_source.delta.driver.log import (
    VectorError,
    VectorFile,
    is_vector_path,
    vector_file_name,
    vector_path,
    vector_rows,
)
from nats_stream_source.delta.rules.layout import SEQUENCE, START, Layout
from nats_stream_source.delta.tables import EngineRefusedError

_SCHEMA = pa.schema(
    [("key", pa.string()), ("stream_created", pa.timestamp("us", "UTC")), ("revision", pa.int64())]
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


def test_rows_that_are_dropped_while_they_are_read_are_not_kept() -> None:
    """A merge in another thread drops them, after the look whether they are kept."""
    cache = RowCache()

    class DropsBeforeMove(OrderedDict[str, pa.Table]):
        def move_to_end(self, key: str, last: bool = True) -> None:
            cache.drop(key)
            super().move_to_end(key, last)

    cache._files = DropsBeforeMove()
    cache.put({"path": "a", "size": 1}, pa.table({"a": [1]}))
    assert cache.get("a") is None


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
        *((kind, None) for kind in (pa.string(), pa.decimal128(20, 0), pa.float64(), pa.date32())),
    ],
)
def test_order_of_integers_and_times_only_is_in_index(kind: pa.DataType, values: Any) -> None:
    schema = pa.schema([("key", pa.string()), (SEQUENCE, kind)])
    index = RowIndex("t", schema, Layout(1, ("key",), "", (SEQUENCE,), "remove", False))
    if values is None:
        assert not index.has_columns([SEQUENCE])
        assert (index.columns, index.order) == (("key",), ())
        return
    rows = pa.table([["a", "b", "c"], pa.array(values, kind)], schema=schema)
    index.add_file(0, rows, np.arange(3))
    assert index.has_columns([SEQUENCE])
    assert not index.has_columns(["key", SEQUENCE])
    slots = index.find(pa.table({"key": ["c", "x", "a", "b"]}))
    read = index.read_order(slots, [SEQUENCE])
    expected = [values[2], None, values[0], values[1]]
    assert read.schema.types == [kind]
    assert read[SEQUENCE].to_pylist() == pa.array(expected, kind).to_pylist()


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


@pytest.mark.parametrize("hashes", [1, 3, 1 << 62])
@given(batches=st.lists(st.lists(st.binary(max_size=6), max_size=40), max_size=8))
def test_index_equals_dictionary_and_finds_repeated_key(
    hashes: int, batches: list[list[bytes]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        real = key_index._hashes
        patch.setattr(key_index, "_hashes", lambda keys: real(keys) % np.uint64(hashes))
        index, model = KeyIndex(), dict[bytes, int]()
        for batch in batches:
            keys = Keys.of(pa.array(batch, pa.large_binary()))
            repeated = keys.first_repeated()
            assert (repeated is None) == (len(set(batch)) == len(batch))
            assert repeated is None or batch.count(batch[repeated]) > 1
            found = index.find(keys)
            assert found.tolist() == [model.get(key, -1) for key in batch]
            new = list(dict.fromkeys(key for key in batch if key not in model))
            slots = index.insert(Keys.of(pa.array(new, pa.large_binary())))
            model.update(zip(new, slots.tolist(), strict=True))
        assert len(index) == len(model)


@given(st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), max_size=20, unique=True))
def test_composite_keys_differ(pairs: list[tuple[str, str]]) -> None:
    columns = [pa.array([pair[at] for pair in pairs], pa.string()) for at in range(2)]
    assert len(set(encoded_keys(columns).to_pylist())) == len(pairs)


def test_null_in_key_column_is_null() -> None:
    columns = [pa.array(["a", None], pa.string()), pa.array([None, "b"], pa.string())]
    assert encoded_keys(columns).to_pylist() == [None, None]


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
def test_zero_with_either_sign_is_one_key(kind: pa.DataType) -> None:
    zero, negative, one = encoded_keys([pa.array([0.0, -0.0, 1.0], kind)]).to_pylist()
    assert zero == negative != one


_US = pa.timestamp("us")
_TIME = 1_767_225_600_000_000  # 2026-01-01


def bounds(kind: pa.DataType, *parts: list[Any]) -> tuple[Any, Any, int]:
    """The bounds and nulls of a column whose values come in parts."""
    statistics = Statistics()
    for part in parts:
        statistics.add(pa.table({"a": pa.array(part, kind)}))
    values = json.loads(json.dumps(statistics.values()))
    low, high = (values[name].get("a") for name in ("minValues", "maxValues"))
    assert values["numRecords"] == sum(map(len, parts))
    return low, high, values["nullCount"]["a"]


@pytest.mark.parametrize(
    ("kind", "parts", "expected"),
    [
        (pa.int64(), [[3, None], [-7]], (-7, 3, 1)),
        (pa.int64(), [[None], [2]], (2, 2, 1)),
        (pa.int64(), [[None]], (None, None, 1)),
        (pa.string(), [["b", "a"], ["ä"]], ("a", "ä", 0)),
        (pa.string(), [["a" * 40, "b"]], ("a" * 32, "b", 0)),
        (pa.string(), [["b" * 33, "a"]], ("a", None, 0)),
        (pa.float64(), [[0.5, -1.5]], (-1.5, 0.5, 0)),
        (pa.float64(), [[1.0], [math.nan], [2.0]], (None, None, 0)),
        (pa.float64(), [[1.0, math.inf]], (1.0, None, 0)),
        (pa.float32(), [[0.1]], (0.1, 0.1, 0)),
        (pa.decimal128(10, 2), [[Decimal("1.25"), Decimal("-3.00")]], (-3.0, 1.25, 0)),
        (pa.decimal128(38, 0), [[Decimal(10**37 + 1)]], (None, None, 0)),
        (pa.date32(), [[0, 1], [-1]], ("1969-12-31", "1970-01-02", 0)),
        (pa.date32(), [[10_000_000]], (None, None, 0)),
        (
            pa.timestamp("us", "UTC"),
            [[_TIME + 1, _TIME + 1999]],
            ("2026-01-01T00:00:00.000Z", "2026-01-01T00:00:00.002Z", 0),
        ),
        (_US, [[_TIME]], ("2026-01-01T00:00:00.000", "2026-01-01T00:00:00.000", 0)),
        (_US, [[-1]], ("1969-12-31T23:59:59.999", "1970-01-01T00:00:00.000", 0)),
        (_US, [[2**62]], (None, None, 0)),
        (pa.bool_(), [[True, None]], (None, None, 1)),
        (pa.binary(), [[b"a"]], (None, None, 0)),
        (pa.list_(pa.int64()), [[[1], None]], (None, None, 1)),
    ],
)
def test_bounds_of_type(kind: pa.DataType, parts: list[list[Any]], expected: Any) -> None:
    assert bounds(kind, *parts) == expected


def test_fields_of_structs_are_counted_and_bounded() -> None:
    kind = pa.struct([("a", pa.int64()), ("s", pa.struct([("t", _US), ("x", pa.binary())]))])
    rows = [{"a": 1, "s": {"t": datetime(2026, 1, 1), "x": b""}}, {"a": None, "s": None}, None]
    statistics = Statistics()
    statistics.add(pa.table({"c": pa.array(rows, kind)}))
    values = statistics.values()
    time = "2026-01-01T00:00:00.000"
    assert values["minValues"] == values["maxValues"] == {"c": {"a": 1, "s": {"t": time}}}
    assert values["nullCount"] == {"c": {"a": 2, "s": {"t": 2, "x": 2}}}


def test_columns_beyond_first_32_are_left_out() -> None:
    statistics = Statistics()
    statistics.add(pa.table({f"c{number}": [1] for number in range(40)}))
    assert list(statistics.values()["nullCount"]) == [f"c{number}" for number in range(32)]


_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_ROWS = st.sets(st.integers(0, 200_000), min_size=1, max_size=50)


@given(st.lists(_ROWS, min_size=1, max_size=4))
def test_vectors_of_file_are_read_back(vectors: list[set[int]]) -> None:
    file = VectorFile()
    descriptors = [file.add(BitMap64(rows)) for rows in vectors]
    for rows, descriptor in zip(vectors, descriptors, strict=True):
        assert vector_path(descriptor) == file.name
        assert set(vector_rows(descriptor, file.content(), 200_001)) == rows


def test_inline_vector_is_read() -> None:
    """Rows 3, 4, 7, 11, 18 and 29 in the portable format, as Z85."""
    vector = bytes.fromhex(
        "d1d33964 0100000000000000 00000000 3a300000 01000000 0000 0500 10000000"
        "0300 0400 0700 0b00 1200 1d00"
    )
    descriptor = {
        "storageType": "i",
        "pathOrInlineDv": base64.b85encode(vector).decode().translate(str.maketrans(_B85, _Z85)),
        "sizeInBytes": len(vector),
        "cardinality": 6,
    }
    assert vector_path(descriptor) is None
    assert list(vector_rows(descriptor, b"", 30)) == [3, 4, 7, 11, 18, 29]


def test_path_of_protocol_has_prefix_and_uuid() -> None:
    """The example of Delta's protocol."""
    descriptor = {"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^"}
    path = vector_path(descriptor)
    assert path == "ab/deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin"
    assert is_vector_path(path)


def test_damaged_byte_truncated_vector_and_row_beyond_data_file_are_found() -> None:
    file = VectorFile()
    file.add(BitMap64([1, 2]))
    descriptor = file.add(BitMap64(range(0, 100, 3)))
    content, start = file.content(), descriptor["offset"]
    damaged = [content[:size] for size in range(len(content))]
    for at in (0, 1, 4, 5, 12, 40, -1):
        part = bytearray(content[start:])
        part[at] ^= 1
        damaged.append(content[:start] + part)
    for one in damaged:
        with pytest.raises(VectorError, match="damaged"):
            vector_rows(descriptor, bytes(one), 100)
    with pytest.raises(VectorError, match="names row 99, and the data file has 99 rows"):
        vector_rows(descriptor, content, 99)


def test_vector_outside_of_table_is_refused() -> None:
    descriptor = {"storageType": "p", "pathOrInlineDv": "s3://other/vector.bin"}
    with pytest.raises(EngineRefusedError, match="outside of the table"):
        vector_path(descriptor)
    assert vector_file_name(descriptor) == "vector.bin"
    assert vector_file_name({"storageType": "i", "pathOrInlineDv": "0"}) is None
