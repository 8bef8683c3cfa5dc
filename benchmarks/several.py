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
from pathlib import Path
from typing import Any

from benchmarks.support.bucket_data import entries, fill_bucket
from benchmarks.support.machine import Stopwatch
from benchmarks.support.output import finish
from benchmarks.support.planner_bucket import Requests
from benchmarks.support.raw_connection import fill
from nats_stream_source.embedded import NatsServer
from nats_stream_source.options import KvOptions, Mode, kv_options
from nats_stream_source.rows.kv import KvFormat
from nats_stream_source.spark.planning.query_planner import QueryPlanner
from nats_stream_source.spark.runner import Runner, close_cached_runners
from nats_stream_source.spark.stream_reader_v42 import AdmissionReader
from nats_stream_source.spark.tasks import NatsInputPartition

_IDLE_SECONDS = 15.0
_ONE = "one"


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


def idle(server: NatsServer, options: KvOptions, seconds: float) -> dict[str, float]:
    """A query whose streams have been silent for long: shares of a core, requests a second."""
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
    return {
        "planner": watch.own_cpu / watch.wall,
        "server": watch.other_cpu / watch.wall,
        "baseline": nothing.other_cpu / nothing.wall,
        "requests": count / watch.wall,
    }


def planned(
    server: NatsServer, options: KvOptions, names: Sequence[str], touched: int, rounds: int
) -> dict[str, float]:
    """Plan micro-batches after a write to each of ``touched`` buckets, and read them; ms."""
    query = Query(options, jumps=True)
    took: list[float] = []
    asked = 0
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
            rows = query.read(tasks)
            if rows != touched:
                raise RuntimeError(f"read {rows} rows, expected {touched}")
    finally:
        query.close()
    p50 = statistics.median(took)
    return {"touched": touched, "p50": p50, "worst": max(took), "requests": asked // rounds}


def first_read(options: KvOptions, rows: int) -> float:
    """Plan and read everything that the buckets have; returns rows per second."""
    began = time.perf_counter()
    query = Query(options)
    try:
        found = query.read(query.poll())
        seconds = time.perf_counter() - began
    finally:
        query.close()
    if found != rows:
        raise RuntimeError(f"read {found} rows, expected {rows}")
    return rows / seconds


def measure(buckets: int, keys: int, rounds: int, seconds: float) -> dict[str, Any]:
    """All figures, on a server that is started for them."""
    names = [f"site-{i:04}" for i in range(buckets)]
    rows = buckets * keys
    ratios = []
    with NatsServer() as server:
        for name in names:
            fill_bucket(server.port, name, entries(keys, keys), history=1)
        fill_bucket(server.port, _ONE, entries(rows, rows), history=1)
        several = _options(server, bucketPattern="site-.*")
        for _ in range(max(1, rounds // 5)):  # in turn, so that both meet the same machine
            many = first_read(several, rows)
            ratios.append(many / first_read(_options(server, bucket=_ONE), rows))
        plans = [planned(server, several, names, touched, rounds) for touched in (10, buckets)]
        rest = idle(server, several, seconds)
    return {
        "buckets": buckets,
        "keys": keys,
        "idle": rest,
        "planned": plans,
        "ratio": statistics.median(ratios),
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
