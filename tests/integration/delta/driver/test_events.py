"""Events of all layouts in the driver's process: the rows are those of the rule's definition."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from nats_stream_source.delta.upkeep import Upkeep
from nats_stream_source.errors import ConfigurationError
from tests.integration.delta.driver.in_process import KINDS, CdcTable, both_writers
from tests.support.cdc.events import (
    SITUATIONS,
    Event,
    events_of,
    history,
    latest,
    marked,
    random_event,
)


@both_writers
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("scd_type", "deletes"), [(1, "remove"), (1, "mark"), (2, "remove")])
def test_random_batches_give_rows_of_model(
    tmp_path: Path, scd_type: int, deletes: str, kind: str, vectors: bool
) -> None:
    """Late, repeated and contradicting events, restarts, compaction, and another writer."""
    choice = random.Random(f"{scd_type} {deletes} {kind} {vectors}")
    arguments = {"deletes": deletes, "vectors": vectors, "upkeep": Upkeep(compact_files=2)}
    table = CdcTable(tmp_path / "t", scd_type, kind, **arguments)
    model = marked if deletes == "mark" else latest if scd_type == 1 else history
    known: list[Event] = []
    for _ in range(14):
        batch = [
            random_event(choice, f"k{choice.randrange(4)}", choice.randrange(60))
            for _ in range(choice.randint(1, 6))
        ]
        known += batch
        writer = table
        if choice.random() < 0.2:
            writer = CdcTable(tmp_path / "t", scd_type, kind, deletes=deletes, vectors=vectors)
        elif choice.random() < 0.2:
            table.table.crash()
        writer.merge(batch)
        writer.table.engine.wait()
        assert table.rows() == model(known)
        if table.table.engine.table.snapshot is not None:
            table.verify_index()
        before = table.versions()
        assert not table.merge(choice.choices(known, k=3)).changed
        assert table.versions() == before


@pytest.mark.parametrize("situation", SITUATIONS)
def test_situation_of_auto_cdc_gives_its_rows(tmp_path: Path, situation: str) -> None:
    batches = events_of(situation)
    for scd_type, model in ((1, latest), (2, history)):
        table = CdcTable(tmp_path / f"scd{scd_type}", scd_type)
        for number, batch in enumerate(batches, start=1):
            table.merge(batch)
            merged = [event for one in batches[:number] for event in one]
            assert table.rows() == model(merged)


@pytest.mark.parametrize(
    ("gone", "error"),
    [("state", "does not exist beside a table with rows"), ("table", "belongs to another table")],
)
def test_table_or_state_without_other_one_is_refused(tmp_path: Path, gone: str, error: str) -> None:
    table = CdcTable(tmp_path / "t", 1)
    table.merge([Event("a", 1, "U", 1, None)])
    table.table.crash()
    shutil.rmtree(table.state_path if gone == "state" else table.path)
    with pytest.raises(ConfigurationError, match=error):
        table.merge([Event("a", 2, "U", 1, None)])
