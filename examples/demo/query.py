"""The Spark session and the query that follows the bucket, to copy from, and its figures."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession, functions as F
from pyspark.sql.streaming.query import StreamingQuery

from examples.demo.flights import VALUE_SCHEMA
from nats_stream_source import register, watch_progress
from nats_stream_source.delta import configure, follow

_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.numRecentProgressUpdates": "100000",
}


def start_session(engine: str, work: Path) -> SparkSession:
    """Start a local session that logs into ``work``; the engine "spark" downloads Delta's jars."""
    builder = SparkSession.builder.appName("demo").master("local[*]")
    builder = configure(builder, delta=engine == "spark", small_machine=True)
    builder = builder.config(map={**_SETTINGS, "spark.sql.warehouse.dir": str(work / "warehouse")})
    # Spark's launcher and its JVM keep the standard error that they are started with.
    stderr = os.dup(2)
    with (work / "spark.log").open("ab") as log:
        os.dup2(log.fileno(), 2)
        try:
            spark = builder.getOrCreate()
            register(spark, check=False)  # now, so that tasks pass their counts to the metrics
        finally:
            os.dup2(stderr, 2)
    return spark


def start_query(
    spark: SparkSession, options: dict[str, Any], table: Path, sink: str, **arguments: Any
) -> StreamingQuery:
    """Start a query that follows a bucket into ``table``, from its checkpoint beside the table.

    ``options`` are those of ``nats_kv``, ``arguments`` those of :func:`follow`, of which the sink
    ``parquet``, which gets every row, uses ``once`` and ``prometheus``.
    """
    entries = spark.readStream.format("nats_kv").options(**options).load()
    parsed = F.from_json(F.col("value").cast("string"), VALUE_SCHEMA)
    rows = entries.withColumn("fields", parsed).select("*", "fields.*").drop("value", "fields")
    checkpoint = f"{table}-checkpoint"
    if sink == "delta":
        return follow(rows, table, checkpoint=checkpoint, **arguments)
    writer = rows.writeStream.format("parquet").option("checkpointLocation", checkpoint)
    if arguments.get("once"):
        writer = writer.trigger(availableNow=True)
    query = writer.start(str(table))
    watch_progress(query, prometheus=arguments.get("prometheus"))
    return query


def reached(query: StreamingQuery) -> int:
    """The last stream sequence of the last finished batch, or 0; raises the query's error."""
    if (error := query.exception()) is not None:
        raise error
    progress = query.lastProgress
    return 0 if progress is None else int(_offset(progress, "endOffset").get("stream_seq", 0))


def figures(progress: Sequence[Any]) -> dict[str, int]:
    """Figures of all runs. An offset counts a row once, Spark again if a batch reads it twice."""
    offsets = [(_offset(batch, "endOffset"), _offset(batch, "latestOffset")) for batch in progress]
    end = offsets[-1][0]
    lags = [latest["consumer_seq"] - end["consumer_seq"] for end, latest in offsets if latest]
    busy = [batch for batch in progress if batch["numInputRows"]]
    seconds = sum(batch["durationMs"]["triggerExecution"] for batch in busy) / 1000
    return {
        "rows": end["consumer_seq"],
        "micro-batches": len(busy),
        "rows/s in its batches": round(sum(batch["numInputRows"] for batch in busy) / seconds),
        "revisions compacted away": end["stream_seq"] - end["origin"] - end["consumer_seq"],
        "lag in rows, at most": max(lags, default=0),
        "lag in rows, at the end": lags[-1] if lags else 0,
    }


def _offset(progress: Any, name: str) -> dict[str, Any]:
    offset = progress["sources"][0][name]
    return (json.loads(offset) if isinstance(offset, str) else offset) or {}
