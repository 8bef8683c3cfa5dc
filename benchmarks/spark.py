"""End to end in Spark: a backlog through ``nats_kv`` and through Spark's own Kafka source.

``python -m benchmarks.spark [--rows 1000000 ...] [--size 128 ...] [--no-kafka] [--json FILE]``

The same values are in a bucket (with all revisions) and in two Kafka topics, one with a single
partition and one with one partition per core. A query with the trigger ``availableNow`` reads them
into the no-op sink or into Parquet. The time is from ``start()`` to the query's end and includes
connecting, starting Python workers, planning and reading. The time of the micro-batch alone
(``addBatch``) is reported too.

The sources alternate in one session, after one run of each that is not counted; medians.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from benchmarks.support.bucket_data import SIZE, entries, fill_bucket, write_parquet
from benchmarks.support.kafka import KafkaBroker, create_topic, source_jars
from benchmarks.support.machine import OtherProcesses, cores, cpu_by_role
from benchmarks.support.output import finish
from benchmarks.support.raw_connection import server_for_slow_clients
from benchmarks.support.spark_session import spark_session
from nats_stream_source.connection.frame_scanner import select_frame_scanner

SINKS = ("noop", "parquet")
_MANY = 1_000_000  # with more rows: fewer rounds, one size


@dataclass(frozen=True, slots=True)
class Source:
    """What to load: ``name`` for the table, a format, its options, its server's process id."""

    name: str
    format: str
    options: Mapping[str, str]
    server: int


@dataclass(frozen=True, slots=True)
class Run:
    """One query.

    Attributes:
        seconds: from ``start()`` to the end; ``batch``: of the micro-batches alone.
        cpu: CPU seconds of the source's ``server``, of ``python`` (workers), of the ``planner``
            (the driver's Python processes), of the ``jvm`` (driver and executor, which are one).
    """

    seconds: float
    batch: float
    cpu: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Result:
    """One source into one sink, with the counted runs. Rates are rows per second."""

    source: str
    sink: str
    rows: int
    warm: list[Run]

    @property
    def rate(self) -> float:
        """Warm, the whole query; median."""
        return self.rows / statistics.median(run.seconds for run in self.warm)

    @property
    def batch_rate(self) -> float:
        """Warm, the micro-batch alone; median."""
        return self.rows / statistics.median(run.batch for run in self.warm)

    @property
    def cpu(self) -> dict[str, float]:
        """Warm, CPU nanoseconds a row by process; medians."""
        return {
            role: statistics.median(run.cpu[role] for run in self.warm) / self.rows * 1e9
            for role in self.warm[0].cpu
        }

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        derived = {"rate": self.rate, "batch_rate": self.batch_rate, "cpu_ns_per_row": self.cpu}
        return asdict(self) | derived


@dataclass(frozen=True, slots=True)
class Outcome:
    """All results for one number of rows of ``size`` bytes, and what else ran meanwhile.

    ``scanner`` is the frame scanner of the readers.
    """

    rows: int
    size: int
    results: list[Result]
    scanner: str
    others: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"results": [one.as_dict() for one in self.results]}


def run_query(spark: SparkSession, source: Source, sink: str, rows: int) -> Run:
    """One query over the whole backlog.

    Raises:
        RuntimeError: it took another number of rows than there are.
    """
    scratch = Path(tempfile.mkdtemp(prefix="bench-query-"))
    try:
        frame = spark.readStream.format(source.format).options(**source.options).load()
        writer = frame.writeStream.format(sink).trigger(availableNow=True)
        writer = writer.option("checkpointLocation", str(scratch / "checkpoint"))
        if sink == "parquet":
            writer = writer.option("path", str(scratch / "table"))
        before, began = cpu_by_role({source.server: "server"}), time.perf_counter()
        query = writer.start()
        query.awaitTermination()
        seconds = time.perf_counter() - began
        after = cpu_by_role({source.server: "server"})
        cpu = {role: after[role] - before.get(role, 0.0) for role in after}
        progress = query.recentProgress
        taken = sum(one["numInputRows"] for one in progress)
        if taken != rows:
            raise RuntimeError(f"{source.name} into {sink}: {taken:,} rows of {rows:,}")
        batch = sum(one["durationMs"].get("addBatch", 0) for one in progress) / 1000
        return Run(seconds, batch, cpu)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def measure(
    rows: int,
    rounds: int,
    size: int = SIZE,
    *,
    kafka: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Fill a server, and a broker with ``kafka``, and let the sources take turns on them."""
    with ExitStack() as stack, OtherProcesses() as others:
        server = stack.enter_context(server_for_slow_clients())
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        keys = max(rows // 10, 1)
        say(f"filling the bucket with {rows:,} entries")
        fill_bucket(server.port, "bench", entries(rows, keys, size), history=64)
        options = {"servers": server.url, "bucket": "bench", "includeHistory": "true"}
        sources = [Source("nats_kv", "nats_kv", options, server.pid)]
        jars: list[Path] = []
        if kafka:
            jars = source_jars()
            broker = stack.enter_context(KafkaBroker())
        with spark_session(jars) as spark:
            if kafka:
                write_parquet(scratch / "entries.parquet", entries(rows, keys, size))
                for partitions in sorted({1, cores()}):
                    say(f"filling a Kafka topic of {partitions} partition(s)")
                    topic = _fill_topic(spark, broker, scratch / "entries.parquet", partitions)
                    sources.append(topic)
            warm: dict[tuple[str, str], list[Run]] = {}
            for sink in SINKS:
                for turn in range(rounds + 1):
                    for source in sources:
                        query = run_query(spark, source, sink, rows)
                        say(f"{source.name} into {sink}: {rows / query.seconds:,.0f} rows/s")
                        if turn:
                            warm.setdefault((source.name, sink), []).append(query)
    results = [Result(name, sink, rows, runs) for (name, sink), runs in warm.items()]
    return Outcome(rows, size, results, select_frame_scanner(), others.as_dict())


def _fill_topic(spark: SparkSession, broker: KafkaBroker, parquet: Path, partitions: int) -> Source:
    name = f"bench{partitions}"
    create_topic(spark, broker, name, partitions)
    servers = {"kafka.bootstrap.servers": broker.servers}
    frame = spark.read.parquet(str(parquet))
    frame.write.format("kafka").options(**servers, topic=name).save()
    options = {**servers, "subscribe": name, "startingOffsets": "earliest"}
    return Source(
        f"kafka, {partitions} partition{'s'[: partitions - 1]}", "kafka", options, broker.pid
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write JSON if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, action="append", help="repeatable; default 1,000,000")
    parser.add_argument("--size", type=int, action="append", help="bytes of a value (repeatable)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-kafka", action="store_true", help="run nats_kv only")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    sizes = options.size or [SIZE]
    outcomes = [
        measure(
            rows,
            options.rounds if rows <= _MANY else min(options.rounds, 2),
            size,
            kafka=not options.no_kafka,
            say=lambda text: print(text),
        )
        for rows in options.rows or [1_000_000]
        for size in (sizes if rows <= _MANY else sizes[:1])
    ]
    finish("spark", {"spark": [one.as_dict() for one in outcomes]}, options.json)


if __name__ == "__main__":
    main()
