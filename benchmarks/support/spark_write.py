"""Part of ``benchmarks.writing``: ``df.write`` into a bucket and through Spark's own Kafka sink.

The rows are in a Parquet file. One task, or one per core, reads them and writes them with
``df.write.format("nats_kv")`` or ``format("kafka")`` (``acks=all``, Spark's default). The sinks
alternate in one session, after one run of each that is not counted. The time is that of ``save()``;
the CPU time is that of server, Python workers and JVM.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from benchmarks.support.bucket_data import SIZE, create_bucket, entries, purge, write_parquet
from benchmarks.support.kafka import KafkaBroker, create_topic, start_kafka
from benchmarks.support.machine import cores, timed
from benchmarks.support.spark_session import spark_session
from nats_stream_source.embedded import NatsServer

NATS, KAFKA = "nats_kv", "kafka"
_KEYS = 10_000


def measure(rows: int, rounds: int) -> list[dict[str, Any]]:
    """Write ``rows`` rows of 128 bytes with each sink, ``rounds`` times in turns."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        server = stack.enter_context(NatsServer())
        jars, broker = start_kafka(stack)
        write_parquet(scratch / "entries.parquet", entries(rows, _KEYS, SIZE))
        create_bucket(server.port, "bench", history=64)
        with spark_session(jars) as spark:
            results = []
            for tasks in sorted({1, cores()}):
                table = _in_files(spark, scratch, tasks)
                results += _alternate(spark, table, tasks, rows, rounds, server, broker)
        return results


def _in_files(spark: SparkSession, scratch: Path, tasks: int) -> DataFrame:
    """The rows in one Parquet file for each task."""
    path = str(scratch / f"tasks{tasks}")
    spark.read.parquet(str(scratch / "entries.parquet")).repartition(tasks).write.parquet(path)
    spark.conf.set("spark.sql.files.maxPartitionBytes", str(4 << 30))
    spark.conf.set("spark.sql.files.openCostInBytes", str(4 << 30))
    table = spark.read.parquet(path)
    if table.rdd.getNumPartitions() != tasks:
        raise RuntimeError(f"{table.rdd.getNumPartitions()} partitions, expected {tasks}")
    return table


def _alternate(
    spark: SparkSession,
    table: DataFrame,
    tasks: int,
    rows: int,
    rounds: int,
    server: NatsServer,
    broker: KafkaBroker | None,
) -> list[dict[str, Any]]:
    roles = {server.pid: NATS} | ({broker.pid: KAFKA} if broker else {})
    sinks: dict[str, Mapping[str, str]] = {NATS: {"servers": server.url, "bucket": "bench"}}
    if broker is not None:
        sinks[KAFKA] = {"kafka.bootstrap.servers": broker.servers, "topic": f"bench{tasks}"}
        create_topic(spark, broker, f"bench{tasks}", tasks)
    seconds: dict[str, list[float]] = {}
    cpu: dict[str, list[dict[str, float]]] = {}
    for turn in range(rounds + 1):
        for sink, options in sinks.items():
            writer = table.write.format(sink).options(**options).mode("append")
            taken, spent_by_role = timed(roles, writer.save)
            if sink == NATS:
                purge(server.port, min(rows, 64 * _KEYS))
            print(f"{sink}, {tasks} task(s): {rows / taken:,.0f} rows/s")
            if turn:
                seconds.setdefault(sink, []).append(taken)
                used = {role: spent / rows * 1e9 for role, spent in spent_by_role.items()}
                used["server"] = used.get(sink, 0.0)
                cpu.setdefault(sink, []).append(used)
    return [
        {
            "sink": sink,
            "tasks": tasks,
            "rows": rows,
            "seconds": seconds[sink],
            "cpu": {  # nanoseconds a row
                role: statistics.median(one[role] for one in cpu[sink])
                for role in ("server", "python", "jvm")
            },
            "rate": rows / statistics.median(seconds[sink]),
        }
        for sink in sinks
    ]
