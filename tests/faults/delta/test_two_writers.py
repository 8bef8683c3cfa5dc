"""Two queries that merge into one table: each commit of one conflicts with the other's."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
from deltalake import DeltaTable

from nats_stream_source.delta import Upkeep
from tests.integration.delta.merge_model import Entry, Model, delete, put
from tests.integration.delta.merge_on_read.in_process import (
    InProcessTable,
    index_of,
    model_rows,
    rebuilt,
    table_rows,
)
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


def test_two_writers_merge_into_one_table_at_same_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "fleet"
    upkeep = Upkeep(compact_files=4, vacuum_commits=None)
    InProcessTable(path).merge(put("first", 1))
    tables = [InProcessTable(path, upkeep=upkeep) for _ in range(2)]
    failures: list[BaseException] = []
    together = threading.Barrier(2)

    def write(writer: int) -> None:
        try:
            for batch in _batches(writer):
                together.wait(30)
                tables[writer].merge(*batch)
        except BaseException as error:  # the main thread reports it
            failures.append(error)
            together.abort()

    with caplog.at_level(logging.WARNING):
        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for table in tables:
            table.opened.upkeep.wait()
    assert not failures
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
