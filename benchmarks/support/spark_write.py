"""Part of ``benchmarks.writing``: ``df.write`` into a bucket and through Spark's own Kafka sink.

The rows are in a Parquet file. One task, or one per core, reads them and writes them with
``df.write.format("nats_kv")``, ``format("kafka")`` (``acks=all``, Spark's default) or into the
no-op sink, which is the time to read them. The sinks alternate in one session, after one run of
each that is not counted. The time is that of ``save()``; the CPU time is that of server, Python
workers and JVM.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from benchmarks.support.bucket_data import SIZE, create_bucket, entries, write_parquet
from benchmarks.support.kafka import KafkaBroker, create_topic, start_kafka
from benchmarks.support.machine import cores, cpu_by_role
from benchmarks.support.raw_connection import RawConnection
from benchmarks.support.spark_session import spark_session
from nats_stream_source.embedded import NatsServer

NATS, KAFKA, NOOP = "nats_kv", "kafka", "noop"
_KEYS = 10_000


@dataclass(frozen=True, slots=True)
class SinkResult:
    """One sink with one number of tasks.

    Attributes:
        seconds: of each counted run.
        cpu: CPU nanoseconds a row of ``server``, ``python`` (workers) and ``jvm``; medians.
    """

    sink: str
    tasks: int
    rows: int
    seconds: list[float]
    cpu: dict[str, float]

    @property
    def rate(self) -> float:
        """Rows per second; median."""
        return self.rows / statistics.median(self.seconds)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"rate": self.rate}


def measure(
    rows: int, rounds: int, *, kafka: bool, report: Callable[[str], None]
) -> list[SinkResult]:
    """Write ``rows`` rows of 128 bytes with each sink, ``rounds`` times in turns."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        server = stack.enter_context(NatsServer())
        jars, broker = start_kafka(stack, report) if kafka else ([], None)
        write_parquet(scratch / "entries.parquet", entries(rows, _KEYS, SIZE))
        create_bucket(server.port, "bench", history=64)
        with spark_session(jars) as spark:
            results = []
            for tasks in sorted({1, cores()}):
                table = _in_files(spark, scratch, tasks)
                results += _alternate(spark, table, tasks, rows, rounds, server, broker, report)
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
    report: Callable[[str], None],
) -> list[SinkResult]:
    roles = {server.pid: NATS} | ({broker.pid: KAFKA} if broker else {})
    sinks: dict[str, Mapping[str, str]] = {
        NOOP: {},
        NATS: {"servers": server.url, "bucket": "bench"},
    }
    if broker is not None:
        sinks[KAFKA] = {"kafka.bootstrap.servers": broker.servers, "topic": f"bench{tasks}"}
        create_topic(spark, broker, f"bench{tasks}", tasks)
    seconds: dict[str, list[float]] = {}
    cpu: dict[str, list[dict[str, float]]] = {}
    for turn in range(rounds + 1):
        for sink, options in sinks.items():
            before, began = cpu_by_role(roles), time.perf_counter()
            mode = "overwrite" if sink == NOOP else "append"
            table.write.format(sink).options(**options).mode(mode).save()
            taken = time.perf_counter() - began
            after = cpu_by_role(roles)
            if sink == NATS:
                _purge(server.port, rows)
            report(f"{sink}, {tasks} task(s): {rows / taken:,.0f} rows/s")
            if turn:
                seconds.setdefault(sink, []).append(taken)
                used = {role: (after[role] - before[role]) / rows * 1e9 for role in after}
                used["server"] = used.get(sink, 0.0)
                cpu.setdefault(sink, []).append(used)
    return [
        SinkResult(
            sink,
            tasks,
            rows,
            seconds[sink],
            {
                role: statistics.median(one[role] for one in cpu[sink])
                for role in ("server", "python", "jvm")
            },
        )
        for sink in sinks
    ]


def _purge(port: int, rows: int) -> None:
    with RawConnection(port) as connection:
        state = connection.request("$JS.API.STREAM.INFO.KV_bench", {})["state"]
        stored = state["messages"]
        if stored != min(rows, 64 * _KEYS):
            raise RuntimeError(f"the bucket has {stored:,} messages after {rows:,} rows")
        connection.request("$JS.API.STREAM.PURGE.KV_bench", {})
