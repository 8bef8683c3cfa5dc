"""Puts at a constant rate, when a table shows them, and the work of the command ``follow``."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from pyspark.sql import SparkSession

from benchmarks.support.bucket_data import SIZE, entries, fill_bucket
from benchmarks.support.machine import cpu_seconds, in_process
from benchmarks.support.raw_connection import RawConnection
from nats_stream_source.embedded import NatsServer

_IDLE = 10.0  # seconds
_CAUGHT_UP = 300.0  # seconds until the table has the bucket
_TICK = 0.001  # seconds between two looks at the clock, or at the table's log
DEADLINE = 180.0  # seconds for the last puts to become visible

_spawned = multiprocessing.get_context("spawn")

_SCANS = 15

Visible = list[tuple[int, int]]
"""Pairs of time in ns and the greatest revision visible from then on."""


def put_values(port: int, rate: int, keys: int, count: int, times: Path) -> None:
    """Put ``count`` entries over a bare socket, ``rate`` a second; save the time of each in ns."""
    due_times, sent = np.zeros(count, np.int64), 0
    value = b"x" * SIZE
    numbers = np.random.default_rng(1).integers(0, keys, count).tolist()
    with RawConnection(port) as connection:
        began = time.perf_counter()
        while sent < count:
            due = min(count, int((time.perf_counter() - began) * rate))
            if due > sent:
                due_times[sent:due] = time.time_ns()
                puts = (
                    b"PUB $KV.bench.key.%d %d\r\n%s\r\n" % (number, SIZE, value)
                    for number in numbers[sent:due]
                )
                connection.send(b"".join(puts))
                sent = due
            time.sleep(_TICK)
        connection.flush()
    np.save(times, due_times)


def watch_table(path: str, last: int, visible: Queue[Visible], deadline: float) -> None:
    """Read each new entry of the log until revision ``last`` is visible; put what was seen."""
    version, seen = DeltaTable(path).version() + 1, []
    until = time.monotonic() + deadline
    while time.monotonic() < until and not (seen and seen[-1][1] >= last):
        entry = Path(f"{path}/_delta_log/{version:020}.json")
        if not entry.exists():
            time.sleep(_TICK)
            continue
        adds = [json.loads(line).get("add") for line in entry.read_text().splitlines()]
        statistics = [json.loads(add["stats"]) for add in adds if add and add.get("stats")]
        revisions = [one["maxValues"]["revision"] for one in statistics if one["numRecords"]]
        if revisions:
            seen.append((time.time_ns(), max(revisions)))
        version += 1
    visible.put(seen)


def latencies(puts: np.ndarray, first: int, visible: Visible) -> np.ndarray:
    """Milliseconds from each put to the first time at which its revision was visible.

    Args:
        puts: times in ns; the first put has the revision ``first``.
        visible: in the order of time.
    """
    times = np.array([at for at, _ in visible])
    revisions = np.maximum.accumulate([revision for _, revision in visible])
    position = np.searchsorted(revisions, first + np.arange(len(puts)))
    return (times[position] - puts) / 1e6


@contextmanager
def watching(way: str, table: str, last: int) -> Iterator[Callable[[], Visible]]:
    """Watch the table in another process; the value returns what it has seen at its end.

    Args:
        way: ``"foreachBatch"`` without a table to watch.
        last: the revision at which the watching ends.
    """
    if way == "foreachBatch":
        yield list
        return
    visible: Queue[Visible] = _spawned.Queue()
    process = _spawned.Process(target=watch_table, args=(table, last, visible, 2 * DEADLINE))
    process.start()
    try:
        yield lambda: visible.get(timeout=2 * DEADLINE)
    finally:
        process.terminate()
        process.join()


@contextmanager
def running(url: str, table: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command, which is stopped at the end of the block."""
    command = [sys.executable, "-m", "nats_stream_source", "follow", "bench", table]
    command += ["--servers", url, "--no-context"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def has_rows(table: str, rows: int) -> bool:
    """Whether a table has a number of rows, by the statistics of its files."""
    if not DeltaTable.is_deltatable(table):
        return False
    actions = DeltaTable(table).get_add_actions(flatten=True)
    return sum(pa.table(actions)["num_records"].to_pylist()) >= rows


def measure_follower(
    rate: int, keys: int, seconds: float, readers: SparkSession | None = None
) -> dict[str, Any]:
    """Follow a bucket of ``keys`` keys while ``rate`` entries a second are put for ``seconds``.

    Args:
        readers: of the table, with those without Spark, while it is written and afterwards; None:
            it is not read.
    """
    count = int(rate * seconds)
    with NatsServer() as server, tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        table, times = f"{scratch}/table", Path(scratch, "times.npy")
        first = fill_bucket(server.port, "bench", entries(keys, keys, SIZE), history=1) + 1
        began = time.monotonic()
        with running(server.url, table) as process:
            while not has_rows(table, keys):
                if time.monotonic() - began > _CAUGHT_UP or process.poll() is not None:
                    raise RuntimeError("the follower did not catch up")
                time.sleep(0.05)
            caught_up = time.monotonic() - began
            version = DeltaTable(table).version()
            with watching("follow", table, first + count - 1) as seen:
                cpu = cpu_seconds(process.pid)
                in_process(put_values, server.port, rate, keys, count, times)
                visible = seen()
                cpu = cpu_seconds(process.pid) - cpu
            commits = DeltaTable(table).version() - version
            scans: dict[str, float] = {}
            if readers is not None:
                reader = threading.Thread(target=lambda: scans.update(scan_times(table, readers)))
                reader.start()
                later = Path(scratch, "later.npy")
                in_process(put_values, server.port, rate, keys, count, later)
                reader.join()
            time.sleep(_IDLE)  # the upkeep of the last commits ends
            idle = cpu_seconds(process.pid)
            time.sleep(_IDLE)
            idle = cpu_seconds(process.pid) - idle
            status = Path(f"/proc/{process.pid}/status").read_text()
            (line,) = (one for one in status.splitlines() if "VmHWM" in one)
            peak = int(line.split()[1]) << 10
        taken = latencies(np.load(times), first, visible)
        p50, p99 = np.percentile(taken[count // 4 :], [50, 99])
        scanned: dict[str, Any] = {}
        if readers is not None:
            one = one_file(table, scratch, readers)
            scanned = {"written": scans, "rest": scan_times(table, readers), "one": one}
            scanned["files"] = len(pa.table(DeltaTable(table).get_add_actions()))
    return {
        "way": "follow",
        "keys": keys,
        "rate": rate,
        "p50": float(p50),
        "p99": float(p99),
        "memory": peak,
        "caught_up": caught_up,
        "cpu": cpu / seconds,
        "idle": idle / _IDLE,
        "commits": commits,
        "readers": scanned,
    }


def one_file(table: str, scratch: str, spark: SparkSession) -> dict[str, float]:
    """The scan times of the same rows in one file."""
    rows = pa.table(QueryBuilder().register("t", DeltaTable(table)).execute("SELECT * FROM t"))
    write_deltalake(f"{scratch}/one", rows)
    return scan_times(f"{scratch}/one", spark)


def scan_times(table: str, spark: SparkSession) -> dict[str, float]:
    """Median milliseconds of a scan of three columns with the opening of the table, by reader."""
    query = "SELECT max(revision), min(key), max(value) FROM t"

    def deltalake() -> None:
        QueryBuilder().register("t", DeltaTable(table)).execute(query).read_all()

    def by_duckdb() -> None:
        with duckdb.connect() as connection:
            connection.register("t", DeltaTable(table).scan())
            connection.execute(query).fetchall()

    def by_polars() -> None:
        frame = polars.scan_delta(table)
        columns = [polars.max("revision"), polars.min("key"), polars.max("value")]
        frame.select(columns).collect()

    def by_spark() -> None:
        spark.read.format("delta").load(table).createOrReplaceTempView("t")
        spark.sql(query).collect()

    found = {}
    readers = {"deltalake": deltalake, "DuckDB": by_duckdb, "polars": by_polars, "Spark": by_spark}
    for name, scan in readers.items():
        taken = []
        for _ in range(_SCANS):
            began = time.perf_counter()
            scan()
            taken.append(time.perf_counter() - began)
        found[name] = float(np.median(taken)) * 1e3
    return found
