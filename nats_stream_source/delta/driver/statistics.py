"""The statistics of a data file in the log, as Delta's own writer has them.

Bounds of numbers, decimals, texts, dates and times, and the number of nulls of each column, also of
the fields of structs, for the first 32 columns and fields. A bound that JSON or Delta's text cannot
have exactly is left out: readers then read the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_COLUMNS = 32  # Delta's own number
_LONGEST_TEXT = 32  # characters; a longer text is cut, and then does not bound the file above
_EPOCH = datetime(1970, 1, 1)

_Path = tuple[str, ...]


class Statistics:
    """The statistics of one file, whose rows come in parts.

    Attributes:
        rows: the number of rows.
    """

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
            bounds: Any = pc.min_max(_comparable(column)).as_py()
            low, high = bounds["min"], bounds["max"]
            if pa.types.is_floating(column.type) and pc.any(pc.is_nan(column)).as_py():
                low = high = None
            self._low[path] = _bound(min, self._low.get(path, low), low)
            self._high[path] = _bound(max, self._high.get(path, high), high)

    def values(self) -> dict[str, Any]:
        """The statistics as JSON has them."""
        texts = [
            {path: _text(self._kinds[path], value, upper) for path, value in bounds.items()}
            for bounds, upper in ((self._low, False), (self._high, True))
        ]
        low, high = (
            _nested({path: value for path, value in of.items() if value is not None})
            for of in texts
        )
        return {
            "numRecords": self.rows,
            "minValues": low,
            "maxValues": high,
            "nullCount": _nested(self._nulls),
            "tightBounds": True,
        }


def _leaves(path: _Path, column: pa.ChunkedArray) -> Iterator[tuple[_Path, pa.ChunkedArray]]:
    if not pa.types.is_struct(column.type):
        yield path, column
        return
    for field, part in zip(column.type, column.flatten(), strict=True):
        yield from _leaves((*path, field.name), part)


def _is_bounded(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_string(kind)
        or pa.types.is_date(kind)
        or pa.types.is_timestamp(kind)
    )


def _comparable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Dates and times as numbers: Python lacks years beyond 9999."""
    if pa.types.is_timestamp(column.type):
        return column.cast(pa.int64())
    return column.cast(pa.int32()) if pa.types.is_date(column.type) else column


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
