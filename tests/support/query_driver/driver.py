"""A streaming query without Spark: calls a stream reader as Spark calls it.

:class:`QueryDriver` is the one way to plan and read a streaming query without Spark. It calls the
stream reader for Spark 4.2 with the arguments and in the order of Spark. As in Spark, offsets pass
through JSON, and the reader and its partitions through pickle on their way to a task. The end of a
micro-batch is logged when it is planned, and becomes the query's position when it was read.

::

    with new_query(url, stream="ORDERS") as query:
        records = query.read_new()                        # all messages of the stream
        ...
        more = query.read_new()                           # the messages since then
        with new_query(url, stream="ORDERS", offset=query.offset) as restarted: ...
"""

from __future__ import annotations

import asyncio
import itertools
import json
import pickle
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from nats_stream_source.options import KvOptions, Mode, StreamOptions, kv_options, stream_options
from nats_stream_source.rows.base import Split
from nats_stream_source.rows.formats import format_adapter
from nats_stream_source.spark.planning.query_planner import QueryPlanner
from nats_stream_source.spark.readers import NatsInputPartition
from nats_stream_source.spark.runner import Runner, close_cached_runners
from tests.support.oracle.row_check import Row, rows_of

OffsetJson = dict[str, Any]
"""An offset as Spark stores it in a checkpoint."""

Record = dict[str, Any]
"""A row by the names of its columns."""

Sequences = dict[str, list[int]]
"""The sequences of rows by the name of their bucket or stream, in the order of the rows."""

Each = Callable[[int], None]
"""Called after each record batch, with the number of rows so far."""

DEADLINE = 600.0
"""Seconds in which a query must make progress; only a failing test takes that long."""

_EMPTY_POLLS = 3
"""Empty polls after which a query is idle. A planner that was not called for a while reports one
empty poll without a request to the server."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A completed micro-batch.

    Attributes:
        start, end: its range ``(start, end]``; 0 in a query of several streams.
        listed: whether it was read as last values.
        known: the last sequence of the stream when the micro-batch was completed; 0 when the query
            does not request it.
    """

    start: int
    end: int
    listed: bool
    known: int
    batches: tuple[pa.RecordBatch, ...] = ()

    @property
    def rows(self) -> list[Row]:
        return [row for batch in self.batches for row in rows_of(batch)]

    @property
    def records(self) -> list[Record]:
        return [record for batch in self.batches for record in batch.to_pylist()]

    @property
    def sequences(self) -> Sequences:
        return sequences_by_stream(self.records)


class QueryDriver:
    """The stream reader of one query, in the planner's process and in the tasks.

    Args:
        offsets: the offsets of the completed micro-batches of a query that restarts.
        clock, sleep: the planner's, in seconds, by which it spaces the polls of an idle query.
        outage_timeout: seconds; 0 since most tests of servers that are away expect the error.
        last_now: returns the last sequence of the stream, for :attr:`MicroBatch.known`.
        empty_polls: empty polls after which the query is idle.

    Attributes:
        offsets: the offsets of all completed micro-batches; the first one is the query's start.
        logged: the end of a micro-batch that is planned and not completed.
    """

    def __init__(
        self,
        options: KvOptions | StreamOptions,
        offsets: Iterable[OffsetJson] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        cores: int | None = None,
        outage_timeout: float = 0.0,
        last_now: Callable[[], int] = lambda: 0,
        empty_polls: int = _EMPTY_POLLS,
    ) -> None:
        common = replace(options.common, outage_timeout=outage_timeout)
        options = replace(options, common=common)
        adapter = format_adapter(options)
        # Here, since tests on Spark 4.0 and 4.1, which lack these interfaces, load this module.
        from pyspark.sql.streaming.datasource import ReadAllAvailable

        from nats_stream_source.spark.readers import AdmissionReader

        self._all = ReadAllAvailable()
        self._reader = AdmissionReader(adapter)
        runner = Runner(options.connection)
        self._reader._runner = runner
        self._reader._planner = QueryPlanner(adapter, runner.connection, clock, sleep, cores=cores)
        self._last_now = last_now
        self._empty_polls = empty_polls
        self._started = False
        self.offsets = list(offsets)
        self.logged: OffsetJson | None = None
        self._partitions: list[NatsInputPartition] = []
        self.done: list[MicroBatch] = []

    def __enter__(self) -> QueryDriver:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # -- the calls of Spark -----------------------------------------------------------------------

    def prepare_available_now(self) -> None:
        """Fix the end of the run, as ``Trigger.AvailableNow`` does."""
        self._reader.prepareForTriggerAvailableNow()

    def initial_offset(self) -> OffsetJson:
        """Return the start position of a query without a checkpoint."""
        return _through_json(self._reader.initialOffset())

    def latest_offset(self, start: OffsetJson, *, limited: bool = True) -> OffsetJson:
        """Return the end of the micro-batch after ``start``; ``start`` without new messages.

        Args:
            limited: False as in ``Trigger.Once``, which requests all messages.
        """
        limit = self._reader.getDefaultReadLimit() if limited else self._all
        return _through_json(self._reader.latestOffset(start, limit))

    def report_latest_offset(self) -> OffsetJson:
        """Return the end of the stream, as the last request for it found it."""
        return _through_json(self._reader.reportLatestOffset())

    def partitions(self, start: OffsetJson, end: OffsetJson) -> list[NatsInputPartition]:
        """Return the partitions of the micro-batch, one per task, as the tasks receive them."""
        partitions: list[NatsInputPartition] = pickle.loads(
            pickle.dumps(self._reader.partitions(start, end))
        )
        return partitions

    def read_task(self, partition: NatsInputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of a partition, from one attempt of its task."""
        reader, partition = pickle.loads(pickle.dumps((self._reader, partition)))
        batches: Iterator[pa.RecordBatch] = reader.read(partition)
        return batches

    def close(self) -> None:
        """Close the connections of the planner and of the tasks, as at the end of a query."""
        self._reader.stop()
        close_cached_runners()

    # -- micro-batches ----------------------------------------------------------------------------

    @property
    def offset(self) -> OffsetJson:
        return self.start()

    def start(self) -> OffsetJson:
        """Return the query's position; at first determine its start position."""
        if not self._started:
            # Spark requests the initial offset after each restart, also with a checkpoint.
            initial = self.initial_offset()
            self._started = True
            if not self.offsets:
                self.offsets.append(initial)
        return self.offsets[-1]

    @property
    def seq(self) -> int:
        """The sequence up to which the query of one stream has read."""
        return int(self.offsets[-1].get("stream_seq", 0)) if self.offsets else 0

    @property
    def tasks(self) -> list[tuple[Split, ...]]:
        """The splits of each task of the planned micro-batch, or of the last one."""
        return [partition.splits for partition in self._partitions]

    @property
    def positions(self) -> dict[str, int]:
        """The position of a query of several streams, by stream."""
        return {name: at["stream_seq"] for name, at in self.offset["streams"].items()}

    @property
    def splits(self) -> list[Split]:
        """The splits of the planned micro-batch, or of the last one."""
        return [split for task in self.tasks for split in task]

    @property
    def rows(self) -> list[Row]:
        return [row for batch in self.done for row in batch.rows]

    @property
    def records(self) -> list[Record]:
        return [record for batch in self.done for record in batch.records]

    def plan(self) -> bool:
        """Plan the next micro-batch; return False without new messages."""
        end = self.latest_offset(self.offset)
        if end == self.offset:
            return False
        self.plan_logged(end)
        return True

    def plan_logged(self, logged: OffsetJson) -> None:
        """Plan the micro-batch with the end ``logged``, as after a restart before it was done."""
        self._partitions = self.partitions(self.offset, logged)
        self.logged = logged

    def read(self, each: Each | None = None) -> MicroBatch:
        """Read the planned micro-batch and complete it."""
        batches: list[pa.RecordBatch] = []
        rows = 0
        for partition in self._partitions:
            for batch in self.read_task(partition):
                batches.append(batch)
                rows += batch.num_rows
                if each is not None:
                    each(rows)
        assert self.logged is not None
        start = self.seq
        self.offsets.append(self.logged)
        self.logged = None
        listed = any(split.range.last_per_subject for split in self.splits)
        done = MicroBatch(start, self.seq, listed, self._last_now(), tuple(batches))
        self.done.append(done)
        return done

    def read_range(self, start: OffsetJson, end: OffsetJson) -> Sequences:
        """Read the range between two offsets, as Spark repeats a failed micro-batch."""
        tasks = self.partitions(start, end)
        batches = [batch for task in tasks for batch in self.read_task(task)]
        return sequences_by_stream(record for batch in batches for record in batch.to_pylist())

    def until(self, seq: int) -> None:
        """Plan and read micro-batches until the query has read up to ``seq``."""
        deadline = time.monotonic() + DEADLINE
        while self.seq < seq:
            assert time.monotonic() < deadline, f"read up to {self.seq}, not {seq}"
            if self.plan():
                self.read()

    def drain(self) -> list[MicroBatch]:
        """Plan and read micro-batches until all messages are read; return those with rows."""
        deadline = time.monotonic() + DEADLINE
        before, empty = len(self.done), 0
        while empty < self._empty_polls:
            assert time.monotonic() < deadline, f"still reading at {self.offset}"
            if self.plan():
                self.read()
                empty = 0
            else:
                empty += 1
        return [batch for batch in self.done[before:] if batch.batches]

    def read_new(self) -> list[Record]:
        """Read until all messages are read; return the rows."""
        return [record for batch in self.drain() for record in batch.records]

    def read_sequences(self) -> Sequences:
        """Read until all messages are read; return the sequences by bucket or stream."""
        return sequences_by_stream(self.read_new())


def new_query(
    url: str,
    *,
    offset: OffsetJson | None = None,
    cores: int = 2,
    clock: Clock | None = None,
    **options: Any,
) -> QueryDriver:
    """Return a query whose planner does not wait between polls.

    The planner's clock advances by a second with each call, so the planner never spaces its polls.
    With a :class:`Clock`, time passes where it sleeps, and where the test says so.
    """
    ticks = itertools.count()
    strings, of_buckets = texts(url, options)
    parse = kv_options if of_buckets else stream_options
    return QueryDriver(
        parse(strings, Mode.STREAMING),
        [] if offset is None else [offset],
        clock=clock or (lambda: float(next(ticks))),
        sleep=asyncio.sleep if clock is None else clock.sleep,
        cores=cores,
        empty_polls=1,
    )


def read_all(url: str, **options: Any) -> list[Record]:
    """The rows of a query of its own, until all messages are read."""
    with new_query(url, **options) as query:
        return query.read_new()


class Clock:
    """A clock that a planner and a test move on."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def sequences(records: Iterable[Record]) -> list[int]:
    return [record["sequence"] for record in records]


def sequences_by_stream(records: Iterable[Record]) -> Sequences:
    """The sequences of rows by the name of their bucket or stream."""
    found: Sequences = {}
    for record in records:
        of_bucket = "bucket" in record
        name = record["bucket" if of_bucket else "stream"]
        found.setdefault(name, []).append(record["revision" if of_bucket else "sequence"])
    return found


def texts(url: str, options: dict[str, Any]) -> tuple[dict[str, str], bool]:
    """The options as texts, without those that are None, and whether they are of buckets."""
    strings = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in {"servers": url, **options}.items()
        if value is not None
    }
    return strings, bool({"bucket", "buckets", "bucketPattern"} & strings.keys())


def _through_json(offset: OffsetJson) -> OffsetJson:
    return dict(json.loads(json.dumps(offset)))
