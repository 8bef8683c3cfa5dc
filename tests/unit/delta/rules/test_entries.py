"""Entries of a bucket as events of SCD type 1: a table of cases, and deletes of missing keys."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from nats_stream_source.delta.compare_with_bucket import difference_table
from nats_stream_source.delta.rules.changes import changes_of, require_valid
from nats_stream_source.delta.rules.events import EventShape
from nats_stream_source.delta.rules.layout import DELETE, REPLACES, Deletes, Layout
from nats_stream_source.delta.rules.reconciled import differences_of
from nats_stream_source.delta.rules.rows import RowChanges
from nats_stream_source.errors import ConfigurationError
from tests.support.delta import ENTRIES
from tests.unit.delta.rules.memory_tables import MemoryTable

Row = tuple[str, bytes | None, int, int, str]
"""Key, value, stream_created, revision, operation; in a table of marks ``*`` marks a row."""


def shape_of(layout: Layout) -> EventShape:
    return EventShape(ENTRIES, layout, computed=True)


def entry(row: Row) -> dict[str, Any]:
    key, value, created, revision, operation = row
    return {
        "bucket": "fleet",
        "key": key,
        "value": value,
        "revision": revision,
        "created": revision,
        "operation": operation.removesuffix("*"),
        "stream_created": created,
    }


def table_of(deletes: Deletes, *rows: Row, own: tuple[str, ...] = ()) -> MemoryTable:
    layout = Layout.of_entries(ENTRIES.names, deletes)
    schema = pa.schema([*layout.table_schema(ENTRIES), *((name, pa.string()) for name in own)])
    table = MemoryTable(schema, layout)
    stored = [{**entry(row), "deleted": row[4].endswith("*")} for row in rows]
    stored = [{**row, **dict.fromkeys(own, "mine")} for row in stored]
    table.slots += pa.Table.from_pylist(stored, schema).to_pylist()
    return table


def merge(table: MemoryTable, *rows: Row) -> RowChanges:
    shape = shape_of(table.layout).fitted(table.schema, None)
    batch = pa.Table.from_pylist([entry(row) for row in rows], ENTRIES)
    events = shape.events(batch, "fleet")
    require_valid(events, table.layout)
    changes = changes_of(events, table.layout, (), table, None)
    assert changes.state is None
    assert not changes.contradictions
    table.apply(changes)
    return changes


def content(table: MemoryTable) -> list[Row]:
    return sorted(
        (
            row["key"],
            row["value"],
            round(row["stream_created"].timestamp() * 1e6),
            row["revision"],
            row["operation"] + ("*" if row.get("deleted") else ""),
        )
        for row in table.rows
    )


def put(revision: int, stream_created: int = 1) -> Row:
    return ("k", f"{stream_created}/{revision}".encode(), stream_created, revision, "PUT")


def delete(revision: int, stream_created: int = 1, operation: str = "DEL") -> Row:
    return ("k", None, stream_created, revision, operation)


OLD = put(5)

CASES: dict[str, tuple[list[Row], list[Row], Row]] = {
    # rows of the table, entries of the batch, the entry that counts
    "new_key": ([], [put(1)], put(1)),
    "newer_put": ([OLD], [put(6)], put(6)),
    "older_put": ([OLD], [put(4)], OLD),
    "same_put": ([OLD], [OLD, OLD], OLD),
    "newest_put_in_middle_of_batch": ([OLD], [put(7), put(1), put(8), put(6)], put(8)),
    "put_without_value": ([OLD], [("k", None, 1, 6, "PUT")], ("k", None, 1, 6, "PUT")),
    "put_of_empty_value": ([OLD], [("k", b"", 1, 6, "PUT")], ("k", b"", 1, 6, "PUT")),
    "re_created_bucket": ([OLD], [put(1, 2)], put(1, 2)),
    "delete_in_re_created_bucket": ([OLD], [delete(1, 2)], delete(1, 2)),
    "older_bucket": ([put(1, 2)], [OLD], put(1, 2)),
    "both_buckets_in_batch": ([], [put(9), put(1, 2), delete(9)], put(1, 2)),
    "newer_delete": ([OLD], [delete(6)], delete(6)),
    "newer_purge": ([OLD], [delete(6, operation="PURGE")], delete(6, operation="PURGE")),
    "older_delete": ([OLD], [delete(4), delete(3, operation="PURGE")], OLD),
    "delete_with_sequence_of_row": ([OLD], [delete(5)], delete(5)),
    "delete_of_missing_key": ([], [delete(6)], delete(6)),
    "put_then_delete_in_batch": ([OLD], [delete(7), put(6)], delete(7)),
    "delete_then_put_in_batch": ([OLD], [put(7), delete(6)], put(7)),
}


@pytest.mark.parametrize("deletes", ["remove", "mark"])
@pytest.mark.parametrize("case", CASES)
def test_entry_decides_by_sequence(case: str, deletes: Deletes) -> None:
    rows, batch, counts = CASES[case]
    table = table_of(deletes, *rows)
    merge(table, *batch)
    if counts[-1] == "PUT":
        assert content(table) == [counts]
    else:
        marked = (*counts[:-1], f"{counts[-1]}*")
        assert content(table) == ([] if deletes == "remove" else [marked])
    assert len(merge(table, *batch)) == 0


def test_marked_row_keeps_older_put_out() -> None:
    table = table_of("mark", ("k", None, 1, 5, "DEL*"))
    assert len(merge(table, ("k", b"old", 1, 4, "PUT"))) == 0
    assert len(merge(table, ("k", None, 1, 5, "DEL"))) == 0
    merge(table, ("k", b"new", 1, 6, "PUT"))
    assert content(table) == [("k", b"new", 1, 6, "PUT")]


def test_row_with_null_sequence_is_older() -> None:
    table = table_of("remove", OLD)
    table.rows[0]["revision"] = None
    merge(table, ("k", b"x", 1, 1, "PUT"))
    assert content(table) == [("k", b"x", 1, 1, "PUT")]


def test_repeated_batch_reads_order_only() -> None:
    rows: list[Row] = [(f"k{number}", b"x", 1, number, "PUT") for number in range(9)]
    for deletes in ("remove", "mark"):
        table = table_of(deletes, *rows)
        assert len(merge(table, *rows)) == 0
        assert table.columns_read == {"stream_created", "revision"}


def test_column_deleted_read_for_tied_deletes_only() -> None:
    table = table_of("mark", OLD, ("l", b"x", 1, 6, "PUT"))
    merge(table, ("k", b"new", 1, 7, "PUT"), ("l", None, 1, 8, "DEL"))
    assert table.columns_read == {"stream_created", "revision"}
    merge(table, ("l", None, 1, 8, "DEL"))
    assert "deleted" in table.columns_read


@pytest.mark.parametrize(
    ("name", "value"),
    [("key", None), ("revision", None), ("stream_created", None), ("operation", "put")],
)
def test_entry_without_order_or_operation_refused(name: str, value: Any) -> None:
    layout = Layout.of_entries(ENTRIES.names, "remove")
    rows = [entry(OLD), {**entry(OLD), name: value}, {**entry(OLD), "operation": None}]
    events = shape_of(layout).events(pa.Table.from_pylist(rows, ENTRIES), "fleet")
    with pytest.raises(
        ConfigurationError, match="2 entries have a null in one of bucket, key, stream_c"
    ):
        require_valid(events, layout)


@pytest.mark.parametrize("deletes", ["remove", "mark"])
@pytest.mark.parametrize(("read", "changed"), [(4, 0), (5, 1), (9, 0)])
def test_delete_of_missing_key_changes_row_that_was_read(
    deletes: Deletes, read: int, changed: int
) -> None:
    table = table_of(deletes, OLD, own=("note",))
    own = {"stream_created": 1, "revision": read}
    event = {
        "bucket": "fleet",
        "key": "k",
        "revision": 9,
        "created": 8,
        "operation": "PURGE",
        "stream_created": 1,
    }
    missing = difference_table([{**event, REPLACES: own, DELETE: True}])
    batch = differences_of(missing, "fleet", table.layout, table.schema)
    shape = batch.shape.fitted(table.schema, None)
    (rows,) = batch.parts(shape)
    changes = changes_of(shape.events(rows, "fleet"), table.layout, (), table, None)
    assert len(changes) == changed
    table.apply(changes)
    if changed and deletes == "mark":
        assert content(table) == [("k", None, 1, 9, "PURGE*")]
        assert [row["note"] for row in table.rows] == ["mine"]
    else:
        assert content(table) == ([] if changed else [OLD])


def test_removed_row_returns_with_replay_that_ends_before_marker() -> None:
    """The example in docs/delta.md: a removed row leaves no record of its revision."""
    first: Row = ("k", b"old", 1, 1, "PUT")
    marker: Row = ("k", None, 1, 3, "DEL")
    table = table_of("remove", first)
    for row, expected in ((marker, []), (first, [first]), (marker, [])):
        merge(table, row)
        assert content(table) == expected
