"""The latency of an entry from its put to ``foreachBatch``, beside Spark's Kafka source.

``python -m benchmarks.latency [--rate 100 ...] [--seconds 20] [--no-kafka] [--json FILE]``

Another process puts entries at a constant rate, each with the time of its put. A query with the
default trigger passes micro-batches to ``foreachBatch``, which collects the rows on the driver as
Arrow and reads the clock. The sources take turns in one session: ``nats_kv``, and Spark's own Kafka
source of a topic with one partition and its default settings, on its broker. The percentiles
exclude the first quarter of the entries. ``parts`` are the medians of the durations that Spark
reports for a micro-batch with rows.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import DataFrame, SparkSession
from rich.console import Console

from benchmarks.support.bucket_data import fill_bucket
from benchmarks.support.kafka import (
    KafkaBroker,
    create_topic,
    start_kafka,
    steady_producer,
)
from benchmarks.support.machine import OtherProcesses, machine
from benchmarks.support.output import finish
from benchmarks.support.spark_session import spark_session
from benchmarks.support.steady_puts import put_steadily
from nats_stream_source.embedded import NatsServer

RATES = (100, 1_000, 10_000)
NATS, KAFKA = "nats_kv", "kafka"
_DEADLINE = 60.0  # seconds for the last entries to arrive
_PARTS = ("latestOffset", "queryPlanning", "walCommit", "addBatch", "commitOffsets")


@dataclass(frozen=True, slots=True)
class Result:
    """At ``rate`` puts a second: milliseconds, and how large the micro-batches were."""

    source: str
    rate: int
    entries: int
    p50: float
    p99: float
    batches: int
    parts: dict[str, float]
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


def measure_bucket(spark: SparkSession, rate: int, seconds: float) -> Result:
    """Follow a bucket of 1,000 keys while ``rate`` entries a second are put for ``seconds``."""
    count = int(rate * seconds)
    with NatsServer() as server:
        fill_bucket(server.port, "bench", iter([("key.0", b"12345678")]), history=64)
        options = {"servers": server.url, "bucket": "bench", "updatesOnly": "true"}

        def write() -> None:
            spawned = multiprocessing.get_context("spawn")
            writing = spawned.Process(target=put_times, args=(server.port, rate, count))
            writing.start()
            writing.join()

        return _follow(spark, NATS, options, rate, count, write)


def measure_topic(spark: SparkSession, broker: KafkaBroker, rate: int, seconds: float) -> Result:
    """Follow a topic while ``rate`` records a second are sent for ``seconds``."""
    count, topic = int(rate * seconds), f"latency{rate}"
    create_topic(spark, broker, topic, 1)
    options = {
        "kafka.bootstrap.servers": broker.servers,
        "subscribe": topic,
        "startingOffsets": "latest",
    }

    def write() -> None:
        subprocess.run(steady_producer(broker, topic, rate, count), check=True)

    return _follow(spark, KAFKA, options, rate, count, write)


def _follow(
    spark: SparkSession,
    source: str,
    options: Mapping[str, str],
    rate: int,
    count: int,
    write: Callable[[], None],
) -> Result:
    latencies: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []

    def take(frame: DataFrame, _: int) -> None:
        values = frame.select("value").toArrow().column(0).combine_chunks()
        now = time.time_ns()
        if len(values):
            put = np.frombuffer(values.buffers()[2], ">i8")[: len(values)]
            latencies.append(now - put.astype(np.int64))

    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        frame = spark.readStream.format(source).options(**options).load()
        writer = frame.writeStream.foreachBatch(take)
        query = writer.option("checkpointLocation", f"{scratch}/checkpoint").start()
        try:
            query.processAllAvailable()
            with OtherProcesses() as others:
                write()
                deadline = time.monotonic() + _DEADLINE
                while sum(map(len, latencies)) < count and time.monotonic() < deadline:
                    query.processAllAvailable()
            reports = [one["durationMs"] for one in query.recentProgress if one["numInputRows"]]
        finally:
            query.stop()
    taken = np.concatenate(latencies) if latencies else np.array([], np.int64)
    if len(taken) != count:
        raise RuntimeError(f"{len(taken):,} entries arrived of {count:,}")
    p50, p99 = np.percentile(taken[count // 4 :], [50, 99]) / 1e6
    parts = {part: float(statistics.median(one.get(part, 0) for one in reports)) for part in _PARTS}
    return Result(
        source, rate, count, float(p50), float(p99), len(latencies), parts, others.as_dict()
    )


def measure(
    rates: Sequence[int], seconds: float, *, kafka: bool, report: Callable[[str], None]
) -> list[Result]:
    """Both sources in turns, at each rate."""
    with ExitStack() as stack:
        jars, broker = start_kafka(stack, report) if kafka else ([], None)
        spark = stack.enter_context(spark_session(jars))
        results = []
        for rate in rates:
            results.append(measure_bucket(spark, rate, seconds))
            if broker is not None:
                results.append(measure_topic(spark, broker, rate, seconds))
        return results


def ratio(one: Result, results: Sequence[Result]) -> float | None:
    """The median over that of Kafka at the same rate; None for Kafka itself, or without it."""
    if one.source == KAFKA:
        return None
    others = [other.p50 for other in results if (other.source, other.rate) == (KAFKA, one.rate)]
    return one.p50 / others[0] if others else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write JSON if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", type=int, action="append", help="puts per second (repeatable)")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--no-kafka", action="store_true", help="measure nats_kv only")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    host = machine()
    console.print(str(host))
    results = measure(
        options.rate or RATES, options.seconds, kafka=not options.no_kafka, report=console.print
    )
    shown = [one.as_dict() | {"ratio": ratio(one, results)} for one in results]
    finish("latency", host, {"latency": shown}, options.json)


if __name__ == "__main__":
    main()
