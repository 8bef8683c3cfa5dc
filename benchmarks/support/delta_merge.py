"""The time of one merge against the size of the table, for each engine."""

from __future__ import annotations

import tempfile
import time
from datetime import datetime, timezone
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import WriterProperties, write_deltalake

from benchmarks.support.machine import in_process
from benchmarks.support.spark_session import spark_session
from nats_stream_source.delta import Engine, Upkeep, configure, merge_changes
from nats_stream_source.delta.driver.storage import TableStorage
from nats_stream_source.delta.driver.table import DriverTable
from nats_stream_source.delta.rules.events import EventBatch, EventShape
from nats_stream_source.delta.rules.layout import Layout

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
ENGINES: tuple[Engine, ...] = ("driver", "spark")
MERGING = partial(configure, delta=True, small_machine=True)  # the session of queries that merge
BATCH = 5_000  # rows of a merge
ROUNDS = 5
_SPARK_ROUNDS = 2  # after one that is not counted
_CHUNK = 1_000_000
_CREATED = datetime(2026, 1, 1, tzinfo=timezone.utc)
_VALUE = 128  # bytes


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


def driver_table(path: str) -> DriverTable:
    """The table of a path as a query without Spark changes it, with deletion vectors."""
    return DriverTable(TableStorage(path, path), True)


def merge_rows(table: DriverTable, batch: pa.Table, upkeep: Upkeep) -> None:
    """Merge rows of :func:`rows` without Spark, into a table that is created if need be."""
    layout = Layout.of_entries(batch.schema.names, "remove")
    shape = EventShape(batch.schema, layout, computed=True)
    table.merge(EventBatch.in_memory(shape, batch), upkeep)


def create(path: str, keys: int, engine: Engine = "driver") -> None:
    """Create a table of so many keys for an engine."""
    if engine == "driver":
        merge_rows(driver_table(path), rows(np.arange(0), 1), Upkeep())
    parts = (
        batch
        for start in range(0, keys, _CHUNK)
        for batch in rows(np.arange(start, min(start + _CHUNK, keys)), start + 1).to_batches()
    )
    source = pa.RecordBatchReader.from_batches(rows(np.arange(1), 1).schema, parts)
    properties = WriterProperties(compression="SNAPPY")
    write_deltalake(path, source, mode="append", writer_properties=properties)


def measure_merge(engine: Engine, keys: int) -> dict[str, Any]:
    """Seconds of a merge of BATCH rows with random keys."""
    seconds = []
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        path = f"{scratch}/table"
        # In another process: it needs more memory than a merge.
        in_process(create, path, keys, engine)
        chance = np.random.default_rng(2)
        with spark_session(configure=MERGING) as s:
            merge = merge_changes(path, engine=engine)
            for turn in range(_SPARK_ROUNDS + 1 if engine == "spark" else ROUNDS):
                numbers = chance.choice(keys, BATCH, replace=False)
                batch = s.createDataFrame(rows(numbers, (turn + 1) * keys)).persist()
                batch.count()
                began = time.perf_counter()
                merge(batch, turn)
                seconds.append(time.perf_counter() - began)
    return {
        "engine": engine,
        "keys": keys,
        "rows": BATCH,
        "median": float(np.median(seconds[1:])),
    }
