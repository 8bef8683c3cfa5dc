"""The cost of many buckets in one query: polls of an idle query, planning, and the first read.

The benchmark fills so many buckets with so many keys each, and one bucket with as many entries as
all of them. A query selects the small ones by a pattern. Without Spark, planner and tasks run in
this process, one task after the other. Measured are

- the idle query, called every 10 ms as Spark does: CPU of planner and server, requests a second;
- planning a micro-batch after writes to 10 buckets, and to all of them: end and tasks;
- the first read of all buckets, planning included, beside that of the one bucket.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.support.bucket_data import entries, fill_bucket
from benchmarks.support.machine import Stopwatch
from benchmarks.support.query import Query, Requests, options_of
from benchmarks.support.raw_connection import fill
from nats_stream_source.embedded import NatsServer
from nats_stream_source.options import KvOptions


def idle(server: NatsServer, options: KvOptions, seconds: float) -> dict[str, float]:
    """A query whose streams have been silent for long: shares of a core, requests a second."""
    with Query(options) as query:
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
    return {
        "planner": watch.own_cpu / watch.wall,
        "server": watch.other_cpu / watch.wall,
        "requests": count / watch.wall,
    }


def planned(
    server: NatsServer, options: KvOptions, names: Sequence[str], touched: int, rounds: int
) -> dict[str, float]:
    """Plan micro-batches after a write to each of ``touched`` buckets, and read them; ms."""
    took: list[float] = []
    asked = 0
    with Query(options, jumps=True) as query:
        while tasks := query.poll():
            query.read(tasks)
        for turn in range(rounds):
            start = turn * touched % len(names)
            chosen = [names[(start + i) % len(names)] for i in range(touched)]
            fill(server.port, ((f"$KV.{name}.key.{turn}", None, b"new") for name in chosen))
            with Requests() as requests:
                began = time.perf_counter()
                tasks = query.poll()
                took.append((time.perf_counter() - began) * 1000)
                asked += requests.count
            rows = query.read(tasks)
            if rows != touched:
                raise RuntimeError(f"read {rows} rows, expected {touched}")
    p50 = statistics.median(took)
    return {"touched": touched, "p50": p50, "worst": max(took), "requests": asked // rounds}


def first_read(options: KvOptions, rows: int) -> float:
    """Plan and read everything that the buckets have; returns rows per second."""
    began = time.perf_counter()
    with Query(options) as query:
        found = query.read(query.poll())
        seconds = time.perf_counter() - began
    if found != rows:
        raise RuntimeError(f"read {found} rows, expected {rows}")
    return rows / seconds


def run(
    buckets: int = 1000, keys: int = 1000, rounds: int = 15, seconds: float = 15.0
) -> dict[str, Any]:
    """All figures, on a server that is started for them."""
    names = [f"site-{i:04}" for i in range(buckets)]
    rows = buckets * keys
    ratios = []
    with NatsServer() as server:
        for name in names:
            fill_bucket(server.port, name, entries(keys, keys), history=1)
        fill_bucket(server.port, "one", entries(rows, rows), history=1)
        several = options_of(server.url, bucketPattern="site-.*")
        one = options_of(server.url, bucket="one")
        for _ in range(max(1, rounds // 5)):  # in turn, so that both meet the same machine
            many = first_read(several, rows)
            ratios.append(many / first_read(one, rows))
        plans = [planned(server, several, names, touched, rounds) for touched in (10, buckets)]
        rest = idle(server, several, seconds)
    return {
        "buckets": buckets,
        "keys": keys,
        "idle": rest,
        "planned": plans,
        "ratio": statistics.median(ratios),
    }
