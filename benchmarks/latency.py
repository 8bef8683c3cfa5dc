"""The latency of an entry from its put to ``foreachBatch`` and to a table, beside Kafka's source.

``python -m benchmarks.latency [--rate 100 ...] [--seconds 20] [--no-kafka] [--json FILE]``

Another process puts entries at a constant rate, each with the time of its put. A query with the
default trigger passes micro-batches to ``foreachBatch``, which collects the rows on the driver as
Arrow and reads the clock. The sources take turns in one session: ``nats_kv``, and Spark's own Kafka
source of a topic with one partition, on its broker. A third query merges the entries of a bucket
into a table of 4,000 keys, and a process without Spark notes when each revision is visible.

This is measured in two sessions: as Spark comes, with ``merge_changes``; and with ``configure``,
asynchronous logs (for Kafka's source, too) and ``follow``. The percentiles exclude the first
quarter of the entries. ``gap`` is the median time between two micro-batches with rows.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.listener import StreamingQueryProgress

from benchmarks.freshness import latencies, put_values, watching
from benchmarks.support.bucket_data import entries, fill_bucket
from benchmarks.support.kafka import (
    KafkaBroker,
    create_topic,
    start_kafka,
    steady_producer,
)
from benchmarks.support.machine import OtherProcesses
from benchmarks.support.output import finish
from benchmarks.support.spark_session import spark_session
from benchmarks.support.steady_puts import put_steadily
from nats_stream_source.delta import configure, follow, merge_changes
from nats_stream_source.delta.spark.follow import ASYNC_PROGRESS
from nats_stream_source.embedded import NatsServer

RATES = (100, 1_000, 20_000)
NATS, KAFKA, TABLE = "nats_kv", "kafka", "nats_kv to table"
DEFAULTS, CONFIGURED = "defaults", "configured"
KEYS = 4_000  # of the table
_DEADLINE = 60.0  # seconds for the last entries to arrive


@dataclass(frozen=True, slots=True)
class Result:
    """At ``rate`` puts a second: milliseconds, and how large the micro-batches were."""

    way: str
    source: str
    rate: int
    entries: int
    p50: float
    p99: float
    gap: float
    batches: int
    others: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def put_times(port: int, rate: int, count: int) -> None:
    """Put ``count`` entries, ``rate`` a second, each with the time in ns as its value."""

    def put(first: int, last: int, now: int) -> list[bytes]:
        value = now.to_bytes(8, "big")
        return [b"PUB $KV.bench.key.%d 8\r\n%s\r\n" % (i % 1000, value) for i in range(first, last)]

    put_steadily(port, rate, count, put)


def measure_bucket(spark: SparkSession, way: str, rate: int, seconds: float) -> Result:
    """Follow a bucket of 1,000 keys while ``rate`` entries a second are put for ``seconds``."""
    count = int(rate * seconds)
    with NatsServer() as server:
        fill_bucket(server.port, "bench", iter([("key.0", b"12345678")]), history=64)
        options = {"servers": server.url, "bucket": "bench", "updatesOnly": "true"}

        def write() -> None:
            _run_process(put_times, server.port, rate, count)

        return _follow(spark, way, NATS, options, rate, count, write)


def measure_topic(
    spark: SparkSession, broker: KafkaBroker, way: str, rate: int, seconds: float
) -> Result:
    """Follow a topic while ``rate`` records a second are sent for ``seconds``."""
    count, topic = int(rate * seconds), f"latency-{way}-{rate}"
    create_topic(spark, broker, topic, 1)
    options = {
        "kafka.bootstrap.servers": broker.servers,
        "subscribe": topic,
        "startingOffsets": "latest",
    }

    def write() -> None:
        subprocess.run(steady_producer(broker, topic, rate, count), check=True)

    return _follow(spark, way, KAFKA, options, rate, count, write)


def measure_table(spark: SparkSession, way: str, rate: int, seconds: float) -> Result:
    """Merge a bucket into a table while ``rate`` entries a second are put for ``seconds``."""
    count = int(rate * seconds)
    with NatsServer() as server, tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        table, times = f"{scratch}/table", Path(scratch, "times.npy")
        first = fill_bucket(server.port, "bench", entries(KEYS, KEYS, 128), history=64) + 1
        source = spark.readStream.format("nats_kv").options(servers=server.url, bucket="bench")
        frame = source.load()
        if way == CONFIGURED:
            query = follow(frame, table, checkpoint=f"{scratch}/checkpoint")
        else:
            writer = frame.writeStream.foreachBatch(merge_changes(table))
            query = writer.option("checkpointLocation", f"{scratch}/checkpoint").start()
        try:
            query.processAllAvailable()
            before = len(query.recentProgress)
            with OtherProcesses() as others, watching(TABLE, table, first + count - 1) as seen:
                _run_process(put_values, server.port, rate, KEYS, count, times)
                visible = seen()
            reports = query.recentProgress[before:]
        finally:
            query.stop()
        if not visible or visible[-1][1] < first + count - 1:
            raise RuntimeError(f"not all of {count:,} puts became visible: {query.exception()}")
        taken = latencies(np.load(times), first, visible)
    return _result(way, TABLE, rate, taken, reports, others)


def _run_process(target: Callable[..., None], *arguments: object) -> None:
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    process.join()


def _follow(
    spark: SparkSession,
    way: str,
    source: str,
    options: Mapping[str, str],
    rate: int,
    count: int,
    write: Callable[[], None],
) -> Result:
    arrived: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []

    def take(frame: DataFrame, _: int) -> None:
        values = frame.select("value").toArrow().column(0).combine_chunks()
        now = time.time_ns()
        if len(values):
            put = np.frombuffer(values.buffers()[2], ">i8")[: len(values)]
            arrived.append(now - put.astype(np.int64))

    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        frame = spark.readStream.format(source).options(**options).load()
        writer = frame.writeStream.foreachBatch(take)
        if way == CONFIGURED:
            writer = writer.options(**ASYNC_PROGRESS)
        query = writer.option("checkpointLocation", f"{scratch}/checkpoint").start()
        try:
            query.processAllAvailable()
            with OtherProcesses() as others:
                write()
                deadline = time.monotonic() + _DEADLINE
                while sum(map(len, arrived)) < count and time.monotonic() < deadline:
                    query.processAllAvailable()
            reports = query.recentProgress
        finally:
            query.stop()
    taken = np.concatenate(arrived) if arrived else np.array([], np.int64)
    if len(taken) != count:
        raise RuntimeError(f"{len(taken):,} entries arrived of {count:,}")
    return _result(way, source, rate, taken / 1e6, reports, others)


def _result(
    way: str,
    source: str,
    rate: int,
    taken: np.ndarray,
    reports: Sequence[StreamingQueryProgress],
    others: OtherProcesses,
) -> Result:
    """The result of latencies in milliseconds."""
    reports = [one for one in reports if one["numInputRows"]]
    begun = [datetime.fromisoformat(one["timestamp"]).timestamp() for one in reports]
    p50, p99 = np.percentile(taken[len(taken) // 4 :], [50, 99])
    return Result(
        way,
        source,
        rate,
        len(taken),
        float(p50),
        float(p99),
        float(np.median(np.diff(begun))) * 1e3,
        len(reports),
        others.as_dict(),
    )


def measure(
    rates: Sequence[int], seconds: float, *, kafka: bool, report: Callable[[str], None]
) -> list[Result]:
    """Both sessions, in each of them all sources in turns, at each rate."""
    results = []
    with ExitStack() as stack:
        jars, broker = start_kafka(stack, report) if kafka else ([], None)
        for way, settings in ((DEFAULTS, _unchanged), (CONFIGURED, configure)):
            with spark_session(jars, configure=settings) as spark:
                # The first micro-batches of a session are slow.
                measure_bucket(spark, way, 500, 4)
                for rate in rates:
                    results.append(measure_bucket(spark, way, rate, seconds))
                    if broker is not None:
                        results.append(measure_topic(spark, broker, way, rate, seconds))
                    results.append(measure_table(spark, way, rate, seconds))
    return results


def _unchanged(builder: SparkSession.Builder) -> SparkSession.Builder:
    return builder


def ratio(one: Result, results: Sequence[Result]) -> float | None:
    """The median over that of Kafka in the same session at the same rate; None without it."""
    if one.source != NATS:
        return None
    kafka = [
        other.p50
        for other in results
        if (other.way, other.source, other.rate) == (one.way, KAFKA, one.rate)
    ]
    return one.p50 / kafka[0] if kafka else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write JSON if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", type=int, action="append", help="puts per second (repeatable)")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--no-kafka", action="store_true", help="without Kafka")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    results = measure(
        options.rate or RATES, options.seconds, kafka=not options.no_kafka, report=print
    )
    shown = [one.as_dict() | {"ratio": ratio(one, results)} for one in results]
    finish("latency", {"latency": shown}, options.json)


if __name__ == "__main__":
    main()
