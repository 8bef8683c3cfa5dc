"""What a history costs: tables of SCD type 2 beside those of type 1, in turn in one run.

``python -m benchmarks.history [--keys 4000] [--rows 350] [--batches 60] [--rounds 3]
[--seconds 15] [--rate 1000] [--json FILE]``

**Merges.** Entries of a bucket with random keys are merged by the driver into two
tables, the same batch into both: the newest entries (type 1), and their history (type 2). Every
twentieth entry is a DEL. The times are those of :func:`merge_changes`'s function for a batch that
is in the driver, with Spark's part of it. "Written" is the rows of all data files that the merges
add, "closed" the versions that the history has closed. Upkeep is off.

**Put to row.** As :mod:`benchmarks.freshness`: a query follows a bucket into a table of one of the
types, and another process looks for the rows. The median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import SparkSession

from benchmarks.freshness import measure as measure_freshness
from benchmarks.freshness import merging_session
from benchmarks.support.delta_merge import rows
from benchmarks.support.output import finish
from benchmarks.support.spark_session import spark_session
from nats_stream_source.delta import merge_changes

_TYPES = (1, 2)
_WAYS = {1: "driver", 2: "history"}  # of benchmarks.freshness
_UNCOUNTED = 10  # the first merges: Spark compiles, and the tables get their keys


def measure(spark: SparkSession, keys: int, count: int, batches: int) -> dict[str, Any]:
    """The times of merges, and the written rows, of both types."""
    random = np.random.default_rng(7)
    with tempfile.TemporaryDirectory() as directory:
        tables = {of: str(Path(directory) / f"type{of}") for of in _TYPES}
        mergers = {
            of: merge_changes(tables[of], engine="driver", stored_as_scd_type=of, upkeep=None)
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


def put_to_row(
    spark: SparkSession, keys: int, rate: int, seconds: float, rounds: int
) -> dict[str, Any]:
    """The times from put to visible row of both types."""
    for way in _WAYS.values():  # the first micro-batches of a session are slow
        measure_freshness(spark, way, 500, 1_000, 4)
    found: dict[int, list[tuple[float, float]]] = {of: [] for of in _TYPES}
    for number in range(rounds):
        for of in _TYPES if number % 2 else _TYPES[::-1]:
            one = measure_freshness(spark, _WAYS[of], rate, keys, seconds)
            found[of].append((one.p50, one.p99))
    result: dict[str, Any] = {"rate": rate, "seconds": seconds, "rounds": rounds}
    for of in _TYPES:
        p50, p99 = (statistics.median(each) for each in zip(*found[of], strict=True))
        result |= {f"visible_p50_{of}": round(p50, 1), f"visible_p99_{of}": round(p99, 1)}
    ratio = result["visible_p50_2"] / result["visible_p50_1"]
    return {**result, "visible_ratio": round(ratio, 2)}


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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--rate", type=int, default=1_000)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    with spark_session(configure=merging_session) as spark:
        figures = measure(spark, given.keys, given.rows, given.batches)
        figures |= put_to_row(spark, given.keys, given.rate, given.seconds, given.rounds)
    print(json.dumps(figures, indent=1))
    finish("history", {"history": figures}, given.json)


if __name__ == "__main__":
    main()
