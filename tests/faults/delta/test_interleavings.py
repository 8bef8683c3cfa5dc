"""Random interleavings of merges, crashes, replays, compaction and other writers, and two queries.

After each step the table's rows are those of the model, and the index that was kept is the one
that is built from the table. Each commit of one of two queries conflicts with the other's.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from nats_stream_source.delta.driver.upkeep import compact
from nats_stream_source.delta.rules.layout import Deletes
from nats_stream_source.delta.tables import TableChangedError
from nats_stream_source.delta.upkeep import Upkeep
from tests.integration.delta.driver.in_process import (
    CdcTable,
    InProcessTable,
    arrow,
)
from tests.integration.delta.merge_model import Entry, Model, delete, purge, put, stored
from tests.support.cdc.events import history, latest, random_event

_KEYS = [f"k{number}" for number in range(12)] + ["", "ä", "a\x00b", "a"]
_OPERATIONS = (put, put, put, delete, purge)


class _Run:
    def __init__(self, path: Path, seed: int, deletes: Deletes, vectors: bool) -> None:
        self.random = random.Random(seed)
        self.path = path
        self.model = Model(deletes)
        upkeep = Upkeep(compact_files=2, vacuum_commits=None, checkpoint_commits=7)
        InProcessTable(path, deletes, upkeep, vectors=vectors).merge_rows(arrow([]))
        self.table = InProcessTable(path, deletes, upkeep)
        self.log: list[Entry] = []
        self.revision = 0
        self.merge()

    def entries(self) -> list[Entry]:
        batch = []
        for _ in range(self.random.randint(1, 8)):
            self.revision += 1
            make = self.random.choice(_OPERATIONS)
            batch.append(make(self.random.choice(_KEYS), self.revision))
        return batch

    def merge(self) -> None:
        batch = self.entries()
        self.log += batch
        self.model.merge(batch)
        self.table.merge(*batch)

    def replay(self) -> None:
        start = self.random.randrange(len(self.log))
        self.model.merge(self.log[start:])
        self.table.merge(*self.log[start:])
        version = DeltaTable(self.path).version()
        self.table.table.wait()
        after_upkeep = DeltaTable(self.path).version()
        assert self.table.merge(*self.log[start:]) == 0
        assert DeltaTable(self.path).version() == after_upkeep >= version

    def crash(self) -> None:
        self.table.crash()

    def compaction(self) -> None:
        if self.table.table.snapshot is not None:
            self.table.table.wait()
            numbers = [number for number, _ in self.table.state.files.items()]
            chosen = self.random.sample(numbers, self.random.randint(1, len(numbers)))
            compact(self.table.state, chosen, self.random.choice((1, 1 << 20)))

    # -- other writers --------------------------------------------------------------------------

    def merge_by_other_writer(self) -> None:
        batch = self.entries()
        self.log += batch
        self.model.merge(batch)
        InProcessTable(self.path, self.model.deletes).merge(*batch)

    def delete_rows(self) -> None:
        key = self.random.choice(_KEYS)
        quoted = key.replace("'", "''")
        DeltaTable(self.path).delete(f"key = '{quoted}'")
        self.model.rows.pop(key, None)

    def append_row(self) -> None:
        missing = [key for key in _KEYS if key not in self.model.rows]
        if missing:
            self.revision += 1
            entry = put(self.random.choice(missing), self.revision)
            rows = arrow([entry])
            if self.model.deletes == "mark":
                rows = rows.append_column("deleted", pa.array([False]))
            write_deltalake(self.path, rows, mode="append")
            self.model.rows[entry.key] = entry

    def optimize(self) -> None:
        DeltaTable(self.path).optimize.compact()

    def checkpoint(self) -> None:
        DeltaTable(self.path).create_checkpoint()

    def property_change(self) -> None:
        name, value = "delta.logRetentionDuration", f"interval {self.random.randint(1, 9)} hours"
        DeltaTable(self.path).alter.set_table_properties({name: value})

    def vectors_switched(self) -> None:
        """Vectors that are there are read; none is added while the property is off."""
        features = DeltaTable(self.path).protocol().writer_features or ()
        value = str(self.random.random() < 0.5 and "deletionVectors" in features).lower()
        DeltaTable(self.path).alter.set_table_properties({"delta.enableDeletionVectors": value})

    def restore(self) -> None:
        """Restore the version before a merge; the model goes back with it."""
        before, rows = DeltaTable(self.path).version(), dict(self.model.rows)
        self.merge()
        self.table.table.wait()
        if DeltaTable(self.path).version() > before:
            DeltaTable(self.path).restore(before)
            self.model.rows = rows

    def verify(self) -> None:
        self.table.table.wait()
        assert stored(self.path) == self.model.stored()
        if self.table.table.snapshot is not None:
            with self.table.state.lock:
                try:
                    self.table.state.refresh()
                except TableChangedError:
                    self.table.table.close()
                    return
            self.table.verify_index()


@pytest.mark.parametrize("deletes", ["remove", "mark"])
@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("seed", range(15))
def test_random_interleavings_equal_model(
    tmp_path: Path, seed: int, vectors: bool, deletes: Deletes
) -> None:
    run = _Run(tmp_path / "fleet", seed, deletes, vectors)
    steps = [
        *(run.merge, run.merge, run.merge, run.replay, run.crash, run.compaction),
        *(
            run.merge_by_other_writer,
            run.vectors_switched,
            run.delete_rows,
            run.append_row,
            run.optimize,
        ),
        *(run.checkpoint, run.property_change, run.restore),
    ]
    for _ in range(20):
        run.random.choice(steps)()
        run.verify()


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
            table.table.wait()
    conflicts = [one for one in caplog.messages if "another writer changed the table" in one]
    assert conflicts, "no commit conflicted with the other writer's"
    model = Model("remove")
    model.merge([put("first", 1)])
    for first, second in zip(*map(_batches, range(2)), strict=True):
        model.merge(first)
        model.merge(second)
    assert stored(path) == model.stored()
    for table in tables:
        table.merge(put("last", 10_000))
        table.table.wait()  # the commit can have started a compaction
    for table in tables:
        with table.state.lock:
            table.state.refresh()
        table.verify_index()


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
