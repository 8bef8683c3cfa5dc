"""Crashes and other writers at each commit of a merge, by each engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from pyspark.sql import functions as F

from nats_stream_source.delta.rules.events import EventBatch, EventShape
from tests.faults.delta.cdc.commits import Commits, Crash
from tests.integration.delta.driver.in_process import CdcTable
from tests.integration.delta.merge_model import EventFrame, Merge, columns_of, spark_in_faults
from tests.support.cdc.events import RULES, Event, history, latest
from tests.support.delta import rows_of

pytestmark = pytest.mark.delta


BATCHES = [
    [Event("a", 1, "U", 1, "x"), Event("b", 2, "U", 1, "x"), Event("c", 9, "D", None, None)],
    [Event("a", 3, "U", 1, "x"), Event("b", 5, "D", None, None), Event("c", 4, "U", 1, "x")],
    [Event("a", 2, "D", None, None), Event("b", 4, "U", 2, "y"), Event("c", 11, "U", 1, "x")],
]


@pytest.mark.parametrize("scd_type", [1, 2])
@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("driver", {}),
        ("driver", {"deletion_vectors": False}),
        pytest.param("spark", {}, marks=pytest.mark.faults),
    ],
    indirect=["engine"],
)
def test_crash_at_each_commit_is_mended_by_repeated_batch(
    event_frame: EventFrame,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    merge: Merge,
    engine: str,
    options: dict[str, Any],
    scd_type: int,
) -> None:
    frames = [event_frame(batch) for batch in BATCHES]
    if engine == "driver":
        frames[0] = frames[0].withColumn("a", F.col("a").cast("int"))  # the next batch widens it
    else:
        frames[0] = frames[0].drop("b")  # the next batch adds it
    rules = {**RULES, **options, "stored_as_scd_type": scd_type}
    for point in itertools.count():
        table, commits = tmp_path / f"point{point}", Commits(monkeypatch, point)
        seen: list[Event] = []
        for batch, frame in zip(BATCHES, frames, strict=True):
            added = "b" in frame.columns
            seen += [event if added else event._replace(b=None) for event in batch]
            commits.run(lambda frame=frame, table=table: merge(frame, str(table), **rules))
            assert stored(table, scd_type) == expected(seen, scd_type), point
        if not commits.happened:
            break
    # Both tables are created, a column is widened or added, and each batch commits to the table
    # and to its state.
    assert point >= 2 * (2 + 1 + 3 + 2)


@pytest.mark.parametrize("scd_type", [1, 2])
def test_crash_after_each_part_of_batch_is_mended_by_repeated_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scd_type: int
) -> None:
    """A large batch is merged in parts, each with all events of its keys."""
    events = [event for batch in BATCHES for event in batch]
    for crash_after in (1, 2, None):
        table = CdcTable(tmp_path / f"after{crash_after}", scd_type)

        def parts(rows: pa.Table, end: int | None, _: EventShape) -> Iterator[pa.Table]:
            for number, key in enumerate("abc"):
                if number == end:
                    raise Crash
                yield rows.filter(pc.equal(rows["key"], key))

        def in_parts(shape: EventShape, rows: pa.Table, end: int | None) -> EventBatch:
            return EventBatch(shape, partial(parts, rows, end))

        with monkeypatch.context() as patch:
            patch.setattr(EventBatch, "in_memory", partial(in_parts, end=crash_after))
            if crash_after is None:
                assert table.merge(events).changed
            else:
                with pytest.raises(Crash):
                    table.merge(events)
                table.table.crash()
                assert table.rows() == expected(
                    [one for one in events if one.key in "abc"[:crash_after]], scd_type
                )
        table.merge(events)
        assert table.rows() == expected(events, scd_type)


def expected(events: list[Event], scd_type: int) -> list[tuple[Any, ...]]:
    rows = latest(events) if scd_type == 1 else history(events)
    return sorted(rows, key=lambda row: row[:2])


def stored(table: Path, scd_type: int) -> list[tuple[Any, ...]]:
    rows = rows_of(DeltaTable(table))
    if not rows:
        return []
    bounds = ("__START_AT", "__END_AT") if scd_type == 2 else ()
    if "b" in rows[0]:
        return columns_of(table, "key", *bounds, "seq", "a", "b")
    return [(*row, None) for row in columns_of(table, "key", *bounds, "seq", "a")]


CASES = {
    "delete of a key without a row": ([], Event("k", 3, "U", 1, "x"), Event("k", 5, "D", 2, "y")),
    "greater update": (
        [Event("k", 1, "U", 1, "x")],
        Event("k", 5, "U", 2, "y"),
        Event("k", 10, "U", 3, "z"),
    ),
    "delete before an update": (
        [Event("k", 1, "U", 1, "x")],
        Event("k", 5, "U", 2, "y"),
        Event("k", 3, "D", None, None),
    ),
    "delete with the sequence of an update": (
        [Event("k", 1, "U", 1, "x")],
        Event("k", 5, "U", 2, "y"),
        Event("k", 5, "D", None, None),
    ),
    "update without effect after a delete": (
        [Event("k", 1, "U", 1, "x")],
        Event("k", 3, "D", None, None),
        Event("k", 5, "U", 1, "x"),
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scd_type", [1, 2])
@spark_in_faults
def test_event_of_other_writer_between_read_and_commit_counts(
    merge_events: Merge, table: Path, monkeypatch: pytest.MonkeyPatch, scd_type: int, case: str
) -> None:
    before, event, others = CASES[case]
    rules = {"stored_as_scd_type": scd_type}
    begun = [Event("other", 1, "U", 1, "x"), *before]
    merge_events(begun, engine="driver", **rules)
    commits = Commits(monkeypatch, 0, lambda: merge_events([others], engine="driver", **rules))
    commits.run(lambda: merge_events([event], **rules))
    assert commits.happened
    events = [*begun, event, others]
    rows = latest(events) if scd_type == 1 else history(events)
    bounds = ("__START_AT", "__END_AT") if scd_type == 2 else ()
    stored = columns_of(table, "key", *bounds, "seq", "a", "b")
    assert sorted(stored, key=repr) == sorted(rows, key=repr)


@spark_in_faults
def test_event_without_row_commits_table_once(merge_events: Merge, table: Path) -> None:
    merge_events([Event("other", 1, "U", 1, "x")])
    before = DeltaTable(table).version()
    for _ in range(2):
        merge_events([Event("k", 5, "D", None, None)])
        assert DeltaTable(table).version() == before + 1
    assert columns_of(table, "key") == [("other",)]
