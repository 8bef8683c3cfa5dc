"""How cost grows with messages, with splits and with keys: time, requests, memory.

``python -m benchmarks.growth [--quick] [--json FILE]``

Runs without Spark, through the interface that Spark calls. One process plans the query's only
micro-batch (``initialOffset``, ``latestOffset``, ``partitions``); then one process per core reads
splits from a common queue. The server counts the requests. Memory is the maximum resident size of a
process; ``base`` is its resident size before the first call.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.util
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType
from rich.console import Console
from rich.table import Table

from benchmarks.support.bucket_data import entries, fill_bucket
from benchmarks.support.machine import OtherProcesses, machine
from nats_stream_source.embedded import NatsServer, free_port
from nats_stream_source.spark.datasource import NatsKvDataSource
from nats_stream_source.spark.runner import close_cached_runners
from nats_stream_source.spark.stream_reader import StreamReader

MESSAGES = (100_000, 1_000_000, 10_000_000)
SPLITS = (1, 4, 16, 64)
KEYS = (1, 1_000, 1_000_000)
_ROWS = 1_000_000  # where something else varies
_KEYS = 1_000

Splits = list[InputPartition]


@dataclass(frozen=True, slots=True)
class Planned:
    """What planning took: seconds, the process's bytes before and at most, the splits."""

    seconds: float
    base: int
    peak: int
    splits: Splits


@dataclass(frozen=True, slots=True)
class Read:
    """What one process read in one task: rows, and its bytes before and at most."""

    rows: int
    base: int
    peak: int


@dataclass(frozen=True, slots=True)
class Result:
    """Sizes of the case, seconds and requests of planning, seconds of reading, bytes of memory.

    There were ``splits`` where ``asked`` were asked for; 1 leaves the number to the planner.
    """

    rows: int
    keys: int
    asked: int
    splits: int
    plan_seconds: float
    plan_requests: int
    plan_base: int
    plan_peak: int
    read_seconds: float
    read_base: int
    read_peak: int
    others: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure(rows: int, keys: int, splits: Sequence[int]) -> list[Result]:
    """Fill a bucket that keeps everything, then plan and read all of it for each of ``splits``."""
    monitoring = free_port()
    results = []
    with NatsServer(args=["-m", str(monitoring)]) as server:
        fill_bucket(server.port, "bench", entries(rows, keys), history=-1)
        options = {"servers": server.url, "bucket": "bench", "includeHistory": "true"}
        for wanted in splits:
            asked = {**options, "minPartitions": str(wanted)} if wanted > 1 else options
            with OtherProcesses() as others:
                results.append(_one(asked, rows, keys, wanted, monitoring))
            results[-1].others.update(others.as_dict())
    return results


def _one(options: dict[str, str], rows: int, keys: int, wanted: int, monitoring: int) -> Result:
    before = _requests(monitoring)
    with _pool(1) as pool:
        planned = pool.submit(plan, options).result()
    requests = _requests(monitoring) - before
    workers = machine().cores
    with _pool(workers) as pool:
        # Processes start, import and connect before the clock does.
        list(pool.map(_ready, [0.3] * workers))
        began = time.perf_counter()
        reads = list(pool.map(read, [options] * len(planned.splits), planned.splits))
        seconds = time.perf_counter() - began
    taken = sum(one.rows for one in reads)
    if taken != rows:
        raise RuntimeError(f"{taken:,} rows of {rows:,} in {len(planned.splits)} splits")
    return Result(
        rows=rows,
        keys=keys,
        asked=wanted,
        splits=len(planned.splits),
        plan_seconds=planned.seconds,
        plan_requests=requests,
        plan_base=planned.base,
        plan_peak=planned.peak,
        read_seconds=seconds,
        # A process's later tasks begin with what the first one left.
        read_base=min(one.base for one in reads),
        read_peak=max(one.peak for one in reads),
        others={},
    )


def _pool(workers: int) -> Executor:
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


def _reader(options: dict[str, str]) -> StreamReader:
    return NatsKvDataSource(options).streamReader(StructType())


def plan(options: dict[str, str]) -> Planned:
    """Plan a query's first micro-batch, as Spark asks for it, on a connection that is open."""
    reader = _reader(options)
    try:
        start = reader.initialOffset()
        base, began = _peak_bytes(), time.perf_counter()
        end = reader.latestOffset(start, ReadAllAvailable())
        splits = reader.partitions(start, end)
        return Planned(time.perf_counter() - began, base, _peak_bytes(), list(splits))
    finally:
        reader.stop()


def read(options: dict[str, str], split: InputPartition) -> Read:
    """Read one split, as a task does."""
    base = _peak_bytes()
    rows = sum(batch.num_rows for batch in _reader(options).read(split))
    return Read(rows, base, _peak_bytes())


def _ready(seconds: float) -> None:
    # The reader keeps its connection for the process's next task; a worker of ours ends in order.
    multiprocessing.util.Finalize(None, close_cached_runners, exitpriority=10)
    # Long enough for every process of the pool to take one of these.
    time.sleep(seconds)


def _peak_bytes() -> int:
    """The most memory that this process ever had resident (Linux)."""
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _requests(monitoring: int) -> int:
    """How many messages the server has received from clients."""
    with urllib.request.urlopen(f"http://127.0.0.1:{monitoring}/varz", timeout=10) as answer:
        return int(json.load(answer)["in_msgs"])


def table(results: Sequence[Result]) -> Table:
    """The results for a terminal."""
    shown = Table("rows", "keys", "splits", "planning", "requests", "memory", "reading", "memory")
    for one in results:
        shown.add_row(
            f"{one.rows:,}",
            f"{one.keys:,}",
            str(one.splits),
            f"{one.plan_seconds * 1000:.0f} ms",
            str(one.plan_requests),
            f"{one.plan_base >> 20} + {one.plan_peak - one.plan_base >> 20} MiB",
            f"{one.rows / one.read_seconds:,.0f}/s",
            f"{one.read_base >> 20} + {one.read_peak - one.read_base >> 20} MiB",
        )
    return shown


def measure_all(scale: float = 1.0) -> list[Result]:
    """Every case: messages, splits, keys; ``scale`` makes them smaller."""
    results = []
    for rows in MESSAGES:
        results += measure(int(rows * scale), max(int(_KEYS * scale), 1), (1,))
    results += measure(int(_ROWS * scale), max(int(_KEYS * scale), 1), SPLITS[1:])
    for keys in KEYS:
        if keys != _KEYS:
            results += measure(int(_ROWS * scale), max(int(keys * scale), 1), (1,))
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write JSON if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a hundredth of the messages")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    host = machine()
    console.print(str(host))
    results = measure_all(0.01 if options.quick else 1.0)
    console.print(table(results))
    if options.json is not None:
        shown = {"machine": host.as_dict(), "growth": [one.as_dict() for one in results]}
        options.json.write_text(json.dumps(shown, indent=1) + "\n")


if __name__ == "__main__":
    main()
