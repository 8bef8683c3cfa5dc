"""What a history costs: merges with SCD type 2 beside those with type 1, in turn in one run.

``python -m benchmarks.history [--keys 4000] [--rows 350] [--batches 60] [--json FILE]``

Entries of a bucket with random keys are merged by the engine "delta-rs" into two tables, the same
batch into both: the newest entries (type 1), and their history (type 2). Every twentieth entry is a
DEL. The times are those of :func:`merge_changes`'s function for a batch that is in the driver, with
Spark's part of it. "Written" is the rows of all data files that the merges add, "closed" the
versions that the history has closed. Upkeep is off.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, QueryBuilder

from benchmarks.support.delta_merge import rows
from benchmarks.support.machine import machine
from benchmarks.support.spark_session import spark_session
from nats_stream_source.delta import merge_changes

_TYPES = (1, 2)
_UNCOUNTED = 10  # the first merges: Spark compiles, and the tables get their keys


def measure(keys: int, count: int, batches: int) -> dict[str, Any]:
    """The times and written rows of both types."""
    random = np.random.default_rng(7)
    with spark_session() as spark, tempfile.TemporaryDirectory() as directory:
        tables = {of: str(Path(directory) / f"type{of}") for of in _TYPES}
        mergers = {
            of: merge_changes(tables[of], engine="delta-rs", stored_as_scd_type=of, upkeep=None)
            for of in _TYPES
        }
        for of in _TYPES:
            mergers[of](spark.createDataFrame(rows(np.arange(keys), 1)))
        seconds: dict[int, list[float]] = {of: [] for of in _TYPES}
        revision = keys + 1
        for number in range(batches + _UNCOUNTED):
            chosen = random.choice(keys, count, replace=False)
            entries = rows(chosen, revision)
            revision += count
            deletes = np.where(np.arange(count) % 20 == 0, "DEL", "PUT")
            at = entries.column_names.index("operation")
            entries = entries.set_column(at, "operation", pa.array(deletes))
            frame = spark.createDataFrame(entries)
            for of in _TYPES if number % 2 else _TYPES[::-1]:
                begin = time.perf_counter()
                mergers[of](frame)
                if number >= _UNCOUNTED:
                    seconds[of].append(1000 * (time.perf_counter() - begin))
        result: dict[str, Any] = {"keys": keys, "rows": count, "batches": batches}
        for of in _TYPES:
            p50, p99 = np.percentile(seconds[of], [50, 99])
            result |= {f"p50_{of}": round(p50, 1), f"p99_{of}": round(p99, 1)}
            result[f"written_{of}"] = _written(tables[of])
        result["ratio"] = round(result["p50_2"] / result["p50_1"], 2)
        result["state"] = _written(f"{tables[2]}__cdc_state")
        result["closed"] = _closed(tables[2])
    return result


def _written(table: str) -> int:
    """The rows of all data files that commits have added, without those with another vector."""
    files: dict[str, int] = {}
    for entry in sorted(Path(table, "_delta_log").glob("*.json")):
        for line in entry.read_text().splitlines():
            add = json.loads(line).get("add")
            if add is not None:
                files.setdefault(add["path"], json.loads(add["stats"])["numRecords"])
    return sum(files.values())


def _closed(table: str) -> int:
    query = 'SELECT count("__END_AT") AS n FROM t'
    found = pa.table(QueryBuilder().register("t", DeltaTable(table)).execute(query))
    return int(pc.sum(found["n"]).as_py())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keys", type=int, default=4_000)
    parser.add_argument("--rows", type=int, default=350)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    host = machine()
    figures = measure(given.keys, given.rows, given.batches)
    text = json.dumps({"machine": host.as_dict(), "history": figures}, indent=1)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
