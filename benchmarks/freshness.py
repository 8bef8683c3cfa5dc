"""The freshness of a Delta table that follows a bucket: put → row visible to an independent reader.

A case is WAY:KEYS:RATE, a size a number of keys.

One process puts entries at a constant rate and notes the time of each put. A query merges them into
a table with ``merge_changes``, in a session of ``configure`` and with asynchronous logs, as
``follow`` starts it. A third process, without Spark, reads each new entry of the table's log and
the greatest revision of the files that it adds: every put up to it is then visible. The bare
``foreachBatch`` of the same run, which collects the rows on the driver as Arrow, shows the part of
the source and of Spark. The percentiles exclude the first quarter of the puts.

The way ``follow`` is the command without Spark, in a process of its own: also the time from its
start until its table has the bucket, its memory and CPU, and what readers of its table pay.

The second part merges batches of one size into tables of 10^4 to 10^7 keys with each engine, each
in a process of its own. ``benchmarks.commits`` has the memory.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.listener import StreamingQueryProgress

from benchmarks.support.bucket_data import SIZE, entries, fill_bucket
from benchmarks.support.delta_merge import ENGINES, MERGING, SIZES, measure_merge
from benchmarks.support.follower import (
    DEADLINE,
    Visible,
    latencies,
    measure_follower,
    put_values,
    watching,
)
from benchmarks.support.machine import in_process
from benchmarks.support.spark_session import spark_session
from nats_stream_source.delta import merge_changes
from nats_stream_source.delta.spark.follow import ASYNC_PROGRESS
from nats_stream_source.embedded import NatsServer

_FAST = ("foreachBatch", "driver")  # the first one does not merge
CASES = (
    *(f"{way}:{keys}:1000" for keys in (4_000, 100_000) for way in ("foreachBatch", *ENGINES)),
    *(f"{way}:{keys}:1000" for keys in (1_000_000, 10_000_000) for way in _FAST),
    *(f"{way}:{keys}:20000" for keys in (4_000, 1_000_000) for way in _FAST),
    *(f"follow:{keys}:1000" for keys in (4_000, 100_000, 1_000_000, 10_000_000)),
    "follow:100000:20000",
)
"""Spark's MERGE does not keep up with a large table."""

MAX_ROWS = 50_000  # of a micro-batch
_READ = (4_000, 100_000, 1_000_000)  # keys of followed tables whose readers are measured


def measure(
    spark: SparkSession,
    way: str,
    rate: int,
    keys: int,
    seconds: float,
    settings: Mapping[str, str] = ASYNC_PROGRESS,
) -> dict[str, Any]:
    """Follow a bucket of ``keys`` keys while ``rate`` entries a second are put for ``seconds``."""
    count = int(rate * seconds)
    arrived: Visible = []

    def take(batch: DataFrame, _: int) -> None:
        revisions = batch.select("key", "value", "revision").toArrow()["revision"]
        if len(revisions):
            arrived.append((time.time_ns(), max(revisions.to_pylist())))

    with NatsServer() as server, tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        table, times = f"{scratch}/table", Path(scratch, "times.npy")
        first = fill_bucket(server.port, "bench", entries(keys, keys, SIZE), history=64) + 1
        last = first + count - 1
        options = {"servers": server.url, "bucket": "bench", "includeHistory": "true"}
        source = spark.readStream.format("nats_kv").options(**options)
        frame = source.option("maxRowsPerTrigger", MAX_ROWS).load()
        follow = take if way == "foreachBatch" else merge_changes(table, engine=way)
        writer = frame.writeStream.foreachBatch(follow).options(**settings)
        query = writer.option("checkpointLocation", f"{scratch}/checkpoint").start()
        try:
            query.processAllAvailable()
            before = len(query.recentProgress)
            with watching(way, table, last) as seen:
                in_process(put_values, server.port, rate, keys, count, times)
                until = time.monotonic() + DEADLINE
                while way == "foreachBatch" and arrived[-1][1] < last:
                    if time.monotonic() > until or query.exception() is not None:
                        break
                    time.sleep(0.001)
                visible = arrived if way == "foreachBatch" else seen()
            reports = query.recentProgress[before:]
        finally:
            query.stop()
        if not visible or visible[-1][1] < last:
            raise RuntimeError(f"not all of {count:,} puts became visible: {query.exception()}")
        taken = latencies(np.load(times), first, visible)
    return {
        "way": way,
        "keys": keys,
        **summary(rate, taken, reports),
    }


def summary(
    rate: int, taken: np.ndarray, reports: Sequence[StreamingQueryProgress]
) -> dict[str, Any]:
    """The percentiles of latencies in milliseconds, and the size and gap of micro-batches."""
    begun = [
        datetime.fromisoformat(one["timestamp"]).timestamp()
        for one in reports
        if one["numInputRows"]
    ]
    p50, p99 = np.percentile(taken[len(taken) // 4 :], [50, 99])
    return {
        "rate": rate,
        "p50": float(p50),
        "p99": float(p99),
        "gap": float(np.median(np.diff(begun))) * 1e3,
    }


def measured(spark: SparkSession, way: str, rate: int, keys: int, seconds: float) -> dict[str, Any]:
    """One case."""
    if way != "follow":
        return measure(spark, way, rate, keys, seconds)
    read = keys in _READ and rate == 1_000
    return measure_follower(rate, keys, seconds, spark if read else None)


def run(
    case: Sequence[str] = CASES, seconds: float = 20.0, size: Sequence[int] = SIZES
) -> dict[str, Any]:
    """The figures of all cases, and of the merges into tables of all sizes."""
    cases = [one.split(":") for one in case]
    with spark_session(configure=MERGING) as s:
        # The first micro-batches of a session are slow.
        for way in dict.fromkeys(way for way, _, _ in cases if way != "follow"):
            measure(s, way, 500, 1_000, 4)
        fresh = [measured(s, way, int(rate), int(keys), seconds) for way, keys, rate in cases]
    merges = [in_process(measure_merge, engine, one) for one in size for engine in ENGINES]
    beside = [one for one in fresh if one["way"] == "driver"]  # of the same run as ``follow``
    return {"freshness": fresh, "beside": beside, "merge": merges}
