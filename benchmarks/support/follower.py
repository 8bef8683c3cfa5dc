"""The command ``follow``: latency of its table, its work, and what readers of the table pay."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars
import psutil
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from benchmarks.support.bucket_data import entries, fill_bucket
from benchmarks.support.machine import OtherProcesses, cpu_seconds, in_process
from nats_stream_source.embedded import NatsServer

_SIZE = 128  # bytes of a value
_IDLE = 10.0  # seconds
_DEADLINE = 300.0  # seconds until the table has the bucket
_SCANS = 15

Put = Callable[[int, int, int, int, Path], None]
"""Puts entries: port, rate, keys, count, and the file for the times of the puts."""


@contextlib.contextmanager
def running(
    url: str, table: str, store: Mapping[str, str], *words: str
) -> Iterator[subprocess.Popen[bytes]]:
    """The command, which is stopped at the end of the block."""
    options = itertools.chain(*(("--storage-option", f"{k}={v}") for k, v in store.items()))
    command = [sys.executable, "-m", "nats_stream_source", "follow", "bench", table]
    process = subprocess.Popen(
        [*command, "--servers", url, "--no-context", *options, *words], stdout=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def has_rows(table: str, store: Mapping[str, str], rows: int) -> bool:
    """Whether a table has a number of rows, by the statistics of its files."""
    if not DeltaTable.is_deltatable(table, dict(store) or None):
        return False
    actions = DeltaTable(table, storage_options=dict(store) or None).get_add_actions(flatten=True)
    return sum(pa.table(actions)["num_records"].to_pylist()) >= rows


def measure_follower(
    put: Put,
    watching: Callable[..., Any],
    latencies: Callable[..., np.ndarray],
    rate: int,
    keys: int,
    seconds: float,
    *,
    interval: float | None = None,
    store: tuple[str, Mapping[str, str]] = ("", {}),
    read: bool = False,
) -> dict[str, Any]:
    """Follow a bucket of ``keys`` keys while ``rate`` entries a second are put for ``seconds``.

    Args:
        put, watching, latencies: of ``benchmarks.freshness``.
        interval: the shortest time between two commits; None for the default.
        store: URI of a directory and the options of an object store; empty for a local disk.
        read: whether the table is read too, while it is written and afterwards.
    """
    count = int(rate * seconds)
    with NatsServer() as server, tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        table, times = f"{store[0] or scratch}/table-{keys}-{rate}", Path(scratch, "times.npy")
        first = fill_bucket(server.port, "bench", entries(keys, keys, _SIZE), history=1) + 1
        words = [] if interval is None else ["--commit-interval", str(interval)]
        began = time.monotonic()
        with running(server.url, table, store[1], *words) as process:
            while not has_rows(table, store[1], keys):
                if time.monotonic() - began > _DEADLINE or process.poll() is not None:
                    raise RuntimeError("the follower did not catch up")
                time.sleep(0.05)
            caught_up = time.monotonic() - began
            version = DeltaTable(table, storage_options=dict(store[1]) or None).version()
            with OtherProcesses() as others, watching("follow", table, first + count - 1) as seen:
                cpu = cpu_seconds(process.pid)
                in_process(put, server.port, rate, keys, count, times)
                visible = seen()
                cpu = cpu_seconds(process.pid) - cpu
            commits = DeltaTable(table, storage_options=dict(store[1]) or None).version() - version
            scans: dict[str, float] = {}
            if read:
                reader = threading.Thread(target=lambda: scans.update(scan_times(table)))
                reader.start()
                in_process(put, server.port, rate, keys, count, Path(scratch, "later.npy"))
                reader.join()
            idle = cpu_seconds(process.pid)
            time.sleep(_IDLE)
            idle = cpu_seconds(process.pid) - idle
            peak = psutil.Process(process.pid).memory_info().rss
            status = Path(f"/proc/{process.pid}/status")
            if status.exists():  # Linux
                (line,) = (one for one in status.read_text().splitlines() if "VmHWM" in one)
                peak = int(line.split()[1]) << 10
        taken = latencies(np.load(times), first, visible)
        p50, p99 = np.percentile(taken[count // 4 :], [50, 99])
        readers: dict[str, Any] = {}
        if read:
            readers = {"written": scans, "rest": scan_times(table), "one": one_file(table, scratch)}
            readers["files"] = len(pa.table(DeltaTable(table).get_add_actions()))
    return {
        "way": "follow",
        "keys": keys,
        "rate": rate,
        "entries": count,
        "p50": float(p50),
        "p99": float(p99),
        "behind": float(taken[-1]) / 1000,
        "memory": peak,
        "others": others.as_dict(),
        "caught_up": caught_up,
        "cpu": cpu / seconds,
        "idle": idle / _IDLE,
        "commits": commits,
        "store": bool(store[1]),
        "readers": readers,
    }


def one_file(table: str, scratch: str) -> dict[str, float]:
    """The scan times of the same rows in one file."""
    rows = pa.table(QueryBuilder().register("t", DeltaTable(table)).execute("SELECT * FROM t"))
    write_deltalake(f"{scratch}/one", rows)
    return scan_times(f"{scratch}/one")


def scan_times(table: str) -> dict[str, float]:
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

    found = {}
    for name, scan in (("deltalake", deltalake), ("DuckDB", by_duckdb), ("polars", by_polars)):
        taken = []
        for _ in range(_SCANS):
            began = time.perf_counter()
            scan()
            taken.append(time.perf_counter() - began)
        found[name] = float(np.median(taken)) * 1e3
    return found
