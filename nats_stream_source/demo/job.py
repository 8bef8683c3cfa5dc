"""The Spark session, the query that follows the bucket, and the query's figures.

:func:`start_session` and :func:`start_query` are complete examples to copy from.
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

from nats_stream_source import register, watch_progress
from nats_stream_source.delta import configure, configure_delta, follow
from nats_stream_source.demo.flights import VALUE_SCHEMA
from nats_stream_source.errors import NatsSourceError

Sink = Literal["delta", "parquet"]
Engine = Literal["auto", "delta-rs", "spark"]

MAX_ROWS = 50_000
"""Maximum number of rows of a micro-batch that follows the bucket."""

_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.numRecentProgressUpdates": "100000",
    # The defaults (200 and 50) are for clusters; on one machine they start thousands of small
    # tasks.
    "spark.sql.shuffle.partitions": "2",
}


class SessionError(NatsSourceError):
    """Spark did not start."""


@contextmanager
def _output_into(log: Path) -> Iterator[None]:
    """Redirect standard output and error of this process and its new children into a file.

    Spark's launcher prints before its log settings apply, and the JVM keeps the output files that
    it was started with.
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


def start_session(engine: Engine, log: Path, warehouse: Path) -> SparkSession:
    """Start a local session on all cores and log into ``log``; Spark's engine needs Delta Lake.

    Raises:
        SessionError: Spark did not start, or Delta's jars could not be downloaded.
    """
    # By default Spark runs Python workers with the first python3 on the PATH, without this package.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.builder.appName("nats-stream-source demo").master("local[*]")
    builder = configure(builder).config("spark.sql.warehouse.dir", str(warehouse))
    for name, value in _SETTINGS.items():
        builder = builder.config(name, value)
    if engine == "spark":
        builder = configure_delta(builder, small_machine=True)
    interrupted = signal.getsignal(signal.SIGINT)
    try:
        with _output_into(log):
            spark = builder.getOrCreate()
            # Registered here, tasks pass their counts to the metrics.
            register(spark, check=False)
            return spark
    except PySparkException as error:
        # The error has only the launcher's exit status; the reason is in the log.
        output = log.read_text(errors="replace")
        if "unresolved dependency" in output or "UNRESOLVED DEPENDENCIES" in output:
            raise SessionError(
                "could not download Delta Lake's jars from Maven Central: the dependencies are not"
                " resolved; connect this machine to it (for a mirror: spark.jars.ivySettings), or"
                " use the engine without jars, `make demo`"
            ) from None
        raise SessionError(f"could not start Spark: {error}; see its log {log}") from None
    finally:
        # Spark's own handler calls the JVM, possibly during another call to it.
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
    engine: Engine = "auto",
    start_sequence: int | None = None,
    deletes: Literal["remove", "mark"] = "remove",
    prometheus: str | None = None,
) -> StreamingQuery:
    """Start a query that follows a bucket into ``table``, from the offset of ``checkpoint``.

    With ``start_sequence`` the query reads the entries from that sequence to the current end, and
    ends; without it the query runs until it is stopped. ``options`` set the servers and the bucket.
    ``engine`` and ``deletes`` apply to the Delta table; the Parquet files get every row.
    ``prometheus`` is the address of an endpoint with the query's metrics.
    """
    source = spark.readStream.format("nats_kv").options(**options)
    if start_sequence is None:
        # All revisions that the bucket has, not only the newest of each key.
        source = source.option("includeHistory", True).option("maxRowsPerTrigger", MAX_ROWS)
    else:
        source = source.option("startSequence", start_sequence)
    rows, once = flights_of(source.load()), start_sequence is not None
    if sink == "delta":
        return follow(
            rows,
            str(table),
            checkpoint=str(checkpoint),
            once=once,
            prometheus=prometheus,
            deletes=deletes,
            engine=engine,
        )
    writer = rows.writeStream.format("parquet").option("checkpointLocation", str(checkpoint))
    if once:
        writer = writer.trigger(availableNow=True)
    query = writer.option("path", str(table)).start()
    if prometheus is not None:
        watch_progress(query, prometheus=prometheus)
    return query


def reached(query: StreamingQuery) -> int:
    """The last stream sequence of the query's last finished batch; 0 before the first batch."""
    progress = query.lastProgress
    if progress is None:
        return 0
    return int(_offset(progress["sources"][0], "endOffset").get("stream_seq", 0))


def ended(query: StreamingQuery) -> bool:
    """Whether the query has ended.

    Raises:
        StreamingQueryException: the query failed.
    """
    if query.isActive:
        return False
    error = query.exception()
    if error is not None:
        raise error
    return True


@dataclass(frozen=True, slots=True)
class Tally:
    """A query's figures from Spark's progress reports.

    Attributes:
        rows: number of rows of all batches.
        batches: number of batches with rows.
        seconds: duration of these batches.
        compacted: sequences in the batches' ranges that the bucket no longer has.
        largest_lag: maximum number of rows between the end of a batch and the end of the stream.
        lag: the lag after the last batch.
    """

    rows: int = 0
    batches: int = 0
    seconds: float = 0.0
    compacted: int = 0
    largest_lag: int = 0
    lag: int = 0

    @property
    def rate(self) -> float:
        """Rows per second of the batches' duration."""
        return self.rows / self.seconds if self.seconds else 0.0


def tally(progress: Iterable[Any], so_far: Tally | None = None) -> Tally:
    """Add the figures of ``query.recentProgress`` to ``so_far``, those of an earlier run."""
    total = so_far or Tally()
    for batch in progress:
        source = batch["sources"][0]
        start, end = _offset(source, "startOffset"), _offset(source, "endOffset")
        if not end:
            continue
        latest = _offset(source, "latestOffset") or end
        lag = max(0, latest["consumer_seq"] - end["consumer_seq"])
        rows = batch["numInputRows"]
        # The first batch has no start offset: its start is the origin of its end offset.
        start_seq = start.get("stream_seq", end["origin"])
        total = Tally(
            rows=total.rows + rows,
            batches=total.batches + (rows > 0),
            seconds=total.seconds + (batch["durationMs"]["triggerExecution"] / 1000 if rows else 0),
            compacted=total.compacted + end["stream_seq"] - start_seq - rows,
            largest_lag=max(total.largest_lag, lag),
            lag=lag,
        )
    return total


def _offset(source: Any, name: str) -> dict[str, Any]:
    offset = source[name]
    return (json.loads(offset) if isinstance(offset, str) else offset) or {}
