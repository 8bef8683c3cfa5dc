"""End to end in Spark: a backlog through ``nats_kv`` and through Spark's own Kafka source.

The same values are in a bucket (with all revisions) and in two Kafka topics, one with a single
partition and one with one partition per core. A query with the trigger ``availableNow`` reads them
into the no-op sink or into Parquet. The time is from ``start()`` to the query's end and includes
connecting, starting Python workers, planning and reading.

The sources alternate in one session, after one run of each that is not counted; medians.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import StreamingQueryProgress

from benchmarks.support.bucket_data import SIZE, entries, fill_bucket, write_parquet
from benchmarks.support.kafka import KafkaBroker, create_topic, start_kafka
from benchmarks.support.machine import cores, timed
from benchmarks.support.raw_connection import server_for_slow_clients
from benchmarks.support.spark_session import spark_session

SINKS = ("noop", "parquet")
Run = dict[str, Any]
_MANY = 1_000_000  # with more rows: fewer rounds, one size


@dataclass(frozen=True, slots=True)
class Source:
    """What to load: ``name`` for the table, a format, its options, its server's process id."""

    name: str
    format: str
    options: Mapping[str, str]
    server: int


def result(source: str, sink: str, rows: int, warm: Sequence[Run]) -> dict[str, Any]:
    """One source into one sink: medians of the counted runs.

    ``rate`` is the rows per second, ``cpu_ns_per_row`` the CPU nanoseconds by process.
    """
    return {
        "source": source,
        "sink": sink,
        "rows": rows,
        "warm": warm,
        "rate": rows / statistics.median(run["seconds"] for run in warm),
        "cpu_ns_per_row": {
            role: statistics.median(run["cpu"][role] for run in warm) / rows * 1e9
            for role in warm[0]["cpu"]
        },
    }


def run_query(spark: SparkSession, source: Source, sink: str, rows: int) -> Run:
    """Seconds of one query over the whole backlog, and of CPU by role.

    Raises:
        RuntimeError: it took another number of rows than there are.
    """
    with tempfile.TemporaryDirectory(prefix="bench-query-", ignore_cleanup_errors=True) as scratch:
        frame = spark.readStream.format(source.format).options(**source.options).load()
        writer = frame.writeStream.format(sink).trigger(availableNow=True)
        writer = writer.option("checkpointLocation", f"{scratch}/checkpoint")
        if sink == "parquet":
            writer = writer.option("path", f"{scratch}/table")
        reports: list[StreamingQueryProgress] = []

        def finished() -> None:
            query = writer.start()
            query.awaitTermination()
            reports.extend(query.recentProgress)

        seconds, cpu = timed({source.server: "server"}, finished)
        taken = sum(one["numInputRows"] for one in reports)
        if taken != rows:
            raise RuntimeError(f"{source.name} into {sink}: {taken:,} rows of {rows:,}")
        return {"seconds": seconds, "cpu": cpu}


def measure(rows: int, rounds: int, size: int) -> dict[str, Any]:
    """Fill a server and a broker, and let the sources take turns on them."""
    with ExitStack() as stack:
        server = stack.enter_context(server_for_slow_clients())
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        keys = max(rows // 10, 1)
        print(f"filling the bucket with {rows:,} entries")
        fill_bucket(server.port, "bench", entries(rows, keys, size), history=64)
        options = {"servers": server.url, "bucket": "bench", "includeHistory": "true"}
        sources = [Source("nats_kv", "nats_kv", options, server.pid)]
        jars, broker = start_kafka(stack)
        with spark_session(jars) as spark:
            if broker is not None:
                write_parquet(scratch / "entries.parquet", entries(rows, keys, size))
                for partitions in sorted({1, cores()}):
                    print(f"filling a Kafka topic of {partitions} partition(s)")
                    topic = _fill_topic(spark, broker, scratch / "entries.parquet", partitions)
                    sources.append(topic)
            warm: dict[tuple[str, str], list[Run]] = {}
            for sink in SINKS:
                for turn in range(rounds + 1):
                    for source in sources:
                        query = run_query(spark, source, sink, rows)
                        print(f"{source.name} into {sink}: {rows / query['seconds']:,.0f} rows/s")
                        if turn:
                            warm.setdefault((source.name, sink), []).append(query)
    return {
        "rows": rows,
        "size": size,
        "results": [result(name, sink, rows, runs) for (name, sink), runs in warm.items()],
    }


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


def run(
    rows: Sequence[int] = (1_000_000,),
    size: Sequence[int] = (SIZE,),
    rounds: int = 5,
) -> dict[str, Any]:
    """The figures of all numbers of rows and sizes."""
    outcomes = [
        measure(count, rounds if count <= _MANY else min(rounds, 2), bytes_of_value)
        for count in rows
        for bytes_of_value in (size if count <= _MANY else size[:1])
    ]
    return {"spark": outcomes}
