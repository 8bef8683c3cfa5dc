"""Crashes at each commit, and two writers at the same time: the rows are those of the rules."""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import functions as F  # noqa: N812

from nats_stream_source.delta import merge
from tests.faults.delta.cdc.commits import Commits
from tests.integration.delta.cdc.conftest import ENGINES, EventFrame, columns_of
from tests.support.cdc.events import RULES as EVENT_RULES
from tests.support.cdc.events import Event, history, latest
from tests.support.delta import rows_of

pytestmark = pytest.mark.delta
RULES = {**EVENT_RULES, "engine": "delta-rs"}
BATCHES = [
    [Event("a", 1, "U", 1, "x"), Event("b", 2, "U", 1, "x"), Event("c", 9, "D", None, None)],
    [Event("a", 3, "U", 1, "x"), Event("b", 5, "D", None, None), Event("c", 4, "U", 1, "x")],
    [Event("a", 2, "D", None, None), Event("b", 4, "U", 2, "y"), Event("c", 11, "U", 1, "x")],
]


@pytest.mark.parametrize("scd_type", [1, 2])
@pytest.mark.parametrize(
    "engine", ["merge-on-read", "copy-on-write", pytest.param("spark", marks=pytest.mark.faults)]
)
def test_crash_at_each_commit_is_mended_by_repeated_batch(
    event_frame: EventFrame,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    scd_type: int,
) -> None:
    frames = [event_frame(batch) for batch in BATCHES]
    frames[0] = frames[0].withColumn("a", F.col("a").cast("int"))  # the next batch widens it
    rules = {**RULES, **ENGINES[engine], "stored_as_scd_type": scd_type}
    for point in itertools.count():
        table, commits = str(tmp_path / f"point{point}"), Commits(monkeypatch, point)
        seen: list[Event] = []
        for batch, frame in zip(BATCHES, frames, strict=True):
            seen += batch
            commits.run(lambda frame=frame, table=table: merge(frame, table, **rules))
            assert stored(Path(table), scd_type) == expected(seen, scd_type), point
        if not commits.happened:
            break
    # Both tables are created, a column is widened, and each batch commits to the table and to its
    # state.
    assert point >= 2 * (2 + 1 + 3 + 2)


@pytest.mark.parametrize("scd_type", [1, 2])
def test_writers_at_same_time_merge_events_of_same_keys(
    event_frame: EventFrame, table: Path, scd_type: int
) -> None:
    rng = random.Random(scd_type)
    events = random_events(rng, 30)
    merge(event_frame([]), str(table), stored_as_scd_type=scd_type, **RULES)
    batches = [events[start::6] for start in range(6)]
    frames = [event_frame(batch) for batch in batches]
    errors: list[BaseException] = []

    def write(part: int) -> None:
        try:
            for frame in frames[part::2]:
                merge(frame, str(table), stored_as_scd_type=scd_type, **RULES)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(part,)) for part in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert stored(table, scd_type) == expected(events, scd_type)


def random_events(rng: random.Random, keys: int) -> list[Event]:
    events = [
        Event(
            f"key {key}",
            seq,
            "D" if rng.random() < 0.3 else "U",
            rng.choice([None, 1, 2]),
            rng.choice([None, "x"]),
        )
        for key in range(keys)
        for seq in rng.sample(range(1, 40), rng.randrange(1, 9))
    ]
    rng.shuffle(events)
    return events


def expected(events: list[Event], scd_type: int) -> list[tuple[Any, ...]]:
    rows = latest(events) if scd_type == 1 else history(events)
    return sorted(rows, key=lambda row: row[:2])


def stored(table: Path, scd_type: int) -> list[tuple[Any, ...]]:
    if not rows_of(DeltaTable(table)):
        return []
    bounds = ("__START_AT", "__END_AT") if scd_type == 2 else ()
    return columns_of(table, "key", *bounds, "seq", "a", "b")
