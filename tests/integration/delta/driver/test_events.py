"""Events of all layouts in the driver's process: the rows are those of the rule's definition."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from nats_stream_source.delta.driver.log import DeltaLog
from nats_stream_source.delta.upkeep import Upkeep
from nats_stream_source.errors import ConfigurationError
from tests.integration.delta.driver.cdc_tables import KINDS, CdcTable
from tests.support.cdc.events import (
    SITUATIONS,
    Event,
    events_of,
    history,
    latest,
    marked,
    random_event,
)

both_writers = pytest.mark.parametrize("vectors", [True, False])


@both_writers
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("scd_type", "deletes"), [(1, "remove"), (1, "mark"), (2, "remove")])
@pytest.mark.parametrize("seed", range(2))
def test_random_batches_give_rows_of_model(
    tmp_path: Path, scd_type: int, deletes: str, kind: str, vectors: bool, seed: int
) -> None:
    """Late, repeated and contradicting events, restarts, compaction, and another writer."""
    choice = random.Random(seed)
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
            writer = CdcTable(tmp_path / "t", scd_type, kind, deletes=deletes)
        elif choice.random() < 0.2:
            table.table.crash()
        writer.merge(batch)
        writer.table.opened.wait()
        assert table.rows() == model(known)
        if table.table.opened.snapshot is not None:
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


def test_delete_without_row_makes_commit_of_table_without_changes(tmp_path: Path) -> None:
    """A writer that has read the state before compares the versions of the table only."""
    table = CdcTable(tmp_path / "t", 1)
    table.merge([Event("a", 1, "U", 1, None)])
    table.merge([Event("b", 5, "D", None, None)])
    assert table.versions() == [2, 1]
    assert not table.merge([Event("b", 4, "U", 1, None)]).changed
    assert table.versions() == [2, 1]


@pytest.mark.parametrize("scd_type", [1, 2])
def test_crash_between_state_and_table_is_repaired_by_repeat(
    tmp_path: Path, scd_type: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = CdcTable(tmp_path / "t", scd_type)
    first = [Event("a", 1, "U", 1, None), Event("a", 5, "U", 1, None)]
    table.merge(first)
    second = [Event("a", 7, "D", None, None), Event("a", 3, "U", 1, "x")]
    real = DeltaLog.put

    class CrashError(BaseException):
        pass

    def put_state_only(log: DeltaLog, version: int, operation: str, actions: object) -> None:
        if log is table.table.state.log:
            raise CrashError
        real(log, version, operation, actions)

    with monkeypatch.context() as patch:
        patch.setattr(DeltaLog, "put", put_state_only)
        with pytest.raises(CrashError):
            table.merge(second)
    table.table.crash()
    table.merge(second)
    assert table.rows() == (latest if scd_type == 1 else history)([*first, *second])
    table.verify_index()


def test_event_with_null_key_is_refused_before_table_is_created(tmp_path: Path) -> None:
    table = CdcTable(tmp_path / "t", 1)
    with pytest.raises(ConfigurationError, match=r"null in a key .*key=None, __SEQUENCE=3"):
        table.merge([Event(None, 3, "U", 1, "x")])
    assert not (tmp_path / "t").exists()


def test_table_without_its_state_is_refused(tmp_path: Path) -> None:
    table = CdcTable(tmp_path / "t", 1)
    table.merge([Event("a", 1, "U", 1, None)])
    table.table.crash()
    table.state_path.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match="does not exist beside a table with rows"):
        table.merge([Event("a", 2, "U", 1, None)])
