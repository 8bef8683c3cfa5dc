"""Another writer that merges an event of the same key between a merge's read and its commit."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.faults.delta.cdc.commits import Commits
from tests.integration.delta.merge_model import Merge, spark_in_faults
from tests.integration.delta.table_content import columns_of
from tests.support.cdc.events import Event, history, latest

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
@spark_in_faults
def test_event_of_other_writer_between_read_and_commit_counts(
    merge_events: Merge,
    table: Path,
    monkeypatch: pytest.MonkeyPatch,
    scd_type: int,
    case: str,
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
