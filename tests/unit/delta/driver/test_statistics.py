"""The statistics of a data file, without Spark; tests/integration/delta/driver has Spark's own."""

from __future__ import annotations

import json
import math
from datetime import datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from nats_stream_source.delta.driver.data_files import Statistics

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
