"""``merge`` against the model: which entry of a key wins, markers, replays, empty batches."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from nats_stream_source.delta import Deletes
from tests.integration.delta.merge_model import (
    RECREATED,
    Entry,
    Frame,
    Merge,
    Model,
    both_modes,
    delete,
    purge,
    put,
)
from tests.integration.delta.table_content import stored, version

pytestmark = pytest.mark.delta
BATCHES: list[list[Entry]] = [
    [],
    [put("a", 3), put("a", 1), put("b", 2), put("c", 4), delete("d", 5), put("e", 6, value=b"")],
    [delete("a", 2), purge("b", 7), put("c", 8, value=None), put("d", 4), put("e", 6)],
    [put("b", 9), put("c", 7), put("a", 1, RECREATED)],
]


@both_modes
def test_entries_of_batches_are_merged(
    frame: Frame, table: Path, deletes: Deletes, merge: Merge
) -> None:
    """One way through each engine; tests/unit/delta/rules/test_entries.py has the cases."""
    model = Model(deletes)
    for number, batch in enumerate(BATCHES):
        for _ in range(2):  # a repeated batch makes no version
            merge(frame(*batch), str(table), deletes=deletes)
        model.merge(batch)
        assert stored(table) == model.stored()
        assert version(table) == number
    names = DeltaTable(table).schema().to_arrow().names
    assert set(names) == set(put("a", 1).stored(deletes))


def test_model_follows_rules() -> None:
    # Expected rows written by hand, so that the model does not repeat an error of the code.
    removed, marked = Model("remove"), Model("mark")
    for model in (removed, marked):
        model.merge([put("a", 1), put("a", 3), put("b", 2)])
        model.merge([delete("a", 4), put("b", 1), delete("c", 5)])
    assert list(removed.rows.values()) == [put("b", 2)]
    assert list(marked.rows.values()) == [delete("a", 4), put("b", 2), delete("c", 5)]
