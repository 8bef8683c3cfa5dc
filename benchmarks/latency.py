"""The latency of an entry from its put to ``foreachBatch``.

``python -m benchmarks.latency [--rate 100 ...] [--seconds 20] [--json FILE]``

Another process puts entries at a constant rate, each with the time of its put. A query with the
default trigger passes micro-batches to ``foreachBatch``, which collects the rows on the driver as
Arrow and reads the clock. The percentiles exclude the first quarter of the entries.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import DataFrame, SparkSession
from rich.console import Console
from rich.table import Table

from benchmarks.support.bucket_data import fill_bucket
from benchmarks.support.machine import OtherProcesses, machine
from benchmarks.support.raw_connection import RawConnection
from benchmarks.support.spark_session import spark_session
from nats_stream_source.embedded import NatsServer

RATES = (100, 1_000, 10_000)
_TICK = 0.001  # seconds
_DEADLINE = 60.0  # seconds for the last entries to arrive


@dataclass(frozen=True, slots=True)
class Result:
    """At ``rate`` puts a second: milliseconds, and how large the micro-batches were."""

    rate: int
    entries: int
    p50: float
    p99: float
    batches: int
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


def measure(spark: SparkSession, rate: int, seconds: float) -> Result:
    """Follow a bucket of 1,000 keys while ``rate`` entries a second are put for ``seconds``."""
    latencies: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []

    def take(frame: DataFrame, _: int) -> None:
        values = frame.select("value").toArrow().column(0).combine_chunks()
        now = time.time_ns()
        if len(values):
            put = np.frombuffer(values.buffers()[2], ">i8")[: len(values)]
            latencies.append(now - put.astype(np.int64))

    count = int(rate * seconds)
    with NatsServer() as server, tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        fill_bucket(server.port, "bench", iter([("key.0", b"12345678")]), history=64)
        options = {"servers": server.url, "bucket": "bench", "updatesOnly": "true"}
        frame = spark.readStream.format("nats_kv").options(**options).load()
        writer = frame.writeStream.foreachBatch(take)
        query = writer.option("checkpointLocation", f"{scratch}/checkpoint").start()
        try:
            query.processAllAvailable()
            spawned = multiprocessing.get_context("spawn")
            writing = spawned.Process(target=put_steadily, args=(server.port, rate, count))
            with OtherProcesses() as others:
                writing.start()
                writing.join()
                deadline = time.monotonic() + _DEADLINE
                while sum(map(len, latencies)) < count and time.monotonic() < deadline:
                    query.processAllAvailable()
        finally:
            query.stop()
    taken = np.concatenate(latencies) if latencies else np.array([], np.int64)
    if len(taken) != count:
        raise RuntimeError(f"{len(taken):,} entries arrived of {count:,}")
    p50, p99 = np.percentile(taken[count // 4 :], [50, 99]) / 1e6
    return Result(rate, count, float(p50), float(p99), len(latencies), others.as_dict())


def table(results: Sequence[Result]) -> Table:
    """The results for a terminal."""
    shown = Table("puts/s", "p50", "p99", "entries a batch")
    for one in results:
        mean = one.entries / one.batches
        shown.add_row(f"{one.rate:,}", f"{one.p50:.0f} ms", f"{one.p99:.0f} ms", f"{mean:,.0f}")
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write JSON if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", type=int, action="append", help="puts per second (repeatable)")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    host = machine()
    console.print(str(host))
    with spark_session() as spark:
        results = [measure(spark, rate, options.seconds) for rate in options.rate or RATES]
    console.print(table(results))
    if options.json is not None:
        shown = {"machine": host.as_dict(), "latency": [one.as_dict() for one in results]}
        options.json.write_text(json.dumps(shown, indent=1) + "\n")


if __name__ == "__main__":
    main()
