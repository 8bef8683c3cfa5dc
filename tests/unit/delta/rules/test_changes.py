"""Changes of SCD type 1 and 2: Spark's situations, and random batches against the rules."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from tests.support.cdc.events import SITUATIONS, Event, events_of, history, latest, random_event
from tests.unit.delta.rules.memory_tables import MemoryTables

UNIQUE = [name for name, situation in SITUATIONS.items() if not situation["ties"]]


@pytest.mark.parametrize("situation", UNIQUE)
@pytest.mark.parametrize(
    ("scd_type", "tracked", "column"),
    [(1, "ab", "scd1"), (2, "ab", "scd2_track_a_b"), (2, "a", "scd2_track_a")],
)
def test_situation_gives_rows_of_auto_cdc(
    situation: str, scd_type: int, tracked: str, column: str
) -> None:
    tables = MemoryTables(scd_type, tracked)
    for batch, after in zip(events_of(situation), SITUATIONS[situation]["after"], strict=True):
        tables.merge(batch)
        assert [list(row[1:]) for row in tables.rows()] == after[column]


ZERO: Any = 0.0
MINUS_ZERO: Any = -0.0


@pytest.mark.parametrize(
    ("scd_type", "batches", "rows"),
    [
        # The greatest values of one sequence count, whatever their order.
        (1, [[("k", 5, 1)], [("k", 5, 2)], [("k", 5, 0)]], [("k", 5, 2, "x")]),
        (2, [[("k", 5, 1)], [("k", 5, 2), ("k", 5, 0)]], [("k", 5, None, 5, 2, "x")]),
        # The version that the lesser values opened is joined with the one that ends there.
        (2, [[("k", 1, 2), ("k", 5, 1)], [("k", 5, 2)]], [("k", 1, None, 5, 2, "x")]),
        # 0.0 and -0.0 are one key, in one batch and in two.
        (1, [[(ZERO, 1, 1), (MINUS_ZERO, 2, 2)], [(ZERO, 3, 3)]], [(0.0, 3, 3, "x")]),
        (
            2,
            [[(ZERO, 1, 1), (MINUS_ZERO, 2, 2)], [(ZERO, 3, 3)]],
            [(0.0, 1, 2, 1, 1, "x"), (0.0, 2, 3, 2, 2, "x"), (0.0, 3, None, 3, 3, "x")],
        ),
    ],
)
def test_equal_sequences_and_equal_keys(
    scd_type: int, batches: list[list[tuple[Any, int, int]]], rows: list[tuple[Any, ...]]
) -> None:
    kind = pa.string() if isinstance(batches[0][0][0], str) else pa.float64()
    tables = MemoryTables(scd_type, key=kind)
    for batch in batches:
        tables.merge(Event(key, seq, "U", a, "x") for key, seq, a in batch)
    assert tables.rows() == rows


@pytest.mark.parametrize("situation", UNIQUE)
def test_oracle_gives_rows_of_auto_cdc(situation: str) -> None:
    # The oracle of the random batches, against what Spark gave.
    events: list[Event] = []
    for batch, after in zip(events_of(situation), SITUATIONS[situation]["after"], strict=True):
        events += batch
        assert [list(row[1:]) for row in latest(events)] == after["scd1"]
        for tracked in ("ab", "a"):
            rows = [list(row[1:]) for row in history(events, tracked)]
            assert rows == after["scd2_track_a_b" if tracked == "ab" else "scd2_track_a"]


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
        assert len(again) == len(again.state) == 0
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
