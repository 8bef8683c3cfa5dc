"""The cost of many buckets in one query: polls of an idle query, planning, and the first read.

``python -m benchmarks.several [--quick] [--json FILE] [--buckets 1000] [--no-spark]``

The benchmark fills so many buckets with so many keys each, and one bucket with as many entries as
all of them. A query selects the small ones by a pattern. Without Spark, planner and tasks run in
this process, one task after the other. Measured are

- the idle query, called every 10 ms as Spark does: CPU of planner and server, requests a second;
- planning a micro-batch after writes to 10 buckets, and to all of them: end and tasks;
- the first read of all buckets, planning included, beside that of the one bucket; and in Spark,
  with a sink that drops the rows, from the start of the query to its end.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from rich.console import Console

from benchmarks.support.bucket_data import entries, fill_bucket
from benchmarks.support.machine import Stopwatch, machine
from benchmarks.support.output import finish
from benchmarks.support.planner_bucket import Requests
from benchmarks.support.progress import progress
from benchmarks.support.raw_connection import fill
from benchmarks.support.spark_session import spark_session
from nats_stream_source.embedded import NatsServer
from nats_stream_source.options import KvOptions, Mode, kv_options
from nats_stream_source.spark.formats.kv import KvFormat
from nats_stream_source.spark.planning.query_planner import QueryPlanner
from nats_stream_source.spark.runner import Runner, close_cached_runners
from nats_stream_source.spark.stream_reader_v42 import AdmissionReader
from nats_stream_source.spark.tasks import NatsInputPartition

_IDLE_SECONDS = 15.0
_ONE = "one"


@dataclass(frozen=True, slots=True)
class Idle:
    """An idle query: shares of one core, and requests in a second."""

    planner: float
    server: float
    baseline: float
    requests: float


@dataclass(frozen=True, slots=True)
class Planned:
    """Planning of micro-batches after writes to ``touched`` buckets; milliseconds."""

    touched: int
    p50: float
    worst: float
    requests: int
    tasks: int


@dataclass(frozen=True, slots=True)
class FirstRead:
    """The first read of all entries: rows per second, and the seconds of planning in it."""

    buckets: int
    rows: int
    rows_per_second: float
    planning: float
    tasks: int


@dataclass(frozen=True, slots=True)
class SparkRead:
    """The first read in Spark: seconds of the whole query, and of its micro-batch."""

    buckets: int
    rows: int
    seconds: float
    micro_batch: float


class Query:
    """A stream reader, called as Spark calls it.

    Args:
        jumps: whether the planner's clock advances a second with each call, so that it never waits.
    """

    def __init__(self, options: KvOptions, *, jumps: bool = False) -> None:
        adapter = KvFormat(options)
        self._reader = AdmissionReader(adapter)
        self.shift = 0.0
        ticks = itertools.count()
        runner = Runner(options.connection)
        self._reader._runner = runner
        self._reader._planner = QueryPlanner(
            adapter,
            runner.connection,
            clock=(lambda: float(next(ticks)))
            if jumps
            else (lambda: time.monotonic() + self.shift),
        )
        self.offset = self._reader.initialOffset()

    def poll(self) -> list[NatsInputPartition]:
        """Plan a micro-batch; return its tasks, none where there is nothing new."""
        end = self._reader.latestOffset(self.offset, self._reader.getDefaultReadLimit())
        if end == self.offset:
            return []
        tasks: Any = self._reader.partitions(self.offset, end)
        self.offset = end
        return list(tasks)

    def read(self, tasks: Sequence[NatsInputPartition]) -> int:
        """Read the tasks one after the other; return the number of rows."""
        return sum(batch.num_rows for task in tasks for batch in self._reader.read(task))

    def close(self) -> None:
        """Close the connections of planner and tasks."""
        self._reader.stop()
        close_cached_runners()


def idle(server: NatsServer, options: KvOptions, seconds: float) -> Idle:
    """Measure a query whose streams have been silent for long."""
    query = Query(options)
    try:
        while tasks := query.poll():
            query.read(tasks)
        query.shift += 3600
        query.poll()
        with Requests() as requests, Stopwatch(server.pid) as watch:
            stop = time.perf_counter() + seconds
            while time.perf_counter() < stop:
                query.poll()
                time.sleep(0.01)
            count = requests.count
        with Stopwatch(server.pid) as nothing:
            time.sleep(seconds / 2)
    finally:
        query.close()
    return Idle(
        watch.own_cpu / watch.wall,
        watch.other_cpu / watch.wall,
        nothing.other_cpu / nothing.wall,
        count / watch.wall,
    )


def planned(
    server: NatsServer, options: KvOptions, names: Sequence[str], touched: int, rounds: int
) -> Planned:
    """Plan micro-batches after a write to each of ``touched`` buckets; read them too."""
    query = Query(options, jumps=True)
    took: list[float] = []
    asked = tasks_planned = 0
    try:
        while tasks := query.poll():
            query.read(tasks)
        for turn in range(rounds):
            start = turn * touched % len(names)
            chosen = [names[(start + i) % len(names)] for i in range(touched)]
            fill(server.port, ((f"$KV.{name}.key.{turn}", b"", b"new") for name in chosen))
            with Requests() as requests:
                began = time.perf_counter()
                tasks = query.poll()
                took.append((time.perf_counter() - began) * 1000)
                asked += requests.count
            tasks_planned = len(tasks)
            rows = query.read(tasks)
            if rows != touched:
                raise RuntimeError(f"read {rows} rows, expected {touched}")
    finally:
        query.close()
    return Planned(touched, statistics.median(took), max(took), asked // rounds, tasks_planned)


def first_read(options: KvOptions, buckets: int, rows: int) -> FirstRead:
    """Plan and read everything that the buckets have."""
    began = time.perf_counter()
    query = Query(options)
    try:
        tasks = query.poll()
        planning = time.perf_counter() - began
        found = query.read(tasks)
        seconds = time.perf_counter() - began
    finally:
        query.close()
    if found != rows:
        raise RuntimeError(f"read {found} rows, expected {rows}")
    return FirstRead(buckets, rows, rows / seconds, planning, len(tasks))


def read_in_spark(spark: SparkSession, options: Mapping[str, str], buckets: int) -> SparkRead:
    """Run a query with ``availableNow`` from its start position to its end."""
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        frame = spark.readStream.format("nats_kv").options(**options).load()
        writer = frame.writeStream.format("noop").trigger(availableNow=True)
        began = time.perf_counter()
        query = writer.option("checkpointLocation", scratch).start()
        query.awaitTermination()
        seconds = time.perf_counter() - began
        (batch,) = [one for one in query.recentProgress if one["numInputRows"]]
    return SparkRead(
        buckets, batch["numInputRows"], seconds, batch["durationMs"]["triggerExecution"] / 1000
    )


@dataclass(frozen=True, slots=True)
class Figures:
    """All figures of a run."""

    idle: Idle
    planned: list[Planned]
    reads: list[FirstRead]
    spark_reads: list[SparkRead]


def measure(buckets: int, keys: int, rounds: int, seconds: float, *, spark: bool) -> Figures:
    """All figures, on a server that is started for them."""
    names = [f"site-{i:04}" for i in range(buckets)]
    rows = buckets * keys
    reads: list[FirstRead] = []
    with NatsServer() as server:
        with progress("filling", buckets + 1) as step:
            for name in names:
                fill_bucket(server.port, name, entries(keys, keys), history=1)
                step(1)
            fill_bucket(server.port, _ONE, entries(rows, rows), history=1)
            step(1)
        several = _options(server, bucketPattern="site-.*")
        for _ in range(max(1, rounds // 5)):  # in turn, so that both meet the same machine
            reads.append(first_read(several, buckets, rows))
            reads.append(first_read(_options(server, bucket=_ONE), 1, rows))
        plans = [planned(server, several, names, touched, rounds) for touched in (10, buckets)]
        rest = idle(server, several, seconds)
        spark_reads = _spark_reads(server, buckets) if spark else []
    return Figures(rest, plans, reads, spark_reads)


def _spark_reads(server: NatsServer, buckets: int) -> list[SparkRead]:
    many = {"servers": server.url, "bucketPattern": "site-.*"}
    one = {"servers": server.url, "bucket": _ONE}
    with spark_session() as session:
        read_in_spark(session, one, 1)  # starts the Python workers
        return [
            read_in_spark(session, options, count)
            for _ in range(3)
            for options, count in ((many, buckets), (one, 1))
        ]


def _options(server: NatsServer, **options: str) -> KvOptions:
    return kv_options({"servers": server.url, **options}, Mode.STREAMING)


def ratio(reads: Sequence[FirstRead] | Sequence[SparkRead]) -> float:
    """The rate of many buckets ÷ that of one: the median of the rounds."""
    rates = [
        (one.buckets > 1, one.rows_per_second if isinstance(one, FirstRead) else 1 / one.seconds)
        for one in reads
    ]
    many = [rate for is_many, rate in rates if is_many]
    single = [rate for is_many, rate in rates if not is_many]
    return statistics.median(a / b for a, b in zip(many, single, strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write JSON if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="100 buckets, few rounds")
    parser.add_argument("--buckets", type=int)
    parser.add_argument("--keys", type=int, default=1000)
    parser.add_argument("--no-spark", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    buckets = options.buckets or (100 if options.quick else 1000)
    if buckets < 10 or options.keys < 1:
        parser.error("at least 10 buckets with one key each")
    rounds, seconds = (5, 3.0) if options.quick else (15, _IDLE_SECONDS)
    console = Console()
    host = machine()
    console.print(str(host), highlight=False)
    spark = not (options.quick or options.no_spark)
    figures = measure(buckets, options.keys, rounds, seconds, spark=spark)
    results = {"buckets": buckets, "keys": options.keys, **asdict(figures)}
    results["ratio"] = ratio(figures.reads)
    if figures.spark_reads:
        results["spark_ratio"] = ratio(figures.spark_reads)
    finish("several", host, results, options.json)


if __name__ == "__main__":
    main()
