"""Two queries that merge into one table: each commit of one conflicts with the other's."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from deltalake import DeltaTable

from nats_stream_source.delta import Upkeep
from tests.integration.delta.driver.cdc_tables import CdcTable
from tests.integration.delta.driver.in_process import (
    InProcessTable,
    index_of,
    model_rows,
    rebuilt,
    table_rows,
)
from tests.integration.delta.merge_model import Entry, Model, delete, put
from tests.support.cdc.events import history, latest, random_event
from tests.support.delta import rows_of

_BATCHES = 40


def _batches(writer: int) -> list[list[Entry]]:
    """Batches of one writer: keys of its own, and keys that the other one writes, too."""
    batches = []
    for number in range(_BATCHES):
        revision = 1 + 20 * number + 10 * writer
        own, common = f"w{writer}-{number % 7}", f"c{number % 5}"
        removed = delete(f"w{writer}-{(number + 3) % 7}", revision + 2)
        batches.append([put(own, revision), put(common, revision + 1), removed])
    return batches


def at_same_time(merges: Sequence[Sequence[Callable[[], object]]]) -> None:
    """Run the merges of each writer in a thread of its own, each with one of the others."""
    failures: list[BaseException] = []
    together = threading.Barrier(len(merges))

    def write(own: Sequence[Callable[[], object]]) -> None:
        try:
            for merge in own:
                together.wait(30)
                merge()
        except BaseException as error:  # the main thread reports it
            failures.append(error)
            together.abort()

    threads = [threading.Thread(target=write, args=(own,)) for own in merges]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_two_writers_merge_into_one_table_at_same_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "fleet"
    upkeep = Upkeep(compact_files=4, vacuum_commits=None)
    InProcessTable(path).merge(put("first", 1))
    tables = [InProcessTable(path, upkeep=upkeep) for _ in range(2)]
    with caplog.at_level(logging.WARNING):
        of_writers = zip(tables, map(_batches, range(2)), strict=True)
        at_same_time([[partial(one.merge, *batch) for batch in own] for one, own in of_writers])
        for table in tables:
            table.engine.wait()
    conflicts = [one for one in caplog.messages if "another writer changed the table" in one]
    assert conflicts, "no commit conflicted with the other writer's"
    model = Model("remove")
    model.merge([put("first", 1)])
    for first, second in zip(*map(_batches, range(2)), strict=True):
        model.merge(first)
        model.merge(second)
    assert table_rows(rows_of(DeltaTable(path))) == model_rows(model.rows)
    for table in tables:
        table.merge(put("last", 10_000))
        assert index_of(table.state) == index_of(rebuilt(path))


@pytest.mark.parametrize("scd_type", [1, 2])
def test_two_writers_merge_events_of_same_keys_at_same_time(tmp_path: Path, scd_type: int) -> None:
    rng = random.Random(scd_type)
    events = [
        random_event(rng, f"key {key}", seq)
        for key in range(30)
        for seq in rng.sample(range(1, 40), rng.randrange(1, 9))
    ]
    rng.shuffle(events)
    CdcTable(tmp_path / "t", scd_type).merge([])
    tables = [CdcTable(tmp_path / "t", scd_type) for _ in range(2)]
    parts = [events[start::20] for start in range(20)]
    at_same_time(
        [[partial(table.merge, part) for part in parts[n::2]] for n, table in enumerate(tables)]
    )
    assert tables[0].rows() == (latest if scd_type == 1 else history)(events)
