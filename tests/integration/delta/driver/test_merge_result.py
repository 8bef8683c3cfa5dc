"""The figures that the driver returns for a merge."""

from __future__ import annotations

from pathlib import Path

import pytest

from nats_stream_source.delta.rules.layout import Deletes
from nats_stream_source.delta.upkeep import Upkeep
from tests.integration.delta.driver.in_process import InProcessTable, arrow
from tests.integration.delta.merge_model import delete, put


def parquet_bytes(path: Path) -> int:
    return sum(one.stat().st_size for one in path.glob("*.parquet"))


@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("deletes", ["remove", "mark"])
def test_result_counts_rows_bytes_and_files(
    tmp_path: Path, vectors: bool, deletes: Deletes
) -> None:
    path = tmp_path / "fleet"
    table = InProcessTable(path, deletes, vectors=vectors)
    first = [put("a", 1), put("b", 2), put("c", 3)]
    result = table.result(*first)
    assert (result.inserted, result.updated, result.deleted) == (3, 0, 0)
    assert result.newest == first[-1].created
    assert result.changed_bytes
    assert result.changed_bytes >= arrow(first).nbytes
    assert result.files == 1
    assert result.written_bytes is not None
    assert result.written_bytes >= parquet_bytes(path)

    before = parquet_bytes(path)
    second = [put("a", 4), put("d", 5), delete("b", 6), delete("x", 7)]
    result = table.result(*second)
    expected = (1, 1, 1) if deletes == "remove" else (2, 2, 0)
    assert (result.inserted, result.updated, result.deleted) == expected
    assert result.written_bytes is not None
    assert result.written_bytes >= parquet_bytes(path) - before > 0

    result = table.result(*second)  # a repeated batch
    assert result.changed == result.changed_bytes == result.written_bytes == 0
    assert result.newest is None


def test_result_has_index_and_compaction_since_last_one(tmp_path: Path) -> None:
    table = InProcessTable(tmp_path / "fleet", upkeep=Upkeep(compact_files=2))
    done = []
    for revision in range(1, 6):
        done.append(table.result(put(f"k{revision}", revision)))
        table.engine.wait()
    last = done[-1]
    assert last.index_keys == 5
    assert last.index_bytes > 0
    assert sum(one.maintained.compacted for one in done) >= 3
    assert sum(one.maintained.written for one in done) >= 1
    written = sum(one.written_bytes or 0 for one in done)
    assert written >= parquet_bytes(tmp_path / "fleet")


def test_newest_of_batch_without_times_is_unknown(tmp_path: Path) -> None:
    table = InProcessTable(tmp_path / "fleet")
    table.result(put("a", 1))
    entries = arrow([put("a", 2)])
    assert table.merge_rows(entries).newest == entries["created"][0].as_py()
    texts = arrow([put("a", 3)]).drop_columns(["created"])
    result = table.merge_rows(texts)
    assert (result.updated, result.newest) == (1, None)
