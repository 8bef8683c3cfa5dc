"""Another writer that merges an event of the same key between a merge's read and its commit."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from nats_stream_source.delta import merge
from tests.faults.delta.cdc.commits import Commits
from tests.integration.delta.cdc.conftest import ENGINES, EventFrame, spark_in_faults
from tests.support.cdc.events import RULES, Event, history, latest
from tests.support.delta import rows_of

pytestmark = pytest.mark.delta

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
@pytest.mark.parametrize("other", ["merge-on-read", "copy-on-write"])
@spark_in_faults
def test_event_of_other_writer_between_read_and_commit_counts(
    event_frame: EventFrame,
    table: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    other: str,
    scd_type: int,
    case: str,
) -> None:
    before, event, others = CASES[case]
    rules = {**RULES, "stored_as_scd_type": scd_type}
    begun = [Event("other", 1, "U", 1, "x"), *before]
    merge(event_frame(begun), str(table), **rules)

    def other_writer() -> None:
        merge(event_frame([others]), str(table), **rules, **ENGINES[other])

    commits = Commits(monkeypatch, 0, other_writer)
    commits.run(lambda: merge(event_frame([event]), str(table), **rules, **ENGINES[engine]))
    assert commits.happened
    events = [*begun, event, others]
    rows = latest(events) if scd_type == 1 else history(events)
    bounds = ("__START_AT", "__END_AT") if scd_type == 2 else ()
    columns = ("key", *bounds, "seq", "a", "b")
    stored = (tuple(row[name] for name in columns) for row in rows_of(DeltaTable(table)))
    assert sorted(stored, key=repr) == sorted(rows, key=repr)


@spark_in_faults
def test_event_without_row_commits_table_once(
    event_frame: EventFrame, table: Path, engine: str
) -> None:
    rules = {**RULES, **ENGINES[engine]}
    merge(event_frame([Event("other", 1, "U", 1, "x")]), str(table), **rules)
    before = DeltaTable(table).version()
    for _ in range(2):
        merge(event_frame([Event("k", 5, "D", None, None)]), str(table), **rules)
        assert DeltaTable(table).version() == before + 1
    assert len(rows_of(DeltaTable(table))) == 1
