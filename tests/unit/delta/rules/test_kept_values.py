"""Events without some values: the row keeps those of the last event before that has them."""

from __future__ import annotations

import logging
import random
from typing import Any

import pyarrow as pa
import pytest

from nats_stream_source.delta.rules.changes import changes_of
from nats_stream_source.delta.rules.latest import with_kept_values
from nats_stream_source.delta.rules.layout import DELETE, SEQUENCE, UNAVAILABLE
from nats_stream_source.delta.rules.rows import DecidingEvents
from tests.unit.delta.rules.memory_tables import MemoryTable, MemoryTables

EMPTY = pa.schema([])
SCHEMA = MemoryTables(1).events.append(pa.field(UNAVAILABLE, pa.list_(pa.string())))


def event(
    key: str, seq: int, a: int | None = None, b: str | None = None, *lacks: str, op: str = "U"
) -> dict[str, Any]:
    return {
        "key": key,
        "seq": seq,
        "a": a,
        "b": b,
        SEQUENCE: seq,
        DELETE: op == "D",
        UNAVAILABLE: list(lacks),
    }


def delete(key: str, seq: int) -> dict[str, Any]:
    return event(key, seq, op="D")


class KeptTables(MemoryTables):
    """A table of SCD type 1 that keeps values."""

    def __init__(self) -> None:
        super().__init__(1)

    def merge_kept(self, *events: dict[str, Any], crash: bool = False) -> None:
        # As executors reduce them, in two partitions.
        parts = []
        for part in (events[::2], events[1::2]):
            newest = DecidingEvents(SCHEMA, self.layout)
            newest.add(pa.RecordBatch.from_pylist(list(part), SCHEMA))
            parts.append(newest.table())
        changes = changes_of(
            pa.concat_tables(parts),
            self.layout,
            self.tracked,
            self.table,
            self.state,
        )
        self.apply(changes, crash=crash)


_Batches = list[list[dict[str, Any]]]
CASES: dict[str, tuple[_Batches, tuple[Any, ...]]] = {
    # batches of events of the key x, its row
    "of_row": ([[event("x", 1, 1, "old")], [event("x", 2, 2, None, "b")]], (2, 2, "old")),
    "of_earlier_event": (
        [
            [event("x", 1, 1, "old")],
            [
                event("x", 4, 4, None, "b"),
                event("x", 3, None, None, "a", "b"),
                event("x", 2, 2, "long"),
            ],
        ],
        (4, 4, "long"),
    ),
    "null_of_earlier_event": (
        [[event("x", 1, 1, "old")], [event("x", 2, 2, None), event("x", 3, 3, None, "b")]],
        (3, 3, None),
    ),
    "row_is_newer": (
        [[event("x", 5, 5, "new")], [event("x", 3, 3, "old"), event("x", 4, 4, None, "b")]],
        (5, 5, "new"),
    ),
    "name_of_no_column": ([[event("x", 1, 1, "b1", "not selected", DELETE)]], (1, 1, "b1")),
}


@pytest.mark.parametrize("case", CASES)
def test_value_that_event_lacks_is_kept(case: str) -> None:
    tables = KeptTables()
    batches, row = CASES[case]
    tables.merge_kept(event("y", 1, 7, "other"))
    for batch in batches:
        tables.merge_kept(*batch)
    assert tables.rows() == [("x", *row), ("y", 1, 7, "other")]


@pytest.mark.parametrize("split", [False, True])
def test_value_from_before_delete_not_kept(split: bool, caplog: pytest.LogCaptureFixture) -> None:
    events = [event("x", 1, 1, "old"), delete("x", 2), event("x", 3, 3, None, "b")]
    tables = KeptTables()
    with caplog.at_level(logging.WARNING):
        for batch in [[one] for one in events] if split else [events]:
            tables.merge_kept(*batch)
    assert tables.rows() == [("x", 3, 3, None)]
    warned = [record for record in caplog.records if "null instead" in record.message]
    # A delete in the batch is known to be the reason.
    assert bool(warned) == split


@pytest.mark.parametrize("lists", [[None, None], [[], None]])
def test_events_with_all_values_unchanged(lists: list[Any]) -> None:
    rows = [event("x", 1, 1, "b"), event("y", 1, 2, None)]
    events = pa.Table.from_pylist(
        [{**row, UNAVAILABLE: names} for row, names in zip(rows, lists, strict=True)], SCHEMA
    )

    tables = KeptTables()
    reader = MemoryTable(EMPTY, tables.layout)  # it has no column to read
    assert with_kept_values(events, tables.layout, reader) == events.drop_columns([UNAVAILABLE])


def test_nested_value_kept_with_type_of_table() -> None:
    kind = pa.list_(pa.struct([("n", pa.int32())]))
    table = pa.schema(
        [("key", pa.string()), (SEQUENCE, pa.int64()), ("v", kind), ("n", pa.int64())]
    )
    batch = pa.schema(
        [
            ("key", pa.string()),
            ("v", kind),
            ("n", pa.int32()),
            (SEQUENCE, pa.int64()),
            (DELETE, pa.bool_()),
            (UNAVAILABLE, pa.list_(pa.string())),
        ]
    )
    row = {"key": "x", SEQUENCE: 1, "v": [{"n": 1}, {"n": None}], "n": 2**40}
    events = [{"key": "x", SEQUENCE: 2, DELETE: False, UNAVAILABLE: ["v", "n"]}]

    layout = KeptTables().layout
    reader = MemoryTable(table, layout)
    reader.slots.append(row)
    kept = with_kept_values(pa.Table.from_pylist(events, batch), layout, reader)

    assert kept.select(["v", "n"]).to_pylist() == [{"v": [{"n": 1}, {"n": None}], "n": 2**40}]


def test_random_batches_with_crashes_and_repeats_give_rows_of_all_events() -> None:
    for seed in range(150):
        rng = random.Random(seed)
        events, rows = random_history(rng)
        tables = KeptTables()
        done = 0
        while done < len(events):
            start = max(0, done - rng.choice([0, 0, 1, 5]))  # events are repeated after a crash
            end = min(len(events), done + rng.randint(1, 6))
            batch = rng.sample(events[start:end], end - start)
            tables.merge_kept(*batch, crash=rng.random() < 0.2)
            tables.merge_kept(*batch)
            done = end
        assert tables.rows() == rows, seed


def random_history(rng: random.Random) -> tuple[list[dict[str, Any]], list[tuple[Any, ...]]]:
    """Events of a database in its order, and its rows in the end."""
    database: dict[str, tuple[int, int | None, str | None]] = {}
    events = []
    for seq in range(rng.randint(1, 30)):
        key = rng.choice("xyz")
        if key in database and rng.random() < 0.25:
            events.append(delete(key, seq))
            del database[key]
            continue
        a, b = rng.choice([None, *range(9)]), rng.choice([None, *"stuvw"])
        lacks = [name for name in "ab" if key in database and rng.random() < 0.5]
        _, old_a, old_b = database.get(key, (0, None, None))
        database[key] = (seq, old_a if "a" in lacks else a, old_b if "b" in lacks else b)
        events.append(
            event(key, seq, None if "a" in lacks else a, None if "b" in lacks else b, *lacks)
        )
    return events, sorted((key, *row) for key, row in database.items())
