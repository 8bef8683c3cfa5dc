"""Random interleavings of events, or of entries, and faults, by each engine and by all in turn.

Each key has its own interleaving of inserts, updates with and without effect, deletes, late events,
repeats and replays from an earlier sequence; all keys share the merges. A merge crashes at one of
its commits and is repeated, or another writer merges at one of them; a query starts again, and
tables are compacted.
"""

from __future__ import annotations

import ast
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from nats_stream_source.delta import Engine, merge_changes
from tests.faults.delta.cdc.commits import Commits, crash
from tests.integration.delta.merge_model import ENGINES, SCHEMA, Entry
from tests.support.cdc import events as of_events
from tests.support.cdc.events import Event, history, latest, marked, random_event
from tests.support.delta import rows_of

pytestmark = pytest.mark.delta
KINDS: dict[str, dict[str, Any]] = {
    "entries": {},
    "entries-mark": {"deletes": "mark"},
    "scd1": of_events.RULES,
    "scd1-mark": {**of_events.RULES, "deletes": "mark"},
    "scd2": {**of_events.RULES, "stored_as_scd_type": 2},
    "scd2-track-a": {
        **of_events.RULES,
        "stored_as_scd_type": 2,
        "track_history_column_list": ["a"],
    },
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
Rows = list[tuple[Any, ...]]
ORACLES: dict[str, Callable[[list[Event]], Rows]] = {
    "entries": latest,
    "entries-mark": marked,
    "scd1": latest,
    "scd1-mark": marked,
    "scd2": history,
    "scd2-track-a": lambda events: history(events, "a"),
}


@EVERY_KIND
@pytest.mark.parametrize("vectors", [True, False])
def test_interleavings_give_rows_of_rules(
    spark: SparkSession, table: Path, monkeypatch: pytest.MonkeyPatch, kind: str, vectors: bool
) -> None:
    run = run_interleavings
    assert run(spark, table, monkeypatch, kind, ["driver"], keys=30, seed=1, vectors=vectors)


@pytest.mark.parametrize("kind", ["scd2", pytest.param("entries-mark", marks=pytest.mark.faults)])
def test_interleavings_of_engines_in_turn_give_rows_of_rules(
    spark: SparkSession, table: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    assert run_interleavings(spark, table, monkeypatch, kind, ENGINES, keys=30, seed=2, most=4)


@pytest.mark.faults
@EVERY_KIND
@pytest.mark.parametrize("engines", [["driver"], ["spark"], ENGINES])
def test_thousand_interleavings_give_rows_of_rules(
    spark: SparkSession,
    table: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    engines: list[Engine],
) -> None:
    assert run_interleavings(spark, table, monkeypatch, kind, engines, keys=1000, seed=3)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["scd1", "scd2"])
def test_interleavings_of_one_key_give_rows_of_rules(
    spark: SparkSession, table: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A merge changes only the state table more often than with many keys."""
    happened = sum(
        run_interleavings(
            spark, table / str(seed), monkeypatch, kind, ["driver"], keys=1, seed=seed
        )
        for seed in range(20)
    )
    assert happened > 20


def run_interleavings(
    spark: SparkSession,
    table: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    engines: Sequence[Engine],
    *,
    keys: int,
    seed: int,
    most: int = 20,
    vectors: bool = True,
) -> int:
    """Merge the batches of all keys; returns the number of crashes and of other writers' merges."""
    rng = random.Random(seed)
    of_key = [random_batches(rng, f"key {number:04}", kind) for number in range(keys)]
    turns = itertools.cycle(engines)
    mergers: dict[str, Any] = {}

    def merger_of(engine: Engine) -> Any:
        rules = {**KINDS[kind], "upkeep": None, "engine": engine}
        if engine == "driver" and not vectors:
            rules["deletion_vectors"] = False
        return merge_changes(str(table), **rules)

    def frame(events: Sequence[Event]) -> DataFrame:
        if kind.startswith("entries"):
            return spark.createDataFrame([entry_of(one).row() for one in events], SCHEMA)
        return spark.createDataFrame(list(events), of_events.SCHEMA)

    def merge(engine: Engine, events: Sequence[Event]) -> None:
        if engine not in mergers:
            mergers[engine] = merger_of(engine)
        mergers[engine](frame(events))

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
            if kind == "entries":  # a removed row has no sequence that keeps an older entry out
                events, others = (
                    [one for one in (*events, *others) if int(one.key[-1]) % 2 == part]
                    for part in range(2)
                )

        def other_writer(events: Sequence[Event] = others) -> None:
            merger_of("driver")(frame(events))

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


def entry_of(event: Event) -> Entry:
    if event.op == "D":
        return Entry(event.key, event.seq, "DEL", None)
    return Entry(event.key, event.seq, "PUT", repr((event.a, event.b)).encode())


def random_batches(rng: random.Random, key: str, kind: str) -> list[list[Event]]:
    """Return the batches of a key; entries are in order where deletes leave no record."""
    events = []
    for seq in rng.sample(range(1, 60), rng.randrange(1, 14)):
        events.append(random_event(rng, key, seq))
        if not kind.startswith("entries") and rng.random() < 0.1:  # with other values, or the same
            events.append(random_event(rng, key, seq))
    if kind == "entries":
        events.sort(key=lambda event: event.seq)
    elif rng.random() < 0.5:
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
    found = rows_of(DeltaTable(table))
    if kind.startswith("entries"):
        for row in found:
            row["seq"] = row["revision"]
            row["a"], row["b"] = ast.literal_eval((row["value"] or b"None, None").decode())
    bounds = ("__START_AT", "__END_AT") if "scd2" in kind else ()
    flags = ("deleted",) if "mark" in kind else ()
    columns = ("key", *bounds, "seq", "a", "b", *flags)
    rows = (tuple(row[name] for name in columns) for row in found)
    return sorted(rows, key=lambda row: row[:2])
