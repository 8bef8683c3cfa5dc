"""Look-ups of entries by the keys of rows, beside a join with the bucket that Spark reads.

The keys of the rows are spread over the bucket, so that each record batch of 10,000 rows has 10,000
distinct keys. Measured are

- one task without Spark: look-ups per second, CPU time of the task and of the server for each;
- in Spark, with a sink that drops the rows: ``lookup``, and a join with
  ``spark.read.format("nats_kv")``, in turns, for few and many rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from operator import itemgetter
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from benchmarks.support.bucket_data import entries, fill_bucket
from benchmarks.support.machine import Stopwatch
from benchmarks.support.spark_session import spark_session
from nats_stream_source import configure, lookup
from nats_stream_source.embedded import NatsServer
from nats_stream_source.options.reading import lookup_options
from nats_stream_source.spark.enrichment.entries import Lookup, with_entries
from nats_stream_source.spark.runner import close_cached_runners

BATCH = 10_000
"""Rows of a record batch, as Spark makes them by default."""

_STEP = 7919  # prime, so that the keys of successive rows are spread and do not repeat


def task_run(server: NatsServer, bucket: str, keys: int, batches: int) -> dict[str, Any]:
    """Look-ups a second of one task without Spark, and CPU nanoseconds for each."""
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
    run = watch.run(count)
    return {"keys": keys, "rows": count, **asdict(run)}


def _looked_up(rows: DataFrame, server: NatsServer, bucket: str) -> DataFrame:
    return lookup(rows, bucket=bucket, key="k", servers=server.url)


def _joined(rows: DataFrame, server: NatsServer, bucket: str) -> DataFrame:
    options = {"servers": server.url, "bucket": bucket, "ignoreDeletes": "true"}
    of_bucket = rows.sparkSession.read.format("nats_kv").options(**options).load()
    return rows.join(of_bucket.selectExpr("key AS k", "value"), "k", "left")


_WAYS = (_looked_up, _joined)


def spark_run(
    spark: SparkSession, server: NatsServer, bucket: str, keys: int, rows: int, rounds: int
) -> dict[str, Any]:
    """Seconds of both ways, medians of the rounds; each run plans and reads for itself."""
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
    looked_up, joined = (statistics.median(seconds[way]) for way in _WAYS)
    return {"keys": keys, "rows": rows, "lookup": looked_up, "join": joined}


def run(
    keys: Sequence[int] = (100_000, 1_000_000),
    rows: Sequence[int] = (BATCH, 100_000, 1_000_000),
    batches: int = 30,
    rounds: int = 3,
) -> dict[str, Any]:
    """All figures, on a server that is started for them."""
    with NatsServer() as server:
        for size in keys:
            fill_bucket(server.port, f"b{size}", entries(size, size), history=1)
        tasks = [
            max(
                (task_run(server, f"b{size}", size, batches) for _ in range(rounds)),
                key=itemgetter("rate"),
            )
            for size in keys
        ]
        with spark_session(configure=configure) as session:
            runs = [
                spark_run(session, server, f"b{size}", size, count, rounds)
                for size in keys
                for count in rows
            ]
    return {"tasks": tasks, "spark": runs}
