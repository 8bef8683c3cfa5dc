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
import json
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
from rich.table import Table

from benchmarks.support.bucket_data import fill_bucket
from benchmarks.support.kafka import (
    KafkaBroker,
    KafkaUnavailableError,
    create_topic,
    source_jars,
    steady_producer,
)
from benchmarks.support.machine import OtherProcesses, machine
from benchmarks.support.raw_connection import RawConnection
from benchmarks.support.spark_session import spark_session
from nats_stream_source.embedded import NatsServer

RATES = (100, 1_000, 10_000)
NATS, KAFKA = "nats_kv", "kafka"
_TICK = 0.001  # seconds
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


def put_steadily(port: int, rate: int, count: int) -> None:
    """Put ``count`` entries, ``rate`` a second, each with the time in ns as its value."""
    with RawConnection(port) as connection:
        began, sent = time.perf_counter(), 0
        while sent < count:
            due = min(count, int((time.perf_counter() - began) * rate))
            now = time.time_ns().to_bytes(8, "big")
            if due > sent:
                connection.send(
                    b"".join(
                        b"PUB $KV.bench.key.%d 8\r\n%s\r\n" % (i % 1000, now)
                        for i in range(sent, due)
                    )
                )
                sent = due
            time.sleep(_TICK)
        # What was sent before the PONG has reached the server.
        connection.send(b"PING\r\n")
        while not any(frame == b"PONG\r\n" for frame, _ in connection.receive()):
            pass


def measure_bucket(spark: SparkSession, rate: int, seconds: float) -> Result:
    """Follow a bucket of 1,000 keys while ``rate`` entries a second are put for ``seconds``."""
    count = int(rate * seconds)
    with NatsServer() as server:
        fill_bucket(server.port, "bench", iter([("key.0", b"12345678")]), history=64)
        options = {"servers": server.url, "bucket": "bench", "updatesOnly": "true"}

        def write() -> None:
            spawned = multiprocessing.get_context("spawn")
            writing = spawned.Process(target=put_steadily, args=(server.port, rate, count))
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
        jars: list[Path] = []
        broker: KafkaBroker | None = None
        if kafka:
            try:
                jars = source_jars()
                broker = stack.enter_context(KafkaBroker())
            except KafkaUnavailableError as error:
                report(f"without Kafka: {error}")
                jars = []
        spark = stack.enter_context(spark_session(jars))
        results = []
        for rate in rates:
            results.append(measure_bucket(spark, rate, seconds))
            if broker is not None:
                results.append(measure_topic(spark, broker, rate, seconds))
        return results


def table(results: Sequence[Result]) -> Table:
    """The results for a terminal."""
    shown = Table("puts/s", "source", "p50", "p99", "÷ Kafka", "entries a batch", *_PARTS)
    for one in results:
        over = ratio(one, results)
        shown.add_row(
            f"{one.rate:,}",
            one.source,
            f"{one.p50:.0f} ms",
            f"{one.p99:.0f} ms",
            "" if over is None else f"{over:.2f}",
            f"{one.entries / one.batches:,.0f}",
            *(f"{one.parts[part]:.0f}" for part in _PARTS),
        )
    return shown


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
    console.print(table(results))
    if options.json is not None:
        shown = {
            "machine": host.as_dict(),
            "latency": [one.as_dict() | {"ratio": ratio(one, results)} for one in results],
        }
        options.json.write_text(json.dumps(shown, indent=1) + "\n")


if __name__ == "__main__":
    main()
