"""Other readers return the rows of a table after each step of a random run of the writer.

The steps: puts, deletes, added columns and a wider type, compactions, checkpoints, and clean-up of
expired log entries, files and vectors. Spark, deltalake, polars and DuckDB read the table after
each step. ``CONFORMANCE_STEPS`` sets their number, ``CONFORMANCE_SEED`` the run.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from nats_stream_source.delta import Upkeep, maintain, merge
from tests.support.delta_readers import by_deltalake, by_duckdb, by_polars

STEPS = int(os.environ.get("CONFORMANCE_STEPS", "24"))
SEED = int(os.environ.get("CONFORMANCE_SEED", "1"))
KEYS = 60
COLUMNS = ("key", "value", "revision")
UPKEEP = Upkeep(compact_files=3, vacuum_commits=None, retention_hours=1)

Row = dict[str, Any]


class Run:
    """A table, the rows that it has, and the steps that change it."""

    def __init__(self, spark: SparkSession, path: Path, chance: random.Random, vectors: bool):
        self.spark, self.path, self.chance = spark, path, chance
        self.arguments: dict[str, Any] = {
            "keys": ["key"],
            "sequence_by": "revision",
            "apply_as_deletes": "deleted",
            "except_column_list": ["deleted"],
            "deletion_vectors": vectors,
            "upkeep": UPKEEP,
            "engine": "driver",
        }
        self.types = dict(zip(COLUMNS, ("STRING", "BINARY", "BIGINT"), strict=True))
        self.rows: dict[str, Row] = {}
        self.revision = 0
        self.seen = {"vectors": False, "cleaned": False, "compacted": False, "checkpoints": False}

    def merge(self, share: float) -> None:
        events = []
        for number in self.chance.sample(range(KEYS), self.chance.randint(1, 15)):
            self.revision += 1
            key, deleted = f"k{number}", self.chance.random() < share
            row = {"key": key, "revision": self.revision}
            row |= {name: self.value(kind) for name, kind in self.types.items() if name not in row}
            events.append({**row, "deleted": deleted})
            if deleted:
                self.rows.pop(key, None)
            else:
                self.rows[key] = row
        schema = ", ".join(f"{name} {kind}" for name, kind in self.types.items())
        values = [tuple(event[name] for name in (*self.types, "deleted")) for event in events]
        batch = self.spark.createDataFrame(values, f"{schema}, deleted BOOLEAN")
        merge(batch, str(self.path), **self.arguments)
        self.seen["vectors"] |= bool(list(self.path.glob("deletion_vector_*")))

    def value(self, kind: str) -> Any:
        if kind == "BINARY":
            return self.chance.randbytes(self.chance.randint(0, 40))
        if kind == "STRING":
            return self.chance.choice(["", "ä", "New York", None])
        return self.chance.randint(-(2**31), 2**31 - 1 if kind == "INT" else 2**62)

    def put(self) -> None:
        self.merge(0.1)

    def delete(self) -> None:
        self.merge(0.9)

    def add_column(self) -> None:
        """Add a column, the next time make it wider."""
        wider = self.types.get("size") == "INT"
        name = "size" if "size" not in self.types or wider else f"c{len(self.types)}"
        self.types[name] = "BIGINT" if wider else "INT" if name == "size" else "STRING"
        for row in self.rows.values():
            row.setdefault(name, None)
        self.merge(0.1)

    def checkpoint(self) -> None:
        DeltaTable(self.path).create_checkpoint()
        self.seen["checkpoints"] = True

    def compact(self) -> None:
        result = maintain(self.spark, str(self.path), upkeep=UPKEEP, engine="driver")
        self.seen["compacted"] |= bool(result.compacted)

    def clean_up(self) -> None:
        """All files and log entries are from two hours ago, one more than their retention."""
        self.put()
        self.checkpoint()
        past = time.time() - 7200
        for file in self.path.rglob("*"):
            os.utime(file, (past, past))
        self.put()
        self.compact()
        self.seen["cleaned"] |= not (self.path / "_delta_log" / f"{0:020}.json").exists()


@pytest.mark.delta
@pytest.mark.faults
@pytest.mark.parametrize("vectors", [True, False], ids=["vectors", "files written again"])
def test_readers_agree_after_each_step(spark: SparkSession, tmp_path: Path, vectors: bool) -> None:
    run = Run(spark, tmp_path / "fleet", random.Random(SEED), vectors)
    steps: list[Callable[[], None]] = [run.put, run.delete, run.add_column]
    steps += [run.checkpoint, run.compact, run.clean_up]
    weights = (10, 4, 1, 2, 2, 2)
    run.put()
    taken = run.chance.choices(steps, weights, k=STEPS - len(steps))
    # Each kind of step occurs.
    for number, step in enumerate([*taken, *run.chance.sample(steps, len(steps))]):
        step()
        expected = sorted(run.rows.values(), key=lambda row: row["key"])
        by_spark = spark.read.format("delta").load(str(run.path)).collect()
        read = {one.__name__: one(run.path) for one in (by_deltalake, by_polars, by_duckdb)}
        for name, rows in {**read, "by_spark": [row.asDict() for row in by_spark]}.items():
            found = sorted(rows, key=lambda row: row["key"])
            found = [{**row, "value": bytes(row["value"])} for row in found]
            assert found == expected, (SEED, number, step.__name__, name)
    assert run.seen.pop("vectors") == vectors
    assert all(run.seen.values()), run.seen
