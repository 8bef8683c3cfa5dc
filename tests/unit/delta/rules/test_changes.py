"""Newest entries, changes of SCD type 1 and 2, and values that events lack, by the rules."""

from __future__ import annotations

import logging
import random
from datetime import datetime, timezone
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from nats_stream_source.delta.rules import rows as module
from nats_stream_source.delta.rules.latest import with_kept_values
from nats_stream_source.delta.rules.layout import (
    DELETE,
    ORDER_COLUMNS,
    SEQUENCE,
    UNAVAILABLE,
    Layout,
)
from nats_stream_source.delta.rules.rows import DecidingEvents, newest_per_key
from tests.support.cdc.events import SITUATIONS, Event, events_of, history, latest, random_event
from tests.support.delta import ENTRIES
from tests.unit.delta.rules.memory_tables import MemoryTable, MemoryTables, row_of

KEYS = ["bucket", "key"]
LAYOUT = Layout.of_entries(ENTRIES.names, "remove")
CREATED, RECREATED = (datetime(2026, 1, day, tzinfo=timezone.utc) for day in (1, 2))

entry = st.fixed_dictionaries(
    {
        "bucket": st.sampled_from(["fleet", "yard", None]),
        "key": st.sampled_from(["a", "b", "c", "", None]),
        "value": st.binary(max_size=3),
        "revision": st.one_of(st.integers(1, 6), st.none()),
        "created": st.none(),
        "operation": st.sampled_from(["PUT", "DEL", "PURGE", "put", None]),
        "stream_created": st.sampled_from([CREATED, RECREATED, None]),
    }
)


def newest_orders(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The reference: the greatest order of each key, nulls as the greatest, and all with a null."""
    newest: dict[Any, tuple[Any, ...]] = {}
    for of in orders_of(rows):
        newest[of[:2]] = max(
            newest.get(of[:2], of), of, key=lambda of: [(part is None, part) for part in of[2:]]
        )
    valid = [of for of in newest.values() if None not in of]
    return sorted([*valid, *(of for of in orders_of(rows) if None in of)], key=repr)


def orders_of(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Key and order of each row, sorted."""
    columns = (*KEYS, "stream_created", "revision")
    return sorted((tuple(row[name] for name in columns) for row in rows), key=repr)


@given(st.lists(st.lists(entry, max_size=8), max_size=6))
def test_newest_row_of_each_key_in_batches_that_are_reduced(
    batches: list[list[dict[str, Any]]],
) -> None:
    everything = [row for rows in batches for row in rows]
    collected = DecidingEvents(ENTRIES, LAYOUT)
    collected._next_rows = 4  # reduced several times
    for rows in batches:
        collected.add(pa.RecordBatch.from_pylist(rows, ENTRIES))
    found = collected.table().to_pylist()
    assert orders_of(found) == newest_orders(everything)
    assert all(row in everything for row in found)  # whole rows, not columns of different rows


def test_keys_of_zero_with_either_sign_are_one() -> None:
    keys = pa.array([0.0, -0.0, float("nan"), float("nan")])
    rows = pa.table({"key": keys, "stream_created": [1] * 4, "revision": [1, 2, 1, 2]})
    assert newest_per_key(rows, ["key"], ORDER_COLUMNS)["revision"].to_pylist() == [2, 2]


def test_large_values_are_reduced_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, 65,536 values of 1 MiB would be in memory before the first reduction."""
    monkeypatch.setattr(module, "_FIRST_BYTES", 100_000)
    collected = DecidingEvents(ENTRIES, LAYOUT)
    row = {"bucket": "fleet", "value": b"x" * 10_000, "revision": 1, "stream_created": 1}
    for _ in range(50):
        rows = [{**row, "key": key} for key in "ab"]
        collected.add(pa.RecordBatch.from_pylist(rows, ENTRIES))
    assert sum(batch.nbytes for batch in collected._batches) < 250_000


@pytest.mark.parametrize("situation", [one for one in SITUATIONS if not SITUATIONS[one]["ties"]])
@pytest.mark.parametrize(
    ("scd_type", "tracked", "column"),
    [(1, "ab", "scd1"), (2, "ab", "scd2_track_a_b"), (2, "a", "scd2_track_a")],
)
def test_situation_gives_rows_of_auto_cdc_and_of_oracle(
    situation: str, scd_type: int, tracked: str, column: str
) -> None:
    tables, seen = MemoryTables(scd_type, tracked), list[Event]()
    for batch, after in zip(events_of(situation), SITUATIONS[situation]["after"], strict=True):
        tables.merge(batch)
        seen += batch
        oracle = latest(seen) if scd_type == 1 else history(seen, tracked)
        for rows in (tables.rows(), oracle):
            assert [list(row[1:]) for row in rows] == after[column]


@pytest.mark.parametrize(
    ("scd_type", "rows"),
    [
        (1, [(0.0, 3, 3, "x")]),
        (2, [(0.0, 1, 2, 1, 1, "x"), (0.0, 2, 3, 2, 2, "x"), (0.0, 3, None, 3, 3, "x")]),
    ],
)
def test_events_with_keys_of_zero_with_either_sign(
    scd_type: int, rows: list[tuple[Any, ...]]
) -> None:
    tables, keys = MemoryTables(scd_type, key=pa.float64()), list[Any]([0.0, -0.0])
    for batch in ([(keys[0], 1), (keys[1], 2)], [(keys[0], 3)]):
        tables.merge(Event(key, number, "U", number, "x") for key, number in batch)
    assert tables.rows() == rows


@pytest.mark.parametrize(("ties", "count"), [(False, 250), (True, 100)])
@pytest.mark.parametrize(("scd_type", "tracked"), [(1, "ab"), (2, "ab"), (2, "a")])
def test_random_batches_give_rows_of_rules(
    scd_type: int, tracked: str, ties: bool, count: int
) -> None:
    # Keys are independent: each has its own interleaving, and all share the merges.
    rng = random.Random(20261125)
    of_key = [random_batches(rng, f"key {number:03}", ties=ties) for number in range(count)]
    tables, contradictions = MemoryTables(scd_type, tracked), 0
    seen: list[Event] = []
    for turn in range(max(map(len, of_key))):
        parts = [batches[turn] for batches in of_key if turn < len(batches)]
        events = [event for part in parts for event in part]
        rng.shuffle(events)
        seen += events
        crash = rng.random() < 0.5
        if crash:
            # A crash between the commits of the state and of the rows; the batch is repeated.
            tables.merge(events, crash=True)
        contradictions += tables.merge(events).contradictions
        rows = latest(seen) if scd_type == 1 else history(seen, tracked)
        assert tables.rows() == sorted(rows, key=lambda row: row[:2])
        again = tables.merge(events)
        assert not again
        assert not again.state
    assert bool(contradictions) == ties


def random_batches(rng: random.Random, key: str, *, ties: bool) -> list[list[Event]]:
    """Return a key's events in batches: late, repeated, without effect, and deletes."""
    events = []
    for seq in rng.sample(range(1, 40), rng.randrange(1, 12)):
        events.append(random_event(rng, key, seq))
        if ties and rng.random() < 0.2:
            events.append(random_event(rng, key, seq))
    rng.shuffle(events)
    batches: list[list[Event]] = []
    while events:
        size = rng.randrange(1, 5)
        batch, events = events[:size], events[size:]
        batches.append([*batch, *rng.sample(batch, rng.randrange(len(batch)))])
        if rng.random() < 0.3:
            batches.append(rng.choice(batches))
    return batches


def event(
    key: str, seq: int, a: int | None = None, b: str | None = None, *lacks: str
) -> dict[str, Any]:
    return row_of(Event(key, seq, "U", a, b), *lacks)


def delete(key: str, seq: int) -> dict[str, Any]:
    return row_of(Event(key, seq, "D", None, None))


def test_name_of_no_column_that_event_lacks_is_ignored() -> None:
    tables = MemoryTables(1, unavailable=True)
    tables.merge([event("x", 1, 1, "b1", "not selected", DELETE)])
    assert tables.rows() == [("x", 1, 1, "b1")]


@pytest.mark.parametrize("split", [False, True])
def test_value_from_before_delete_not_kept(split: bool, caplog: pytest.LogCaptureFixture) -> None:
    events = [event("x", 1, 1, "old"), delete("x", 2), event("x", 3, 3, None, "b")]
    tables = MemoryTables(1, unavailable=True)
    with caplog.at_level(logging.WARNING):
        for batch in [[one] for one in events] if split else [events]:
            tables.merge(batch)
    assert tables.rows() == [("x", 3, 3, None)]
    warned = [record for record in caplog.records if "null instead" in record.message]
    # A delete in the batch is known to be the reason.
    assert bool(warned) == split


def test_value_of_another_key_or_from_before_delete_that_lacks_it_not_kept() -> None:
    tables = MemoryTables(1, unavailable=True)
    deleted = row_of(Event("y", 2, "D", None, None), "b")
    tables.merge([event("x", 1, 1, "of x"), event("z", 2, 2, None, "b")])
    tables.merge([event("y", 1, 1, "old"), deleted, event("y", 3, 3, None, "b")])
    assert tables.rows() == [("x", 1, 1, "of x"), ("y", 3, 3, None), ("z", 2, 2, None)]


@pytest.mark.parametrize("lists", [[None, None], [[], None]])
def test_events_with_all_values_unchanged(lists: list[Any]) -> None:
    rows = [event("x", 1, 1, "b"), event("y", 1, 2, None)]
    rows = [{**row, UNAVAILABLE: names} for row, names in zip(rows, lists, strict=True)]
    tables = MemoryTables(1, unavailable=True)
    events = pa.Table.from_pylist(rows, tables.events)
    reader = MemoryTable(pa.schema([]), tables.layout)  # it has no column to read
    assert with_kept_values(events, tables.layout, reader) == events.drop_columns([UNAVAILABLE])


def test_nested_value_kept_with_type_of_table() -> None:
    kind = pa.list_(pa.struct([("n", pa.int32())]))
    common = [("key", pa.string()), (SEQUENCE, pa.int64()), ("v", kind)]
    table = pa.schema([*common, ("n", pa.int64())])
    own = [("n", pa.int32()), (DELETE, pa.bool_()), (UNAVAILABLE, pa.list_(pa.string()))]
    batch = pa.schema([*common, *own])
    row = {"key": "x", SEQUENCE: 1, "v": [{"n": 1}, {"n": None}], "n": 2**40}
    events = [{"key": "x", SEQUENCE: 2, DELETE: False, UNAVAILABLE: ["v", "n"]}]

    layout = MemoryTables(1).layout
    reader = MemoryTable(table, layout)
    reader.slots.append(row)
    kept = with_kept_values(pa.Table.from_pylist(events, batch), layout, reader)

    assert kept.select(["v", "n"]).to_pylist() == [{"v": [{"n": 1}, {"n": None}], "n": 2**40}]


def test_random_batches_with_crashes_and_repeats_give_rows_of_all_events() -> None:
    for seed in range(150):
        rng = random.Random(seed)
        events, rows = random_history(rng)
        tables = MemoryTables(1, unavailable=True)
        done = 0
        while done < len(events):
            start = max(0, done - rng.choice([0, 0, 1, 5]))  # events are repeated after a crash
            end = min(len(events), done + rng.randint(1, 6))
            batch = rng.sample(events[start:end], end - start)
            tables.merge(batch, crash=rng.random() < 0.2)
            tables.merge(batch)
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
