"""The latency of an entry from its put to ``foreachBatch`` and to a table, beside Kafka's source.

Another process puts entries at a constant rate. A query with the default trigger passes
micro-batches to ``foreachBatch``, which collects the rows on the driver as Arrow and reads the
clock. The sources take turns in one session: ``nats_kv`` (``benchmarks.freshness``), and Spark's
own Kafka source of a topic with one partition, on its broker. A third query merges the entries of a
bucket into a table of 4,000 keys.

This is measured in two sessions: as Spark comes, and with ``configure`` and asynchronous logs (for
Kafka's source, too). The percentiles exclude the first quarter of the entries. ``gap`` is the
median time between two micro-batches with rows.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from pyspark.sql import DataFrame, SparkSession

from benchmarks.freshness import measure as freshness, summary
from benchmarks.support.kafka import KafkaBroker, create_topic, start_kafka, steady_producer
from benchmarks.support.spark_session import spark_session
from nats_stream_source.delta import configure
from nats_stream_source.delta.spark.follow import ASYNC_PROGRESS

RATES = (100, 1_000, 20_000)
NATS, KAFKA, TABLE = "nats_kv", "kafka", "nats_kv to table"
Session = Callable[[SparkSession.Builder], SparkSession.Builder]
SESSIONS: dict[str, tuple[Session, Mapping[str, str]]] = {
    "defaults": (lambda builder: builder, {}),
    "configured": (configure, ASYNC_PROGRESS),
}
"""The settings of a session, and the options of its queries."""

KEYS = 4_000  # of the table
_DEADLINE = 60.0  # seconds for the last entries to arrive


def measure_topic(
    spark: SparkSession, broker: KafkaBroker, settings: Mapping[str, str], rate: int, seconds: float
) -> dict[str, Any]:
    """Follow a topic while ``rate`` records a second are sent for ``seconds``.

    The value of a record is the time of its send in ns.
    """
    count, topic = int(rate * seconds), f"latency-{time.time_ns()}"
    create_topic(spark, broker, topic, 1)
    source = spark.readStream.format("kafka").option("startingOffsets", "latest")
    source = source.option("kafka.bootstrap.servers", broker.servers).option("subscribe", topic)
    arrived: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []

    def take(frame: DataFrame, _: int) -> None:
        values = frame.select("value").toArrow().column(0).combine_chunks()
        now = time.time_ns()
        if len(values):
            put = np.frombuffer(values.buffers()[2], ">i8")[: len(values)]
            arrived.append(now - put.astype(np.int64))

    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        writer = source.load().writeStream.foreachBatch(take).options(**settings)
        query = writer.option("checkpointLocation", f"{scratch}/checkpoint").start()
        try:
            query.processAllAvailable()
            subprocess.run(steady_producer(broker, topic, rate, count), check=True)
            deadline = time.monotonic() + _DEADLINE
            while sum(map(len, arrived)) < count and time.monotonic() < deadline:
                query.processAllAvailable()
            reports = query.recentProgress
        finally:
            query.stop()
    taken = np.concatenate(arrived) if arrived else np.array([], np.int64)
    if len(taken) != count:
        raise RuntimeError(f"{len(taken):,} records arrived of {count:,}")
    return summary(rate, taken / 1e6, reports)


def run(rate: Sequence[int] = RATES, seconds: float = 20.0) -> dict[str, Any]:
    """Both sessions, in each of them all sources in turns, at each rate."""
    results = []
    with ExitStack() as stack:
        jars, broker = start_kafka(stack)
        for way, (session, settings) in SESSIONS.items():
            with spark_session(jars, configure=session) as spark:
                # The first micro-batches of a session are slow.
                freshness(spark, "foreachBatch", 500, 1_000, 4, settings)
                for puts in rate:
                    found = {NATS: freshness(spark, "foreachBatch", puts, 1_000, seconds, settings)}
                    if broker is not None:
                        found[KAFKA] = measure_topic(spark, broker, settings, puts, seconds)
                    found[TABLE] = freshness(spark, "driver", puts, KEYS, seconds, settings)
                    ratio = found[NATS]["p50"] / found[KAFKA]["p50"] if broker else None
                    for source, one in found.items():
                        own = ratio if source == NATS else None
                        results.append({**one, "way": way, "source": source, "ratio": own})
    return {"latency": results}
