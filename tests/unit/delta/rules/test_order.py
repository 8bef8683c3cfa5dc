"""The reduction of Arrow batches to the newest entry of each key."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.delta.rules import rows as module
from nats_stream_source.delta.rules.layout import ORDER_COLUMNS, Layout
from nats_stream_source.delta.rules.rows import DecidingEvents, newest_per_key

SCHEMA = pa.schema(
    [
        ("bucket", pa.string()),
        ("key", pa.string()),
        ("value", pa.binary()),
        ("revision", pa.int64()),
        ("operation", pa.string()),
        ("stream_created", pa.timestamp("us", "UTC")),
    ]
)
KEYS = ["bucket", "key"]
LAYOUT = Layout.of_entries(SCHEMA.names, "remove")
NULL = 2**63 - 1  # the place of a null in the order

entry = st.fixed_dictionaries(
    {
        "bucket": st.sampled_from(["fleet", "yard", None]),
        "key": st.sampled_from(["a", "b", "c", "", None]),
        "value": st.binary(max_size=3),
        "revision": st.one_of(st.integers(1, 6), st.none()),
        "operation": st.sampled_from(["PUT", "DEL", "PURGE", "put", None]),
        "stream_created": st.sampled_from([1, 2, None]),
    }
)


def table(rows: list[dict[str, Any]]) -> pa.Table:
    columns = {name: [row[name] for row in rows] for name in SCHEMA.names}
    return pa.table(columns, SCHEMA)


def newest_orders(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The reference: the greatest order of each key, nulls as the greatest, and all with a null."""
    newest: dict[Any, tuple[Any, ...]] = {}
    for of in orders_of(rows):
        newest[of[:2]] = max(
            newest.get(of[:2], of), of, key=lambda of: [NULL if n is None else n for n in of[2:]]
        )
    valid = [of for of in newest.values() if None not in of]
    return sorted([*valid, *(of for of in orders_of(rows) if None in of)], key=repr)


def orders_of(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Key and order of each row, sorted."""
    columns = (*KEYS, "stream_created", "revision")
    return sorted((tuple(row[name] for name in columns) for row in rows), key=repr)


def rows_of(found: pa.Table) -> list[dict[str, Any]]:
    created = found["stream_created"].cast(pa.int64())
    return found.set_column(
        found.column_names.index("stream_created"), "stream_created", created
    ).to_pylist()


@given(st.lists(entry, max_size=30))
def test_newest_row_for_each_key(rows: list[dict[str, Any]]) -> None:
    found = rows_of(newest_per_key(table(rows), KEYS, ORDER_COLUMNS))
    assert orders_of(found) == newest_orders(rows)
    assert all(row in rows for row in found)  # whole rows, not columns of different rows


@given(st.lists(st.lists(entry, max_size=8), max_size=6))
def test_batches_are_reduced_as_one_table(batches: list[list[dict[str, Any]]]) -> None:
    everything = [row for rows in batches for row in rows]
    collected = DecidingEvents(SCHEMA, LAYOUT)
    collected._next_rows = 4  # reduced several times
    for rows in batches:
        collected.add(
            table(rows).combine_chunks().to_batches()[0]
            if rows
            else pa.RecordBatch.from_pylist([], SCHEMA)
        )
    found = collected.table()
    assert orders_of(rows_of(found)) == newest_orders(everything)


def test_keys_of_zero_with_either_sign_are_one() -> None:
    keys = pa.array([0.0, -0.0, float("nan"), float("nan")])
    rows = pa.table({"key": keys, "stream_created": [1] * 4, "revision": [1, 2, 1, 2]})
    assert newest_per_key(rows, ["key"], ORDER_COLUMNS)["revision"].to_pylist() == [2, 2]


def record_batch(keys: int, start: int, size: int = 8) -> pa.RecordBatch:
    numbers = range(start, start + keys)
    return pa.RecordBatch.from_pydict(
        {
            "bucket": ["fleet"] * keys,
            "key": [str(n) for n in numbers],
            "value": [b"x" * size] * keys,
            "revision": list(numbers),
            "operation": ["PUT"] * keys,
            "stream_created": pa.array([1] * keys, SCHEMA.field("stream_created").type),
        },
        SCHEMA,
    )


def test_large_values_are_reduced_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, 65,536 values of 1 MiB would be in memory before the first reduction."""
    monkeypatch.setattr(module, "_FIRST_BYTES", 100_000)
    collected = DecidingEvents(SCHEMA, LAYOUT)
    for _ in range(50):
        collected.add(record_batch(2, 0, size=10_000))
    assert sum(batch.nbytes for batch in collected._batches) < 250_000
