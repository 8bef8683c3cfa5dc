"""The index of a table's rows."""

from __future__ import annotations

from datetime import datetime, timezone

import numpy as np
import pyarrow as pa

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
