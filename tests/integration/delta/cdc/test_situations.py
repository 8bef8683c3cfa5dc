"""The situations that AUTO CDC of Spark ran, merged by each engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.delta.merge_model import Merge
from tests.integration.delta.table_content import columns_of
from tests.support.cdc.events import SITUATIONS, events_of

pytestmark = pytest.mark.delta
UNIQUE = [name for name, situation in SITUATIONS.items() if not situation["ties"]]
HISTORY: dict[str, Any] = {"stored_as_scd_type": 2}


@pytest.mark.parametrize(
    ("engine", "column", "arguments"),
    [
        ("driver", "scd1", {}),
        ("driver", "scd1", {"deletion_vectors": False}),
        ("driver", "scd2_track_a_b", HISTORY),
        ("driver", "scd2_track_a", {**HISTORY, "track_history_column_list": ["a"]}),
        ("spark", "scd1", {}),
        ("spark", "scd2_track_a_b", HISTORY),
        pytest.param("alternating", "scd2_track_a_b", HISTORY, marks=pytest.mark.faults),
    ],
    indirect=["engine"],
)
def test_situations_give_rows_of_auto_cdc(
    table: Path, merge_events: Merge, column: str, arguments: dict[str, Any]
) -> None:
    # A merge by Spark takes seconds: all situations share a batch, each with its own key.
    bounds = ("__START_AT", "__END_AT") if column != "scd1" else ()
    for turn in range(max(len(SITUATIONS[name]["batches"]) for name in UNIQUE)):
        batch, expected = [], []
        for name in UNIQUE:
            batches = events_of(name)
            batch += batches[turn] if turn < len(batches) else []
            after = SITUATIONS[name]["after"][min(turn, len(batches) - 1)]
            expected += [(name, *row) for row in after[column]]
        merge_events(batch, **arguments)
        rows = columns_of(table, "key", *bounds, "seq", "a", "b")
        assert rows == sorted(expected, key=lambda row: row[:2])
