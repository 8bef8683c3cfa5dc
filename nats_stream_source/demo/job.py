"""The Spark side: the session, the query that follows the bucket, and what it did.

This is the code to copy: everything a query needs is in :func:`start_session` and
:func:`start_query`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery

from nats_stream_source.demo.flights import VALUE_SCHEMA
from nats_stream_source.errors import NatsSourceError

Sink = Literal["delta", "parquet"]

MAX_ROWS = 50_000
"""The most rows of one micro-batch that follows the bucket."""

_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.numRecentProgressUpdates": "100000",
    # Made for clusters, the defaults (200 and 50) are thousands of tiny tasks on one machine.
    "spark.sql.shuffle.partitions": "2",
}

_DELTA_SETTINGS = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.snapshotPartitions": "2",
}


class SessionError(NatsSourceError):
    """Spark did not start."""


@contextmanager
def _output_into(log: Path) -> Iterator[None]:
    """This process's standard output and error, and its children's, into a file meanwhile.

    Spark's launcher prints before any log setting holds, and the JVM keeps for its whole life the
    files that it was started with.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {number: os.dup(number) for number in (1, 2)}
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        for number in saved:
            os.dup2(file, number)
        yield
    finally:
        os.close(file)
        for number, was in saved.items():
            os.dup2(was, number)
            os.close(was)


def start_session(sink: Sink, log: Path, warehouse: Path) -> SparkSession:
    """A local session on all cores, with Delta Lake where the sink needs it; logs go to ``log``.

    Raises:
        SessionError: it did not start; says so where Delta's jars could not be had.
    """
    # Spark starts its Python workers from the python3 on the PATH, which has no such package.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.builder.appName("nats-stream-source demo").master("local[*]")
    builder = builder.config("spark.sql.warehouse.dir", str(warehouse))
    for name, value in _SETTINGS.items():
        builder = builder.config(name, value)
    if sink == "delta":
        from delta import configure_spark_with_delta_pip

        for name, value in _DELTA_SETTINGS.items():
            builder = builder.config(name, value)
        builder = configure_spark_with_delta_pip(builder)
    interrupted = signal.getsignal(signal.SIGINT)
    try:
        with _output_into(log):
            return builder.getOrCreate()
    except PySparkException as error:
        # The launcher ends with a bare exit status; only its log tells the reason.
        said = log.read_text(errors="replace")
        if "unresolved dependency" in said or "UNRESOLVED DEPENDENCIES" in said:
            raise SessionError(
                "Delta Lake's jars could not be had from Maven Central: connect this machine to it"
                " (behind a mirror: spark.jars.ivySettings), or take the sink that needs no jars,"
                " `make demo SINK=parquet`"
            ) from None
        raise SessionError(f"Spark did not start ({error}); its log is {log}") from None
    finally:
        # Spark's own handler calls the JVM, perhaps from the middle of another call to it.
        signal.signal(signal.SIGINT, interrupted)


def flights_of(entries: DataFrame) -> DataFrame:
    """The rows of ``nats_kv`` with the JSON value's fields as columns."""
    flight = F.from_json(F.col("value").cast("string"), VALUE_SCHEMA)
    entry = ("key", "revision", "operation", "created", "stream_created")
    return entries.select(*entry, flight.alias("flight")).select(*entry, "flight.*")


def start_query(
    spark: SparkSession,
    *,
    options: Mapping[str, str],
    table: Path,
    checkpoint: Path,
    sink: Sink,
    start_sequence: int | None = None,
    deletes: Literal["remove", "mark"] = "remove",
) -> StreamingQuery:
    """Follow a bucket into ``table``, from where ``checkpoint`` stands.

    With ``start_sequence`` it takes what is there from that sequence on and ends; else it runs
    until it is stopped. ``options`` name the servers and the bucket; ``deletes`` is what the Delta
    table does with deleted keys, the Parquet files get every row.
    """
    source = spark.readStream.format("nats_kv").options(**options)
    if start_sequence is None:
        # Every revision that the bucket still has, not only the newest of each key.
        source = source.option("includeHistory", True).option("maxRowsPerTrigger", MAX_ROWS)
    else:
        source = source.option("startSequence", start_sequence)
    writer = flights_of(source.load()).writeStream
    writer = writer.option("checkpointLocation", str(checkpoint))
    if start_sequence is not None:
        writer = writer.trigger(availableNow=True)
    if sink == "parquet":
        return writer.format("parquet").option("path", str(table)).start()
    from nats_stream_source.delta import merge_changes

    return writer.foreachBatch(merge_changes(str(table), deletes=deletes)).start()


def reached(query: StreamingQuery) -> int:
    """The stream sequence up to which the query's last finished batch has read; 0 before one."""
    progress = query.lastProgress
    if progress is None:
        return 0
    return int(_offset(progress["sources"][0], "endOffset").get("stream_seq", 0))


def ended(query: StreamingQuery) -> bool:
    """Whether the query has come to its end.

    Raises:
        StreamingQueryException: it failed.
    """
    if query.isActive:
        return False
    error = query.exception()
    if error is not None:
        raise error
    return True


@dataclass(frozen=True, slots=True)
class Tally:
    """What a query did, from Spark's own progress reports.

    Attributes:
        rows: how many rows its batches read.
        batches: how many batches had rows.
        seconds: how long these took.
        compacted: sequences in the batches' ranges that the bucket no longer had.
        largest_lag: rows between the end of a batch and the end of the stream, at most.
        lag: the same after the last batch.
    """

    rows: int = 0
    batches: int = 0
    seconds: float = 0.0
    compacted: int = 0
    largest_lag: int = 0
    lag: int = 0

    @property
    def rate(self) -> float:
        """Rows per second of the time in which a batch ran."""
        return self.rows / self.seconds if self.seconds else 0.0


def tally(progress: Iterable[Any], so_far: Tally | None = None) -> Tally:
    """Add up ``query.recentProgress``, to what ``so_far`` holds of an earlier run of the query."""
    total = so_far or Tally()
    for batch in progress:
        source = batch["sources"][0]
        start, end = _offset(source, "startOffset"), _offset(source, "endOffset")
        if not end:
            continue
        latest = _offset(source, "latestOffset") or end
        lag = max(0, latest["consumer_seq"] - end["consumer_seq"])
        rows = batch["numInputRows"]
        # Spark gives the first batch no start: what it began after is in the offset.
        began = start.get("stream_seq", end["origin"])
        total = Tally(
            rows=total.rows + rows,
            batches=total.batches + (rows > 0),
            seconds=total.seconds + (batch["durationMs"]["triggerExecution"] / 1000 if rows else 0),
            compacted=total.compacted + end["stream_seq"] - began - rows,
            largest_lag=max(total.largest_lag, lag),
            lag=lag,
        )
    return total


def _offset(source: Any, name: str) -> dict[str, Any]:
    text = source[name]
    loaded = json.loads(text) if isinstance(text, str) else text
    return loaded or {}
