"""Random interleavings of merges, crashes, replays, compaction and commits of other writers.

After each step the table's rows are those of the model, and the index that was kept is the one
that is built from the table.
"""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from nats_stream_source.delta.driver.upkeep import compact
from nats_stream_source.delta.rules.layout import Deletes
from nats_stream_source.delta.tables import TableChangedError
from nats_stream_source.delta.upkeep import Upkeep
from tests.integration.delta.driver.in_process import (
    InProcessTable,
    arrow,
    index_of,
    model_rows,
    rebuilt,
    table_rows,
)
from tests.integration.delta.merge_model import Entry, Model, delete, purge, put
from tests.support.delta import rows_of

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
        self.table.engine.wait()
        after_upkeep = DeltaTable(self.path).version()
        assert self.table.merge(*self.log[start:]) == 0
        assert DeltaTable(self.path).version() == after_upkeep >= version

    def crash(self) -> None:
        self.table.crash()

    def compaction(self) -> None:
        if self.table.engine.table.snapshot is not None:
            self.table.engine.wait()
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
        self.table.engine.wait()
        if DeltaTable(self.path).version() > before:
            DeltaTable(self.path).restore(before)
            self.model.rows = rows

    def verify(self) -> None:
        self.table.engine.wait()
        assert table_rows(rows_of(DeltaTable(self.path))) == model_rows(self.model.rows)
        if self.table.engine.table.snapshot is not None:
            with self.table.state.lock:
                try:
                    self.table.state.refresh()
                except TableChangedError:
                    self.table.engine.table.close()
                    return
            assert index_of(self.table.state) == index_of(rebuilt(self.path))


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
