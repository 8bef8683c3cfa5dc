"""``merge`` against the model: which entry of a key wins, markers, replays, empty batches."""

from __future__ import annotations

import dataclasses
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
    spark_in_faults,
)
from tests.integration.delta.table_content import stored, version

pytestmark = pytest.mark.delta
CASES: dict[str, list[list[Entry]]] = {
    "the newest entry of a batch wins, at any position": [
        [put("a", 3), put("a", 1), put("a", 2), put("b", 4)]
    ],
    "an older entry does not overwrite": [[put("a", 5)], [put("a", 4), delete("b", 3)]],
    "an older marker does not remove": [[put("a", 5)], [delete("a", 4), purge("a", 3)]],
    "DEL and PURGE": [[put("a", 1), put("b", 2), put("c", 3)], [delete("a", 4), purge("b", 5)]],
    "put and deleted within one batch": [[put("a", 1), delete("a", 2)]],
    "deleted and put again within one batch": [[put("a", 1)], [delete("a", 2), put("a", 3)]],
    "a newer PUT clears a mark": [[put("a", 1)], [delete("a", 2)], [put("a", 3)]],
    "a marker of a key without a row": [[put("a", 1)], [delete("b", 2)]],
    "the same entry twice in a batch": [[put("a", 1), put("a", 1)], [put("a", 1)] * 2],
    "replay from an earlier sequence": [
        [put("a", 1), put("b", 2)],
        [delete("a", 3)],
        [put("a", 1), put("b", 2), delete("a", 3)],
    ],
    "a re-created bucket": [
        [put("a", 8), put("b", 9)],
        [put("a", 1, RECREATED), delete("b", 2, RECREATED)],
    ],
    "late entries of the deleted bucket": [[put("a", 1, RECREATED)], [put("a", 9)]],
    "both buckets in one batch": [[put("a", 9), put("a", 1, RECREATED), delete("b", 9)]],
    "metaOnly": [[put("a", 1, value=None)], [put("a", 2, value=None), delete("a", 3)]],
    "an empty value is not null": [[put("a", 1, value=b"")]],
}


@both_modes
def test_rules(frame: Frame, table: Path, deletes: Deletes, merge: Merge) -> None:
    # A MERGE of any size takes about a second: all cases share a batch, each with its own keys.
    model = Model(deletes)
    for turn in range(max(map(len, CASES.values()))):
        batch = [
            dataclasses.replace(entry, key=f"{case}/{entry.key}")
            for case, batches in CASES.items()
            if turn < len(batches)
            for entry in batches[turn]
        ]
        merge(frame(*batch), str(table), deletes=deletes)
        model.merge(batch)
        assert stored(table) == model.stored()


@spark_in_faults
@both_modes
def test_empty_batches(frame: Frame, table: Path, deletes: Deletes, merge: Merge) -> None:
    for _ in range(2):
        merge(frame(), str(table), deletes=deletes)
        assert (version(table), stored(table)) == (0, [])
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
