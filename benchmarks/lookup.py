"""Look-ups of entries by the keys of rows, beside a join with the bucket that Spark reads.

``python -m benchmarks.lookup [--quick] [--json FILE] [--keys 100000 ...] [--no-spark]``

The keys of the rows are spread over the bucket, so that each record batch of 10,000 rows has 10,000
distinct keys. Measured are

- one task without Spark: look-ups per second, CPU time of the task and of the server for each;
- in Spark, with a sink that drops the rows: ``lookup``, and a join with
  ``spark.read.format("nats_kv")``, in turns, for few and many rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from benchmarks.support.bucket_data import entries, fill_bucket
from benchmarks.support.machine import Stopwatch
from benchmarks.support.output import finish
from benchmarks.support.spark_session import spark_session
from nats_stream_source import configure, lookup
from nats_stream_source.embedded import NatsServer
from nats_stream_source.options.lookup import lookup_options
from nats_stream_source.spark.enrichment.entries import Lookup, with_entries
from nats_stream_source.spark.runner import close_cached_runners

BATCH = 10_000
"""Rows of a record batch, as Spark makes them by default."""

_STEP = 7919  # prime, so that the keys of successive rows are spread and do not repeat


@dataclass(frozen=True, slots=True)
class TaskRun:
    """One task without Spark: look-ups per second, and CPU nanoseconds for each."""

    keys: int
    rows: int
    rate: float
    own_cpu: float
    server_cpu: float


@dataclass(frozen=True, slots=True)
class SparkRun:
    """Seconds of ``lookup`` and of the join, for the same rows: medians of the rounds."""

    keys: int
    rows: int
    lookup: float
    join: float


def task_run(server: NatsServer, bucket: str, keys: int, batches: int) -> TaskRun:
    """Look up the keys of so many record batches in this process."""
    task = Lookup(lookup_options(bucket, {"servers": server.url}), 0, {"value": "value"})
    rows = [
        pa.record_batch({"k": [f"key.{i * _STEP % keys}" for i in range(first, first + BATCH)]})
        for first in range(0, batches * BATCH, BATCH)
    ]
    try:
        for _ in with_entries(iter(rows[:1]), task):
            pass  # connects
        with Stopwatch(server.pid) as watch:
            found = [len(one) - one["value"].null_count for one in with_entries(iter(rows), task)]
    finally:
        close_cached_runners()
    count = batches * BATCH
    if sum(found) != count:
        raise RuntimeError(f"found {sum(found)} entries, expected {count}")
    per_row = 1e9 / count
    return TaskRun(
        keys, count, count / watch.wall, watch.own_cpu * per_row, watch.other_cpu * per_row
    )


def _looked_up(rows: DataFrame, server: NatsServer, bucket: str) -> DataFrame:
    return lookup(rows, bucket=bucket, key="k", servers=server.url)


def _joined(rows: DataFrame, server: NatsServer, bucket: str) -> DataFrame:
    options = {"servers": server.url, "bucket": bucket, "ignoreDeletes": "true"}
    of_bucket = rows.sparkSession.read.format("nats_kv").options(**options).load()
    return rows.join(of_bucket.selectExpr("key AS k", "value"), "k", "left")


_WAYS = (_looked_up, _joined)


def spark_run(
    spark: SparkSession, server: NatsServer, bucket: str, keys: int, rows: int, rounds: int
) -> SparkRun:
    """Both ways in turns; each run plans and reads for itself, as a job does."""
    source = spark.range(rows).selectExpr("id", f"concat('key.', id * {_STEP} % {keys}) AS k")
    seconds: dict[Any, list[float]] = {way: [] for way in _WAYS}
    for way in _WAYS:
        missing = way(source, server, bucket).where("value IS NULL").count()
        if missing:
            raise RuntimeError(f"{missing} of {rows} rows are without an entry")
    for _ in range(rounds):
        for way in _WAYS:
            began = time.perf_counter()
            way(source, server, bucket).write.format("noop").mode("overwrite").save()
            seconds[way].append(time.perf_counter() - began)
    return SparkRun(keys, rows, *(statistics.median(seconds[way]) for way in _WAYS))


def measure(
    sizes: Sequence[int], rows: Sequence[int], batches: int, rounds: int, *, spark: bool
) -> tuple[list[TaskRun], list[SparkRun]]:
    """All figures, on a server that is started for them."""
    with NatsServer() as server:
        for keys in sizes:
            fill_bucket(server.port, f"b{keys}", entries(keys, keys), history=1)
        tasks = [
            max((task_run(server, f"b{keys}", keys, batches) for _ in range(rounds)), key=_rate)
            for keys in sizes
        ]
        if not spark:
            return tasks, []
        with spark_session(configure=configure) as session:
            runs = [
                spark_run(session, server, f"b{keys}", keys, count, rounds)
                for keys in sizes
                for count in rows
            ]
    return tasks, runs


def _rate(run: TaskRun) -> float:
    return run.rate


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write JSON if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small bucket, few rounds")
    parser.add_argument("--keys", type=int, action="append", help="size of a bucket; repeatable")
    parser.add_argument("--no-spark", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    sizes = options.keys or ([20_000] if options.quick else [100_000, 1_000_000])
    if min(sizes) < BATCH or any(size % _STEP == 0 for size in sizes):
        parser.error(f"at least {BATCH} keys, not a multiple of {_STEP}")
    rows = [BATCH, 100_000] if options.quick else [BATCH, 100_000, 1_000_000]
    batches, rounds = (5, 2) if options.quick else (30, 3)
    tasks, runs = measure(sizes, rows, batches, rounds, spark=not options.no_spark)
    results = {"tasks": [asdict(one) for one in tasks], "spark": [asdict(one) for one in runs]}
    finish("lookup", results, options.json)


if __name__ == "__main__":
    main()
