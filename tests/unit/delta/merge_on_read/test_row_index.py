"""The index of a table's rows."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from nats_stream_source.delta.driver.merge_on_read.row_index import BYTES_PER_KEY, RowIndex

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
    index = RowIndex("t", _SCHEMA, None)
    for number, start in enumerate(range(0, 200_000, 10_000)):
        index.add_file(number, rows_of(range(start, start + 10_000)), np.arange(10_000))
    # The keys' 16 bytes; capacity for a quarter more rows.
    assert index.nbytes <= 200_000 * (BYTES_PER_KEY + 16) * 1.1


def test_row_that_moves_while_files_are_searched_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A merge in another thread puts row 1 into file 5, between two steps of the search."""
    index = RowIndex("t", _SCHEMA, None)
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
