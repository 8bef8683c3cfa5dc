"""The cost of many buckets in one query: polls of an idle query, planning, and the first read.

``python -m benchmarks.several [--quick] [--json FILE] [--buckets 1000]``

The benchmark fills so many buckets with so many keys each, and one bucket with as many entries as
all of them. A query selects the small ones by a pattern. Without Spark, planner and tasks run in
this process, one task after the other. Measured are

- the idle query, called every 10 ms as Spark does: CPU of planner and server, requests a second;
- planning a micro-batch after writes to 10 buckets, and to all of them: end and tasks;
- the first read of all buckets, planning included, beside that of the one bucket.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.bucket_data import entries, fill_bucket
from benchmarks.support.machine import Stopwatch
from benchmarks.support.output import finish
from benchmarks.support.planner_bucket import Requests
from benchmarks.support.raw_connection import fill
from nats_stream_source.embedded import NatsServer
from nats_stream_source.options import KvOptions, Mode, kv_options
from nats_stream_source.spark.formats.kv import KvFormat
from nats_stream_source.spark.planning.query_planner import QueryPlanner
from nats_stream_source.spark.runner import Runner, close_cached_runners
from nats_stream_source.spark.stream_reader_v42 import AdmissionReader
from nats_stream_source.spark.tasks import NatsInputPartition

_IDLE_SECONDS = 15.0
_ONE = "one"


@dataclass(frozen=True, slots=True)
class Idle:
    """An idle query: shares of one core, and requests in a second."""

    planner: float
    server: float
    baseline: float
    requests: float


@dataclass(frozen=True, slots=True)
class Planned:
    """Planning of micro-batches after writes to ``touched`` buckets; milliseconds."""

    touched: int
    p50: float
    worst: float
    requests: int
    tasks: int


@dataclass(frozen=True, slots=True)
class FirstRead:
    """The first read of all entries: rows per second, and the seconds of planning in it."""

    buckets: int
    rows: int
    rows_per_second: float
    planning: float
    tasks: int


class Query:
    """A stream reader, called as Spark calls it.

    Args:
        jumps: whether the planner's clock advances a second with each call, so that it never waits.
    """

    def __init__(self, options: KvOptions, *, jumps: bool = False) -> None:
        adapter = KvFormat(options)
        self._reader = AdmissionReader(adapter)
        self.shift = 0.0
        ticks = itertools.count()
        runner = Runner(options.connection)
        self._reader._runner = runner
        self._reader._planner = QueryPlanner(
            adapter,
            runner.connection,
            clock=(lambda: float(next(ticks)))
            if jumps
            else (lambda: time.monotonic() + self.shift),
        )
        self.offset = self._reader.initialOffset()

    def poll(self) -> list[NatsInputPartition]:
        """Plan a micro-batch; return its tasks, none where there is nothing new."""
        end = self._reader.latestOffset(self.offset, self._reader.getDefaultReadLimit())
        if end == self.offset:
            return []
        tasks: Any = self._reader.partitions(self.offset, end)
        self.offset = end
        return list(tasks)

    def read(self, tasks: Sequence[NatsInputPartition]) -> int:
        """Read the tasks one after the other; return the number of rows."""
        return sum(batch.num_rows for task in tasks for batch in self._reader.read(task))

    def close(self) -> None:
        """Close the connections of planner and tasks."""
        self._reader.stop()
        close_cached_runners()


def idle(server: NatsServer, options: KvOptions, seconds: float) -> Idle:
    """Measure a query whose streams have been silent for long."""
    query = Query(options)
    try:
        while tasks := query.poll():
            query.read(tasks)
        query.shift += 3600
        query.poll()
        with Requests() as requests, Stopwatch(server.pid) as watch:
            stop = time.perf_counter() + seconds
            while time.perf_counter() < stop:
                query.poll()
                time.sleep(0.01)
            count = requests.count
        with Stopwatch(server.pid) as nothing:
            time.sleep(seconds / 2)
    finally:
        query.close()
    return Idle(
        watch.own_cpu / watch.wall,
        watch.other_cpu / watch.wall,
        nothing.other_cpu / nothing.wall,
        count / watch.wall,
    )


def planned(
    server: NatsServer, options: KvOptions, names: Sequence[str], touched: int, rounds: int
) -> Planned:
    """Plan micro-batches after a write to each of ``touched`` buckets; read them too."""
    query = Query(options, jumps=True)
    took: list[float] = []
    asked = tasks_planned = 0
    try:
        while tasks := query.poll():
            query.read(tasks)
        for turn in range(rounds):
            start = turn * touched % len(names)
            chosen = [names[(start + i) % len(names)] for i in range(touched)]
            fill(server.port, ((f"$KV.{name}.key.{turn}", b"", b"new") for name in chosen))
            with Requests() as requests:
                began = time.perf_counter()
                tasks = query.poll()
                took.append((time.perf_counter() - began) * 1000)
                asked += requests.count
            tasks_planned = len(tasks)
            rows = query.read(tasks)
            if rows != touched:
                raise RuntimeError(f"read {rows} rows, expected {touched}")
    finally:
        query.close()
    return Planned(touched, statistics.median(took), max(took), asked // rounds, tasks_planned)


def first_read(options: KvOptions, buckets: int, rows: int) -> FirstRead:
    """Plan and read everything that the buckets have."""
    began = time.perf_counter()
    query = Query(options)
    try:
        tasks = query.poll()
        planning = time.perf_counter() - began
        found = query.read(tasks)
        seconds = time.perf_counter() - began
    finally:
        query.close()
    if found != rows:
        raise RuntimeError(f"read {found} rows, expected {rows}")
    return FirstRead(buckets, rows, rows / seconds, planning, len(tasks))


def measure(buckets: int, keys: int, rounds: int, seconds: float) -> dict[str, Any]:
    """All figures, on a server that is started for them."""
    names = [f"site-{i:04}" for i in range(buckets)]
    rows = buckets * keys
    reads: list[FirstRead] = []
    with NatsServer() as server:
        for name in names:
            fill_bucket(server.port, name, entries(keys, keys), history=1)
        fill_bucket(server.port, _ONE, entries(rows, rows), history=1)
        several = _options(server, bucketPattern="site-.*")
        for _ in range(max(1, rounds // 5)):  # in turn, so that both meet the same machine
            reads.append(first_read(several, buckets, rows))
            reads.append(first_read(_options(server, bucket=_ONE), 1, rows))
        plans = [planned(server, several, names, touched, rounds) for touched in (10, buckets)]
        rest = idle(server, several, seconds)
    pairs = zip(reads[::2], reads[1::2], strict=True)
    return {
        "buckets": buckets,
        "keys": keys,
        "idle": asdict(rest),
        "planned": [asdict(one) for one in plans],
        "reads": [asdict(one) for one in reads],
        "ratio": statistics.median(a.rows_per_second / b.rows_per_second for a, b in pairs),
    }


def _options(server: NatsServer, **options: str) -> KvOptions:
    return kv_options({"servers": server.url, **options}, Mode.STREAMING)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write JSON if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="100 buckets, few rounds")
    parser.add_argument("--buckets", type=int)
    parser.add_argument("--keys", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    buckets = options.buckets or (100 if options.quick else 1000)
    if buckets < 10 or options.keys < 1:
        parser.error("at least 10 buckets with one key each")
    rounds, seconds = (5, 3.0) if options.quick else (15, _IDLE_SECONDS)
    finish("several", measure(buckets, options.keys, rounds, seconds), options.json)


if __name__ == "__main__":
    main()
