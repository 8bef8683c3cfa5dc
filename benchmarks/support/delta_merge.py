"""The time of one merge against the size of the table, for each engine.

Each measurement runs in a process of its own, so that none starts with what another has loaded:
``python -m benchmarks.support.delta_merge ENGINE KEYS``.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, WriterProperties, write_deltalake

from benchmarks.support.spark_session import spark_session
from nats_stream_source.delta import Upkeep, configure, merge_changes
from nats_stream_source.delta.driver.engine import DriverEngine, opened_table
from nats_stream_source.delta.driver.table import OpenedTable
from nats_stream_source.delta.limits import IndexLimit
from nats_stream_source.delta.rules.events import EventBatch, EventShape, EventTable
from nats_stream_source.delta.rules.layout import Layout

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
ENGINES: dict[str, dict[str, Any]] = {
    "driver": {"engine": "driver"},
    "driver-without-vectors": {"engine": "driver", "deletion_vectors": False},
    "spark": {"engine": "spark"},
}
"""Arguments of ``merge`` and ``merge_changes``, by name."""

BATCH = 5_000  # rows of a merge
ROUNDS = 5
_SPARK_ROUNDS = 2  # after one that is not counted
_CHUNK = 1_000_000
_CREATED = datetime(2026, 1, 1, tzinfo=timezone.utc)
_VALUE = 128  # bytes


@dataclass(frozen=True, slots=True)
class MergeResult:
    """Seconds of a merge of BATCH rows with random keys.

    Attributes:
        engine: of ``ENGINES``.
        table_bytes: size of the table's live data files.
    """

    engine: str
    keys: int
    rows: int
    median: float
    slowest: float
    table_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def rows(numbers: np.ndarray, revision: int) -> pa.Table:
    """Rows of a table for the keys of these numbers; their values are random bytes."""
    count = len(numbers)
    values = np.random.default_rng(revision).integers(0, 256, count * _VALUE, np.uint8).tobytes()
    offsets = pa.py_buffer(np.arange(0, (count + 1) * _VALUE, _VALUE, np.int32))
    created = pa.scalar(_CREATED, pa.timestamp("us", "UTC"))
    return pa.table(
        {
            "bucket": pa.array(["bench"] * count, pa.string()),
            "key": pc.binary_join_element_wise("key.", pa.array(numbers).cast(pa.string()), ""),
            "value": pa.Array.from_buffers(
                pa.binary(), count, [None, offsets, pa.py_buffer(values)]
            ),
            "revision": pa.array(np.arange(revision, revision + count), pa.int64()),
            "created": pa.repeat(created, count),
            "operation": pa.array(["PUT"] * count, pa.string()),
            "stream_created": pa.repeat(created, count),
        }
    )


def measure_merge(engine: str, keys: int) -> MergeResult:
    """Measure in another process."""
    command = [sys.executable, "-m", "benchmarks.support.delta_merge", engine, str(keys)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return MergeResult(**json.loads(done.stdout.splitlines()[-1]))


def merge_rows(
    opened: OpenedTable, batch: pa.Table, upkeep: Upkeep, *, vectors: bool = True
) -> None:
    """Merge rows of :func:`rows` without Spark, into a table that is created if need be."""
    layout = Layout.of_entries(batch.schema.names, "remove")
    shape = EventShape(batch.schema, layout, computed=True)
    engine = DriverEngine(opened, vectors, IndexLimit())
    engine.merge(EventBatch(shape, EventTable(batch)), upkeep)


def _create(engine: str, path: str, keys: int) -> None:
    """Create a table of so many keys."""
    if engine != "spark":
        vectors = ENGINES[engine].get("deletion_vectors", True)
        merge_rows(opened_table(path, path), rows(np.arange(0), 1), Upkeep(), vectors=vectors)

    def parts() -> Iterator[pa.RecordBatch]:
        for start in range(0, keys, _CHUNK):
            part = rows(np.arange(start, min(start + _CHUNK, keys)), start + 1)
            yield from part.to_batches()

    source = pa.RecordBatchReader.from_batches(rows(np.arange(1), 1).schema, parts())
    properties = WriterProperties(compression="SNAPPY")
    write_deltalake(path, source, mode="append", writer_properties=properties)


def _measure(engine: str, keys: int) -> MergeResult:
    seconds = []
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        path = f"{scratch}/table"
        # In another process: it needs more memory than a merge.
        creation = multiprocessing.get_context("spawn").Process(
            target=_create, args=(engine, path, keys)
        )
        creation.start()
        creation.join()
        chance = np.random.default_rng(2)
        with spark_session(configure=partial(configure, delta=True, small_machine=True)) as s:
            merge = merge_changes(path, **ENGINES[engine])
            for turn in range(_SPARK_ROUNDS + 1 if engine == "spark" else ROUNDS):
                numbers = chance.choice(keys, BATCH, replace=False)
                batch = s.createDataFrame(rows(numbers, (turn + 1) * keys)).persist()
                batch.count()
                began = time.perf_counter()
                merge(batch, turn)
                seconds.append(time.perf_counter() - began)
        size = sum(pa.table(DeltaTable(path).get_add_actions())["size_bytes"].to_pylist())
    counted = seconds[1:]
    return MergeResult(
        engine,
        keys,
        BATCH,
        float(np.median(counted)),
        max(counted),
        size,
    )


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], int(sys.argv[2])).as_dict()))
