"""Random interleavings of events and faults, by each engine and by all in turn.

Each key has its own interleaving of inserts, updates with and without effect, deletes, late events,
repeats and replays from an earlier sequence; all keys share the merges. A merge crashes at one of
its commits and is repeated, or another writer merges at one of them; a query starts again, and
tables are compacted.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from nats_stream_source.delta import merge_changes
from tests.faults.delta.cdc.commits import Commits, crash
from tests.integration.delta.cdc.conftest import ENGINES, EventFrame
from tests.support.cdc.events import RULES as EVENT_RULES
from tests.support.cdc.events import Event, history, latest, marked, random_event
from tests.support.delta import rows_of

pytestmark = pytest.mark.delta
RULES = {**EVENT_RULES, "upkeep": None}
KINDS: dict[str, dict[str, Any]] = {
    "scd1": {},
    "scd1-mark": {"deletes": "mark"},
    "scd2": {"stored_as_scd_type": 2},
    "scd2-track-a": {"stored_as_scd_type": 2, "track_history_column_list": ["a"]},
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
ORACLES: dict[str, Callable[[list[Event]], list[tuple[Any, ...]]]] = {
    "scd1": latest,
    "scd1-mark": marked,
    "scd2": history,
    "scd2-track-a": lambda events: history(events, "a"),
}


@EVERY_KIND
@pytest.mark.parametrize("engine", ["merge-on-read", "copy-on-write"])
def test_interleavings_give_rows_of_rules(
    event_frame: EventFrame,
    table: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    engine: str,
) -> None:
    assert run_interleavings(event_frame, table, monkeypatch, kind, [engine], keys=30, seed=1)


@pytest.mark.parametrize("kind", ["scd1", "scd2"])
def test_interleavings_of_engines_in_turn_give_rows_of_rules(
    event_frame: EventFrame, table: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    assert run_interleavings(
        event_frame, table, monkeypatch, kind, list(ENGINES), keys=30, seed=2, most=4
    )


@pytest.mark.faults
@EVERY_KIND
@pytest.mark.parametrize("engines", [*([name] for name in ENGINES), list(ENGINES)])
def test_thousand_interleavings_give_rows_of_rules(
    event_frame: EventFrame,
    table: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    engines: list[str],
) -> None:
    assert run_interleavings(event_frame, table, monkeypatch, kind, engines, keys=1000, seed=3)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["scd1", "scd2"])
def test_interleavings_of_one_key_give_rows_of_rules(
    event_frame: EventFrame, table: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A merge changes only the state table more often than with many keys."""
    engines = ["merge-on-read", "copy-on-write"]
    happened = sum(
        run_interleavings(
            event_frame, table / str(seed), monkeypatch, kind, engines, keys=1, seed=seed
        )
        for seed in range(20)
    )
    assert happened > 20


def run_interleavings(
    event_frame: EventFrame,
    table: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    engines: Sequence[str],
    *,
    keys: int,
    seed: int,
    most: int = 20,
) -> int:
    """Merge the batches of all keys; returns the number of crashes and of other writers' merges.

    Args:
        most: the greatest number of merges.
    """
    rng = random.Random(seed)
    of_key = [random_batches(rng, f"key {number:04}") for number in range(keys)]
    turns = itertools.cycle(engines)
    mergers: dict[str, Any] = {}

    def merge(engine: str, events: Sequence[Event]) -> None:
        if engine not in mergers:
            rules = {**RULES, **KINDS[kind], **ENGINES[engine]}
            mergers[engine] = merge_changes(str(table), **rules)
        mergers[engine](event_frame(events))

    seen: list[Event] = []
    happened = 0
    for turn in range(min(most, max(map(len, of_key)))):
        parts = [batches[turn] for batches in of_key if turn < len(batches)]
        events = [event for part in parts for event in part]
        rng.shuffle(events)
        engine, point = next(turns), rng.randrange(6)
        others: list[Event] = []
        if rng.random() < 0.5:  # another writer has events of the same keys
            events, others = events[::2], events[1::2]

        def other_writer(events: Sequence[Event] = others) -> None:
            options = ENGINES[rng.choice(["merge-on-read", "copy-on-write"])]
            merger = merge_changes(str(table), **{**RULES, **KINDS[kind], **options})
            merger(event_frame(events))

        happens = other_writer if others else crash
        commits = Commits(monkeypatch, point, happens)
        commits.run(lambda engine=engine, events=events: merge(engine, events))
        if others and not commits.happened:
            other_writer()
        happened += commits.happened
        seen += [*events, *others]
        rows = ORACLES[kind](seen)
        assert stored(table, kind) == sorted(rows, key=lambda row: row[:2]), (turn, engine)
        if rng.random() < 0.3:
            mergers.clear()  # a query that starts again
        if rng.random() < 0.2:
            DeltaTable(table).optimize.compact()
    before = DeltaTable(table).version()
    merge(engines[0], seen)
    assert DeltaTable(table).version() == before
    return happened


def random_batches(rng: random.Random, key: str) -> list[list[Event]]:
    """Return the batches of a key."""
    events = []
    for seq in rng.sample(range(1, 60), rng.randrange(1, 14)):
        events.append(random_event(rng, key, seq))
        if rng.random() < 0.1:  # with other values, or the same
            events.append(random_event(rng, key, seq))
    if rng.random() < 0.5:
        rng.shuffle(events)
    else:  # in order but for some that are late
        events.sort(key=lambda event: event.seq + (rng.random() < 0.2) * 10)
    batches: list[list[Event]] = []
    while events:
        size = rng.randrange(1, 5)
        batch, events = events[:size], events[size:]
        batches.append([*batch, *rng.sample(batch, rng.randrange(len(batch)))])
        if rng.random() < 0.3:
            since = rng.randrange(60)
            earlier = [event for batch in batches for event in batch if event.seq >= since]
            batches.append(earlier)
    return batches


def stored(table: Path, kind: str) -> list[tuple[Any, ...]]:
    bounds = ("__START_AT", "__END_AT") if "scd2" in kind else ()
    flags = ("deleted",) if "mark" in kind else ()
    columns = ("key", *bounds, "seq", "a", "b", *flags)
    rows = (tuple(row[name] for name in columns) for row in rows_of(DeltaTable(table)))
    return sorted(rows, key=lambda row: row[:2])
