"""Compaction beside merges, checkpoints, what properties forbid, and the figures of a merge."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from nats_stream_source.delta.driver import upkeep as driver_upkeep
from nats_stream_source.delta.driver.log import DeltaLog
from nats_stream_source.delta.driver.objects import TableObjects
from nats_stream_source.delta.driver.storage import TableStorage
from nats_stream_source.delta.driver.table import DriverTable
from nats_stream_source.delta.driver.upkeep import compact, select_files
from nats_stream_source.delta.rules.layout import Deletes
from nats_stream_source.delta.tables import TableChangedError
from nats_stream_source.delta.upkeep import Upkeep
from nats_stream_source.errors import TableError
from tests.integration.delta.driver.in_process import InProcessTable, arrow, both_writers, expect
from tests.integration.delta.merge_model import both_modes, delete, put
from tests.support.delta import age, rows_of

FIRST = [put(f"k{number}", number + 1) for number in range(8)]


# -- files ------------------------------------------------------------------------------------


@both_writers
def test_touched_file_gets_vector_or_is_written_again(path: Path, vectors: bool) -> None:
    table = InProcessTable(path, vectors=vectors)
    table.merge(*FIRST)
    table.merge(put("k1", 20), delete("k2", 21), put("new", 22))
    expect(path, FIRST, [put("k1", 20), delete("k2", 21), put("new", 22)])
    assert bool(list(path.glob("*.bin"))) == vectors
    assert [file.live_rows for _, file in table.state.files.items()] == [6, 2]
    table.verify_index()


def test_merge_without_vectors_joins_touched_small_files(tmp_path: Path) -> None:
    table = InProcessTable(tmp_path / "t", vectors=False)
    for entry in FIRST:
        table.merge(entry)
    assert len(table.state.files) == 8
    table.merge(*[put(f"k{number}", 20 + number) for number in range(5)])
    assert len(table.state.files) == 4
    table.verify_index()


@both_writers
def test_files_have_about_target_size_and_are_not_compacted_again(
    tmp_path: Path, vectors: bool
) -> None:
    path, target = tmp_path / "t", 100_000
    upkeep = Upkeep(compact_files=2, target_file_bytes=target)
    table = InProcessTable(path, upkeep=upkeep, vectors=vectors)
    random = np.random.default_rng(1)
    for start in range(0, 4000, 800):
        values = [random.bytes(500) for _ in range(800)]
        table.merge(*[put(f"k{start + n}", n + 1, value=v) for n, v in enumerate(values)])
        table.table.wait()
    sizes = [file.add["size"] for _, file in table.state.files.items()]
    assert len([size for size in sizes if size < target / 2]) <= 2
    assert max(sizes) < 2.2 * target
    assert select_files(table.state.files, target, 2) == []
    found = InProcessTable(path).found
    found.maintain(upkeep)
    assert found.maintain(upkeep).compacted == 0
    assert len(rows_of(DeltaTable(path))) == 4000


@both_writers
def test_maintenance_leaves_files_that_merges_add_meanwhile(
    path: Path, monkeypatch: pytest.MonkeyPatch, vectors: bool
) -> None:
    table = InProcessTable(path, vectors=vectors)
    for entry in FIRST:
        table.merge(entry)
    found, added = InProcessTable(path).found, list[int]()

    def compact_before_merge(*given: Any) -> int | None:
        written = compact(*given)
        added.append(100 + len(added))
        assert len(added) < 5
        table.merge(put(f"new{len(added)}", added[-1]))
        return written

    monkeypatch.setattr(driver_upkeep, "compact", compact_before_merge)
    monkeypatch.setattr(driver_upkeep, "_MOST_FILES", 4)
    done = found.maintain(Upkeep())
    assert (done.compacted, done.written, done.skipped) == (8, 2, "")
    assert len(rows_of(DeltaTable(path))) == len(FIRST) + 2


# -- the log ----------------------------------------------------------------------------------


def test_hint_of_last_checkpoint_is_not_needed(path: Path) -> None:
    """It is cut, an older checkpoint is there, and the entries after that were cleaned up."""
    table = InProcessTable(path)
    for entry in FIRST:
        table.merge(entry)
        if table.state.version == 2:
            DeltaTable(path).create_checkpoint()
    table.merge(put("k1", 20))
    DeltaTable(path).create_checkpoint()
    log = path / "_delta_log"
    for version in range(table.state.version):
        (log / f"{version:020}.json").unlink()
    (log / "_last_checkpoint").write_text("{")
    restarted = InProcessTable(path)
    restarted.merge(put("k2", 30))
    expect(path, FIRST, [put("k1", 20)], [put("k2", 30)])
    restarted.verify_index()


def test_checkpoint_has_actions_of_entries(path: Path) -> None:
    table = InProcessTable(path, upkeep=Upkeep())
    table.merge(*FIRST)
    table.merge(put("k1", 20))
    entries = table.state.log.newest()
    DeltaTable(path).create_checkpoint()
    for entry in (path / "_delta_log").glob("*.json"):
        entry.unlink()
    checkpoint = table.state.log.newest()
    assert entries is not None
    assert checkpoint is not None
    assert checkpoint.metadata == entries.metadata
    assert checkpoint.protocol == entries.protocol
    assert checkpoint.files.keys() == entries.files.keys()
    for file, add in checkpoint.files.items():
        assert add["partitionValues"] == entries.files[file]["partitionValues"] == {}
        assert add.get("deletionVector") == entries.files[file].get("deletionVector")


@pytest.mark.parametrize(
    ("hint", "due"),
    [
        (None, True),
        ("{", True),
        ('{"version": 1}', True),
        ('{"version": 1, "sizeInBytes": 2000}', True),
        ('{"version": 1, "sizeInBytes": 2002}', False),
    ],
)
def test_checkpoint_is_due_by_size_of_last_one(tmp_path: Path, hint: str | None, due: bool) -> None:
    (tmp_path / "_delta_log").mkdir()
    if hint is not None:
        (tmp_path / "_delta_log" / "_last_checkpoint").write_text(hint)
    log = DeltaLog(TableObjects.at(str(tmp_path), None))
    log.entry_bytes = 1000
    assert log.checkpoint_due() == due


def test_checkpoint_is_not_written_for_few_entries(tmp_path: Path) -> None:
    """A checkpoint of a table without files has tens of kilobytes."""
    table = InProcessTable(tmp_path / "t", upkeep=Upkeep(checkpoint_commits=1))
    for revision in range(30):
        table.merge(put("a", revision))
        table.table.wait()
    assert 1 < len(list((tmp_path / "t" / "_delta_log").glob("*.checkpoint.parquet"))) < 10


def test_incomplete_checkpoint_is_skipped(path: Path) -> None:
    table = InProcessTable(path)
    table.merge(*FIRST)
    DeltaTable(path).create_checkpoint()
    table.merge(put("k1", 20))
    part = path / "_delta_log" / f"{2:020}.checkpoint.{1:010}.{2:010}.parquet"
    shutil.copy(path / "_delta_log" / f"{1:020}.checkpoint.parquet", part)
    InProcessTable(path).merge(put("k2", 30))
    part.unlink()
    expect(path, FIRST, [put("k1", 20)], [put("k2", 30)])


@pytest.mark.parametrize(
    ("cleanup", "meanwhile"), [("false", False), ("FALSE", False), ("true", False), ("false", True)]
)
def test_log_is_kept_if_property_forbids_cleanup(
    path: Path, monkeypatch: pytest.MonkeyPatch, cleanup: str, meanwhile: bool
) -> None:
    """Another writer sets it before the upkeep, or during it."""
    table = InProcessTable(path)
    for entry in FIRST:
        table.merge(entry)
    log, checkpoint = path / "_delta_log", DeltaTable.create_checkpoint

    def set_property() -> None:
        properties = {"delta.enableExpiredLogCleanup": cleanup}
        DeltaTable(path).alter.set_table_properties(properties)

    def create_checkpoint(of: DeltaTable) -> None:
        set_property()
        checkpoint(of)

    if meanwhile:
        monkeypatch.setattr(DeltaTable, "create_checkpoint", create_checkpoint)
    else:
        set_property()
    age(log.glob("*.json"), hours=40 * 24)
    entries = {*log.glob("*.json")}
    table.reopen()  # the entries are no longer those that it has put
    table.table.maintain(Upkeep())
    assert (entries < {*log.glob("*.json")}) == (cleanup.lower() == "false")


def test_maintenance_needs_no_index_and_no_layout(path: Path) -> None:
    """Any table that the driver supports is compacted, also one of another writer."""
    for number in range(4):
        write_deltalake(path, pa.table({"a": [number]}), mode="append")
    found = InProcessTable(path).found
    assert found.layout is None
    done = found.maintain(Upkeep())
    assert (done.compacted, done.written) == (4, 1)
    assert sorted(row["a"] for row in rows_of(DeltaTable(path))) == [0, 1, 2, 3]
    assert found.scan(["a"], {"a": (1, 3)})["a"].to_pylist() == [1, 3]


def test_scan_opens_table_again_after_change_of_properties(path: Path) -> None:
    table = InProcessTable(path)
    table.merge(*FIRST)
    DeltaTable(path).alter.set_table_properties({"delta.logRetentionDuration": "interval 9 hours"})
    with pytest.raises(TableChangedError):
        table.table.scan(["key"], {})
    assert len(table.table.scan(["key"], {})) == len(FIRST)


def test_damaged_data_file_is_named_by_maintenance(path: Path) -> None:
    table = InProcessTable(path)
    table.merge(*FIRST)
    table.merge(put("x", 20))
    damaged = sorted(path.glob("*.parquet"))[0]
    damaged.write_bytes(b"x")
    found = InProcessTable(path).found
    with pytest.raises(TableError, match=f"could not maintain .*{damaged.name}.*unchanged"):
        found.maintain(Upkeep())


def parquet_bytes(path: Path) -> int:
    return sum(one.stat().st_size for one in path.glob("*.parquet"))


@both_writers
@both_modes
def test_result_counts_rows_bytes_and_files(path: Path, vectors: bool, deletes: Deletes) -> None:
    table = InProcessTable(path, deletes, vectors=vectors)
    first = [put("a", 1), put("b", 2), put("c", 3)]
    result = table.result(*first)
    assert (result.inserted, result.updated, result.deleted) == (3, 0, 0)
    assert result.newest == first[-1].created
    assert (result.changed_bytes or 0) >= arrow(first).nbytes
    assert result.files == 1
    assert (result.written_bytes or 0) >= parquet_bytes(path)

    before = parquet_bytes(path)
    second = [put("a", 4), put("d", 5), delete("b", 6), delete("x", 7)]
    result = table.result(*second)
    expected = (1, 1, 1) if deletes == "remove" else (2, 2, 0)
    assert (result.inserted, result.updated, result.deleted) == expected
    assert (result.written_bytes or 0) >= parquet_bytes(path) - before > 0

    result = table.result(*second)  # a repeated batch
    assert result.changed == result.changed_bytes == result.written_bytes == 0
    assert result.newest is None

    result = table.merge_rows(arrow([put("a", 8)]).drop_columns(["created"]))
    assert (result.updated, result.newest) == (1, None)


def test_result_has_index_and_compaction_since_last_one(tmp_path: Path) -> None:
    table = InProcessTable(tmp_path / "fleet", upkeep=Upkeep(compact_files=2))
    done = []
    for revision in range(1, 6):
        done.append(table.result(put(f"k{revision}", revision)))
        table.table.wait()
    last = done[-1]
    assert last.index_keys == 5
    assert last.index_bytes > 0
    assert sum(one.maintained.compacted for one in done) >= 3
    assert sum(one.maintained.written for one in done) >= 1
    written = sum(one.written_bytes or 0 for one in done)
    assert written >= parquet_bytes(tmp_path / "fleet")


def test_warning_of_index_is_repeated_beyond_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = InProcessTable(tmp_path / "t")
    table.merge(*FIRST)
    size = table.state.index.nbytes
    caplog.set_level(logging.WARNING)
    storage = TableStorage(table.path, table.path)
    table.table = DriverTable(storage, limit=size + 1, enforced=False)
    for number in range(8):
        table.merge(put(f"new{number}", 20 + number))
    near, beyond = (one.message for one in caplog.records if "near or beyond" in one.message)
    assert f"index_bytes is {size:,}, limit {size + 1:,}" in near
    assert f"limit {size + 1:,}" in beyond
    assert near != beyond
