"""A process that ends, a full disk and damaged files, at each step of a commit and of upkeep.

As a program with a table and a number, this module merges numbered batches with upkeep, and prints
the number of each, until it is killed with -9.
"""

from __future__ import annotations

import itertools
import os
import random
import resource
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, write_deltalake

from nats_stream_source.delta import Upkeep
from nats_stream_source.delta.driver import upkeep
from nats_stream_source.delta.driver.key_index import KeyIndex
from nats_stream_source.delta.driver.log import VersionExistsError, now_ms, vector_path
from nats_stream_source.delta.driver.objects import TableObjects
from nats_stream_source.delta.driver.snapshot import Snapshot
from nats_stream_source.delta.driver.upkeep import compact, delete_expired_vectors
from nats_stream_source.delta.tables import EngineRefusedError
from nats_stream_source.errors import ConfigurationError, TableError
from tests.integration.delta.driver.in_process import (
    InProcessTable,
    arrow,
    expect,
    rebuilt,
)
from tests.integration.delta.merge_model import Entry, Model, delete, put, stored
from tests.support.object_store import BUCKET, ObjectStore, object_store

FIRST = [put(f"k{number}", number + 1) for number in range(8)]
SECOND = [put("k1", 20), put("new", 21), delete("k2", 22)]


class CrashError(BaseException):
    """The process ends here: nothing after it runs."""


@dataclass
class Crash:
    armed: bool


@contextmanager
def crash_at(step: str, monkeypatch: pytest.MonkeyPatch, armed: bool = True) -> Iterator[Crash]:
    """End the process before or after a put of data, of vectors or of the log's entry."""
    real, crash = TableObjects.put, Crash(armed)

    def put_or_crash(objects: TableObjects, path: str, *args: Any, **keywords: Any) -> None:
        kind = "log" if "_delta_log" in path else "vectors" if path.endswith(".bin") else "data"
        if crash.armed and step == f"before {kind}":
            raise CrashError
        real(objects, path, *args, **keywords)
        if crash.armed and step == f"after {kind}":
            raise CrashError

    with monkeypatch.context() as patch:
        patch.setattr(TableObjects, "put", put_or_crash)
        with pytest.raises(CrashError):
            yield crash


STEPS = [f"{when} {kind}" for kind in ("data", "vectors", "log") for when in ("before", "after")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "fleet"


@pytest.fixture
def table(path: Path) -> InProcessTable:
    table = InProcessTable(path)
    table.merge(*FIRST)
    return table


def check_crash(
    table: InProcessTable,
    step: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    restart: bool,
    options: dict[str, str] | None = None,
) -> None:
    """A crash leaves the old version of the table or the new one."""
    table.merge(*FIRST)
    with crash_at(step, monkeypatch):
        table.merge(*SECOND)
    committed = step == "after log"
    expect(table.path, FIRST, *([SECOND] if committed else []), storage_options=options)
    if restart:
        table = InProcessTable(table.path, storage_options=options)
    assert table.merge(*SECOND) == (0 if committed else 3)
    expect(table.path, FIRST, SECOND, storage_options=options)
    assert DeltaTable(table.path, storage_options=options).version() == 2
    table.verify_index()


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_crash_in_commit_leaves_old_or_new_version(
    path: Path, step: str, restart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_crash(InProcessTable(path), step, monkeypatch, restart=restart)


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as server:
        yield server


@pytest.mark.parametrize("step", STEPS)
def test_crash_in_commit_to_object_store(
    store: ObjectStore, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the log's entry is put by a conditional request, in place of a link of a file."""
    uri, options = f"s3://{BUCKET}/{uuid.uuid4()}", dict(store.storage_options)
    table = InProcessTable(uri, storage_options=options)
    check_crash(table, step, monkeypatch, restart=True, options=options)


def test_two_writers_take_one_version_of_table_in_object_store(store: ObjectStore) -> None:
    """Both know the same version: the second one's put is refused, and it merges again."""
    uri, options = f"s3://{BUCKET}/{uuid.uuid4()}", dict(store.storage_options)
    first, second = (InProcessTable(uri, storage_options=options) for _ in range(2))
    first.merge(*FIRST)
    second.merge(put("k2", 15))
    with second.state.lock:
        first.merge(*SECOND)
        version = second.state.version
        with pytest.raises(VersionExistsError):
            second.state.log.put(version + 1, "MERGE", [])
    second.merge(put("k3", 30))
    expect(uri, FIRST, [put("k2", 15)], SECOND, [put("k3", 30)], storage_options=options)
    second.verify_index()


@pytest.mark.parametrize("step", STEPS)
def test_crash_in_compaction_changes_no_row(
    path: Path, table: InProcessTable, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.merge(*SECOND)
    table.reopen()
    real = TableObjects.reader
    with crash_at(step, monkeypatch, armed=False) as crash:

        def reader(objects: TableObjects, name: str) -> Any:
            if not crash.armed:
                # Replaced rows: the compaction writes a vector for them, too.
                table.merge(put("k3", 30))
                crash.armed = True
            return real(objects, name)

        monkeypatch.setattr(TableObjects, "reader", reader)
        compact(table.state, [number for number, _ in table.state.files.items()], 32 << 20)
    monkeypatch.undo()
    expect(path, FIRST, SECOND, [put("k3", 30)])
    table = InProcessTable(path)
    assert table.merge(put("k3", 30)) == 0
    table.verify_index()


@pytest.mark.parametrize(
    ("owner", "method"), [(TableObjects, "reader"), (Snapshot, "refresh")], ids=["read", "commit"]
)
@pytest.mark.parametrize("vectors", [True, False])
def test_rows_replaced_during_compaction_stay_replaced(
    path: Path, monkeypatch: pytest.MonkeyPatch, vectors: bool, owner: type, method: str
) -> None:
    """A merge commits while the files are read, or after they are in the new file.

    Without vectors the compaction is dropped.
    """
    table = InProcessTable(path, vectors=vectors)
    for batch in (FIRST, SECOND):
        table.merge(*batch)
    table.reopen()
    real, merged = getattr(owner, method), list[int]()

    def merge_before(*arguments: Any) -> Any:
        if not merged:
            merged.append(-1)
            merged[0] = table.merge(put("k3", 30), delete("k4", 31))
        return real(*arguments)

    monkeypatch.setattr(owner, method, merge_before)
    numbers = [number for number, _ in table.state.files.items()]
    assert compact(table.state, numbers, 32 << 20) == (1 if vectors else None)
    assert merged == [2]
    expect(path, FIRST, SECOND, [put("k3", 30), delete("k4", 31)])
    table.verify_index()


def test_full_disk_fails_merge_and_leaves_table(path: Path, table: InProcessTable) -> None:
    """A limit of the size of files makes the operating system refuse the write."""
    large = put("k1", 20, value=bytes(1 << 20))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, hard))
    try:
        with pytest.raises(TableError, match=r"could not merge the batch into table .*unchanged"):
            table.merge(large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    expect(path, FIRST)
    table.merge(large)
    expect(path, FIRST, [large])


@pytest.mark.parametrize("damage", ["truncated", "changed", "deleted"])
@pytest.mark.parametrize("file", ["vector", "log", "data"])
def test_damaged_file_is_named_and_nothing_is_written(
    path: Path, table: InProcessTable, file: str, damage: str
) -> None:
    table.merge(*SECOND)
    patterns = {"vector": "*.bin", "log": "_delta_log/*02.json", "data": "*.parquet"}
    target = sorted(path.glob(patterns[file]), key=lambda found: found.stat().st_mtime)[-1]
    content = target.read_bytes()
    if damage == "deleted":
        if file == "log":
            pytest.skip("the version before it is then the newest one")
        target.unlink()
    else:
        target.write_bytes(content[:-9] if damage == "truncated" else b"\xff" * len(content))
    before = sorted(found for found in path.rglob("*") if found.is_file())
    with pytest.raises(TableError) as failed:
        InProcessTable(path).merge(put("k5", 40))
    assert target.name in str(failed.value)
    assert sorted(found for found in path.rglob("*") if found.is_file()) == before
    target.write_bytes(content)
    InProcessTable(path).merge(put("k5", 40))
    expect(path, FIRST, SECOND, [put("k5", 40)])


@pytest.mark.usefixtures("table")
def test_limit_of_index_refuses_table(path: Path) -> None:
    limited = InProcessTable(path, limit=100)
    with pytest.raises(EngineRefusedError, match="index_bytes is 448, limit 100"):
        limited.merge(*SECOND)
    expect(path, FIRST)


def test_table_with_two_rows_of_key_is_refused(path: Path, table: InProcessTable) -> None:
    write_deltalake(path, arrow([put("k3", 50)]), mode="append")
    for state in (table, InProcessTable(path)):
        with pytest.raises(ConfigurationError, match=r"several rows with bucket='fleet', key='k3'"):
            state.merge(*SECOND)
    assert DeltaTable(path).version() == 2


def test_property_switched_off_is_error_if_vectors_are_required(
    path: Path, table: InProcessTable
) -> None:
    table.merge(*SECOND)
    DeltaTable(path).alter.set_table_properties({"delta.enableDeletionVectors": "false"})
    with pytest.raises(ConfigurationError, match=r"with deletion_vectors=True: .*enableDeletion"):
        InProcessTable(path, vectors=True).merge(put("k5", 40))
    expect(path, FIRST, SECOND)


def test_expired_vectors_are_deleted_and_others_stay(
    path: Path, table: InProcessTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = [put(f"k{revision % 6}", revision) for revision in range(20, 30)]
    for entry in changes:
        table.merge(entry)
    hour = Upkeep(retention_hours=1)
    vectors = set(path.glob("*.bin"))
    two_hours_ago = time.time() - 2 * 3600
    for vector in vectors:
        os.utime(vector, (two_hours_ago, two_hours_ago))
    # `remove` actions within the retention name each of them.
    objects, newest = table.state.objects, table.state.log.newest()
    assert newest is not None
    assert delete_expired_vectors(objects, newest, hour) == 0
    under_way = path / "deletion_vector_00000000-0000-0000-0000-000000000000.bin"
    under_way.write_bytes(b"x")
    with monkeypatch.context() as later:
        later.setattr(upkeep, "now_ms", lambda: now_ms() + 2 * 3_600_000)
        in_two_hours = time.time() + 2 * 3600
        os.utime(under_way, (in_two_hours, in_two_hours))
        deleted = delete_expired_vectors(objects, newest, hour)
    live = (file.add for _, file in table.state.files.items() if file.vector)
    named = {vector_path(add["deletionVector"]) for add in live}
    assert named
    assert deleted == len(vectors) - len(named) > 0
    assert under_way.exists()
    expect(path, FIRST, changes)
    table.verify_index()


def test_commit_of_other_writer_that_fails_midway_is_read_again(
    path: Path, table: InProcessTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread with the upkeep applies a commit as well: its failure must not cost rows."""
    write_deltalake(path, arrow([put("k90", 90), put("k91", 91)]), mode="append")
    state = table.state
    with monkeypatch.context() as patch:
        patch.setattr(KeyIndex, "insert", lambda *_: (_ for _ in ()).throw(OSError("memory")))
        with pytest.raises(OSError, match="memory"):
            state.refresh()
    assert table.merge(put("k90", 95), delete("k91", 96)) == 2
    assert table.state is not state
    expect(path, FIRST, [put("k90", 95)])


_KILLS = 12
KEYS = 40


def batch(number: int) -> list[Entry]:
    """Ten entries with the revisions of this batch; the same ones in each process."""
    choice = random.Random(number)
    makes = (put, put, put, delete)
    return [
        choice.choice(makes)(f"k{choice.randrange(KEYS)}", 10 * number + index + 1)
        for index in range(10)
    ]


def merge_until_killed() -> None:
    table = InProcessTable(
        sys.argv[1], upkeep=Upkeep(compact_files=3, vacuum_commits=5, retention_hours=1)
    )
    for number in itertools.count(int(sys.argv[2])):
        table.merge(*batch(number))
        print(number, flush=True)


def _run_until_killed(path: Path, first: int, after: int, delay: float) -> int:
    """Merge batches from ``first``, kill the process ``delay`` seconds after ``after`` of them.

    Returns:
        the last batch that the process reported.
    """
    command = [sys.executable, "-m", "tests.faults.delta.test_crashes", str(path), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        reported = [int(process.stdout.readline()) for _ in range(after)]
        # A commit takes some milliseconds: the point in it that the kill meets is random.
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            process.kill()
        reported += [int(line) for line in process.stdout.read().split("\n") if line.strip()]
    assert process.returncode == -9
    return reported[-1]


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(3))
def test_killed_writer_leaves_whole_commits(tmp_path: Path, seed: int) -> None:
    choice, path = random.Random(seed), tmp_path / "fleet"
    model, done = Model("remove"), 0
    for _ in range(_KILLS):
        last = _run_until_killed(path, done, choice.randint(1, 12), choice.uniform(0, 0.03))
        for number in range(done, last + 1):
            model.merge(batch(number))
        found = stored(path)
        # The batch after the last one that was reported is in the table as a whole, or not at all.
        if found != model.stored():
            last += 1
            model.merge(batch(last))
        assert found == model.stored()
        done = last + 1
        rebuilt(path)  # fails for a key with two rows
    table = InProcessTable(path)
    version = DeltaTable(path).version()
    assert table.merge(*batch(done - 1)) == 0
    assert DeltaTable(path).version() == version
    table.merge(*batch(done))
    table.verify_index()
    operations = {one["operation"] for one in DeltaTable(path).history()}
    assert "OPTIMIZE" in operations, operations


if __name__ == "__main__":
    merge_until_killed()
